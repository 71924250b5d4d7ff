"""Start one engine core in this process, or several replicas in other processes, depending on the configuration."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.executor import Executor, InProcessExecutor
from compiled_engine.features.registry import make_features, open_block_files, plan_features
from compiled_engine.process.memory import no_full_gc
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import Progress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.channel import frame
from compiled_engine.processes.core_child import CoreChild, RunningCore, device_of_core
from compiled_engine.processes.core_client import wait_started
from compiled_engine.processes.multiprocess_executor import MultiprocessExecutor
from compiled_engine.processes.ranks import LaunchedWorkers, visible_gpus
from compiled_engine.processes.replica import Replica
from compiled_engine.processes.replicas import Replicas
from compiled_engine.processes.wire import FrontendOptions, Start, encode
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory, resolve_logits_processors


def start_core(
    config: EngineConfig,
    progress: Progress,
    logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory | str] = (),
    timeline: Timeline | None = None,
) -> EngineCore:
    """Start a core in this process, and its worker processes if it has several ranks. Return the core when it is ready.

    `logits_processors` are objects or "package.module:Name"; worker processes get only the names. The stages of the
    core's start are added to `timeline`. Raises ValueError if a folder for files of the KV cache cannot be used, the
    errors of `Runner`, or WorkerError if a worker process fails.
    """
    timeline, clock = timeline or Timeline(), StepClock(config.device)
    start_s = timeline.now()
    executor: Executor
    with ExitStack() as if_it_fails:
        with no_full_gc():
            files = open_block_files(config)  # before weights are read, which may take minutes
            if files is not None:
                if_it_fails.callback(files.close)
            if config.parallel.executor == "multiprocess":
                names = [given for given in logits_processors if isinstance(given, str)]
                executor = MultiprocessExecutor(
                    config,
                    LaunchedWorkers.of(config),
                    timeline,
                    names,
                    progress=not isinstance(progress, SilentProgress),
                )
            else:
                found = resolve_logits_processors(tuple(logits_processors))
                executor = InProcessExecutor(config, progress, timeline, clock, make_features(), found)
        features = plan_features(config, executor, files)
        core = EngineCore(config, executor, clock, timeline.now() - start_s, features=features)
        if_it_fails.pop_all()
    return core


def start_cores(
    config: EngineConfig,
    progress: Progress,
    logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory | str] = (),
    timeline: Timeline | None = None,
) -> EngineCore | Replicas:
    """Start one core (see `start_core`) or several replicas, and return the core or the replicas.

    Replicas start in parallel. Because of the compile cache's lock, one replica builds the cache entry, and the others
    load it. Raises the error of the first replica that cannot start.
    """
    timeline = timeline or Timeline()
    if not config.parallel.has_replicas:
        return start_core(config, progress, logits_processors, timeline)
    names = tuple(given for given in logits_processors if isinstance(given, str))
    return _start_replicas(config, names, timeline, shows_progress=not isinstance(progress, SilentProgress))


class LaunchedCore(RunningCore, Protocol):
    """A launched core that waits for its Start message."""

    def start(self, frame: bytes) -> None:
        """Send the Start message. frame: the message, encoded."""
        ...

    def clock_ahead_s(self) -> float:
        """Return by how many seconds this machine's time.perf_counter is ahead of the core's."""
        ...


def _start_replicas(
    config: EngineConfig, processors: tuple[str, ...], timeline: Timeline, *, shows_progress: bool
) -> Replicas:
    count, start_s = config.parallel.data_parallel_size, timeline.now()
    cores: list[LaunchedCore] = []
    when_ended: Callable[[], None] = lambda: None  # noqa: E731
    try:
        when_ended = _launch(config, cores)
        for number, core in enumerate(cores):
            start = Start(
                config=config.of_replica(number),
                frontend=FrontendOptions(skip_tokenizer_init=True, generation_config="none"),
                logits_processors=processors,
                num_threads=max(1, torch.get_num_threads() // count),
                progress=shows_progress and number == 0,
                origin_s=timeline.origin_s,
                spans=tuple(timeline.spans),
            )
            core.start(frame(encode(start)))
        replicas = _wait_started(cores)
    except BaseException:
        for core in cores:
            core.close(0)
        when_ended()
        raise
    seconds = timeline.now() - start_s
    timeline.add("replicas", start_s, seconds)
    return Replicas(config, replicas, seconds, when_ended)


def _launch(config: EngineConfig, cores: list[LaunchedCore]) -> Callable[[], None]:
    """Launch a core for each replica and append it to `cores`. Return a function to call when all cores have ended."""
    if config.parallel.executor == "ray":
        from compiled_engine.processes.ray_replicas import RayCluster  # needs an optional package

        cluster = RayCluster(config)
        cores += cluster.cores
        return cluster.close
    for number in range(config.parallel.data_parallel_size):
        cores.append(CoreChild(device_of_core(config), _environment(config, number)))
    return lambda: None


def _wait_started(cores: Sequence[LaunchedCore]) -> list[Replica]:
    """Wait until all cores are ready, and return a Replica for each, in order.

    If a start fails, its error is raised at once.
    """
    poll = select.poll()
    waiting = {core.socket.fileno(): number for number, core in enumerate(cores)}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    found: list[Replica] = []
    while waiting:
        for descriptor, _ in poll.poll():
            poll.unregister(descriptor)
            number = waiting.pop(descriptor)
            name = f"replica {number} of {len(cores)}"
            try:
                connection, started = wait_started(cores[number])
            except Exception as error:
                error.add_note(f"in {name}")
                raise
            core = cores[number]
            found.append(Replica(number, name, core, connection, started.limits.num_slots, core.clock_ahead_s()))
    return sorted(found, key=lambda replica: replica.number)


def gpus_of_replica(config: EngineConfig, number: int) -> list[str]:
    """Return a replica's GPUs by their names in CUDA_VISIBLE_DEVICES; [] on a CPU."""
    if config.device.type != "cuda":
        return []
    share = config.parallel.devices_per_replica
    return visible_gpus(share * config.parallel.data_parallel_size)[share * number : share * (number + 1)]


def _environment(config: EngineConfig, number: int) -> dict[str, str]:
    """Return environment variables that show a replica only its own GPUs."""
    gpus = gpus_of_replica(config, number)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
