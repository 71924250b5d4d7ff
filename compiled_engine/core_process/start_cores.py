"""Start one engine core in this process, or several replicas in processes of their own, as the configuration says."""

from __future__ import annotations

import select
from collections.abc import Sequence

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.core.engine_core import EngineCore
from compiled_engine.core_process.core_child import CoreChild
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.replica import Replica
from compiled_engine.core_process.replicas import Replicas
from compiled_engine.core_process.started import wait_started
from compiled_engine.core_process.wire import FrontendOptions, Start, encode
from compiled_engine.process.progress import Progress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory
from compiled_engine.workers.start_core import start_core
from compiled_engine.workers.worker_child import visible_gpus


def start_cores(
    config: EngineConfig,
    progress: Progress,
    logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory | str] = (),
    timeline: Timeline | None = None,
) -> EngineCore | Replicas:
    """See start_core. Replicas start side by side; the lock of the compile cache has one of them build the entry, and
    the others load it. Raises what the first of them raises that cannot start."""
    timeline = timeline or Timeline()
    if config.parallel.data_parallel_size == 1:
        return start_core(config, progress, logits_processors, timeline)
    names = tuple(given for given in logits_processors if isinstance(given, str))
    return _start_replicas(config, names, timeline, shows_progress=not isinstance(progress, SilentProgress))


def _start_replicas(
    config: EngineConfig, processors: tuple[str, ...], timeline: Timeline, *, shows_progress: bool
) -> Replicas:
    count, start_s = config.parallel.data_parallel_size, timeline.now()
    children: list[CoreChild] = []
    try:
        for number in range(count):
            children.append(CoreChild(_device(config), _environment(config, number)))
        for number, child in enumerate(children):
            start = Start(
                config=config.of_replica,
                frontend=FrontendOptions(skip_tokenizer_init=True, generation_config="none"),
                logits_processors=processors,
                num_threads=max(1, torch.get_num_threads() // count),
                progress=shows_progress and number == 0,
                origin_s=timeline.origin_s,
                spans=tuple(timeline.spans),
            )
            child.start(frame(encode(start)))
        replicas = _wait_started(children)
    except BaseException:
        for child in children:
            child.close(0)
        raise
    seconds = timeline.now() - start_s
    timeline.add("replicas", start_s, seconds)
    return Replicas(config, replicas, seconds)


def _wait_started(children: Sequence[CoreChild]) -> list[Replica]:
    """In whatever order they are ready, so that one that cannot start is heard of at once."""
    poll = select.poll()
    waiting = {child.socket.fileno(): number for number, child in enumerate(children)}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    found: list[Replica] = []
    while waiting:
        for descriptor, _ in poll.poll():
            poll.unregister(descriptor)
            number = waiting.pop(descriptor)
            name = f"replica {number} of {len(children)}"
            try:
                connection, started = wait_started(children[number])
            except Exception as error:
                error.add_note(f"in {name}")
                raise
            found.append(Replica(number, name, children[number], connection, started.limits.num_slots))
    return sorted(found, key=lambda replica: replica.number)


def _device(config: EngineConfig) -> str:
    """The device whose context the replica's process makes while it imports; none where workers have the devices."""
    return config.device.type if config.parallel.executor == "in_process" else "cpu"


def gpus_of_replica(config: EngineConfig, number: int) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; empty on a CPU."""
    if config.device.type != "cuda":
        return []
    share = config.parallel.devices_per_replica
    return visible_gpus(share * config.parallel.data_parallel_size)[share * number : share * (number + 1)]


def _environment(config: EngineConfig, number: int) -> dict[str, str]:
    """Its own GPUs, which are the first that it sees."""
    gpus = gpus_of_replica(config, number)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
