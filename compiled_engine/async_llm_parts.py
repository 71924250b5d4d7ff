"""Make the parts of an `AsyncLLM`, after starting or joining its core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.frontend.generation_config import read_default_sampling_params
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.request_stream import RequestStreams, connect
from compiled_engine.frontend.tokenizer import Tokenizer, find_tokenizer_folder, load_tokenizer
from compiled_engine.frontend_parts import FrontendParts, make_frontend
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_child import CoreChild, ForeignCore, RunningCore
from compiled_engine.processes.core_client import CoreClient, wait_started
from compiled_engine.processes.run_core import CoreThread
from compiled_engine.processes.wire import FrontendOptions, Start, Started, ToApi, encode
from compiled_engine.resolve.engine import resolve, warn_if_eager

CoreKind = Literal["process", "in_process"]
CORE_KINDS: tuple[str, ...] = get_args(CoreKind)
_EXIT_S = 30.0


@dataclass(frozen=True)
class AsyncLLMParts:
    """The parts of an `AsyncLLM`: frontend, core, the client of the core, and the streams of requests."""

    frontend: FrontendParts
    core: RunningCore
    client: CoreClient
    streams: RequestStreams
    given: dict[str, Any]  # PreparedRequest.given by engine request, put here before the request is sent


def start_engine(options: dict[str, Any], core: CoreKind | CoreChild, *, progress: bool) -> AsyncLLMParts:
    """Start a core, wait until it is ready, and return the parts of an `AsyncLLM` that uses it.

    `options` are the keyword arguments of `LLM`; `core` is that of `AsyncLLM`. Raises the errors of `AsyncLLM`.
    """
    timeline = Timeline()
    timeline.add("before the engine", 0.0, timeline.now())  # the interpreter, imports, and what the caller did
    running = _launch(core, options)
    try:
        given = make_options(options)
        names = _names(given.logits_processors) if isinstance(running, CoreChild) else ()
        with timeline.span("configuration"):
            config = resolve(given, RichProgress() if progress else SilentProgress())
        warn_if_eager(given, config)
        start = Start(
            config=config,
            frontend=FrontendOptions(given.skip_tokenizer_init, given.generation_config),
            logits_processors=names,
            num_threads=torch.get_num_threads(),
            progress=progress,
            origin_s=timeline.origin_s,
            spans=tuple(timeline.spans),
        )
        beside_requests: dict[str, Any] = {}
        if isinstance(running, CoreThread):
            running.start(start, given.logits_processors, beside_requests)
        else:
            running.start(frame(encode(start)))
        tokenizer = _find_tokenizer(config, start.frontend)  # while the core starts
        return _assemble(running, *wait_started(running), tokenizer, beside_requests)
    except BaseException:
        running.close(_EXIT_S)
        raise


def join_engine(address: str | os.PathLike[str]) -> AsyncLLMParts:
    """Return the parts of an `AsyncLLM` that uses the core at `address`, which another process has started.

    Raises OSError if no core listens there, EngineDeadError if the core ends meanwhile.
    """
    running = ForeignCore(address)
    try:
        connection, started = wait_started(running)
        return _assemble(running, connection, started, _find_tokenizer(started.config, started.frontend), {})
    except BaseException:
        running.close(_EXIT_S)
        raise


def _assemble(
    core: RunningCore,
    connection: Connection[ToApi],
    started: Started,
    tokenizer: Tokenizer | None,
    given: dict[str, Any],
) -> AsyncLLMParts:
    streams = RequestStreams(OutputProcessor(tokenizer))
    config, options = started.config, started.frontend
    is_here = isinstance(core, CoreThread) and not config.parallel.has_replicas
    frontend = make_frontend(
        config,
        started.limits,
        tokenizer,
        read_default_sampling_params(config.model.path, options.generation_config),
        objects_allowed="" if is_here else "unless core is 'in_process'",
        id_prefix=f"{started.client}:",
    )
    return AsyncLLMParts(frontend, core, connect(core, connection, streams), streams, given)


def _launch(core: CoreKind | CoreChild, options: Mapping[str, Any]) -> CoreChild | CoreThread:
    if isinstance(core, CoreChild):
        return core
    if core not in CORE_KINDS:
        raise ValueError(f"core is {core!r}; allowed: {', '.join(CORE_KINDS)}, or a CoreChild")
    return CoreChild.of(options) if core == "process" else CoreThread()


def _find_tokenizer(config: EngineConfig, options: FrontendOptions) -> Tokenizer | None:
    folder = None if options.skip_tokenizer_init else find_tokenizer_folder(config.tokenizer, config.model.path)
    return load_tokenizer(folder) if folder else None


def _names(logits_processors: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of logits processors. Raises ValueError if one is an object instead of a name."""
    for index, given in enumerate(logits_processors):
        if not isinstance(given, str):
            raise ValueError(
                f"logits_processors[{index}] is {given!r}, which cannot be given to another process; allowed:"
                " 'package.module:Name', or any with core='in_process'"
            )
    return logits_processors
