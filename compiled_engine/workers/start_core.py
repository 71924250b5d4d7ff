"""Start an engine core with the executor that its configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.config import EngineConfig
from compiled_engine.core.engine_core import EngineCore
from compiled_engine.core.executor import Executor, InProcessExecutor
from compiled_engine.process.garbage_collection import young_collected_alone
from compiled_engine.process.progress import Progress, SilentProgress
from compiled_engine.process.step_clock import StepClock
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory, resolve_logits_processors
from compiled_engine.workers.launched_workers import LaunchedWorkers
from compiled_engine.workers.multiprocess_executor import MultiprocessExecutor


def start_core(
    config: EngineConfig,
    progress: Progress,
    logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory | str] = (),
    timeline: Timeline | None = None,
    workers: LaunchedWorkers | None = None,
) -> EngineCore:
    """A core, ready to serve. Raises what `Runner` raises; of workers in processes of their own WorkerError.

    logits_processors: objects or "package.module:Name"; for workers the names alone. timeline: holds the stages of the
    start so far, and gets those of the core. workers: launched before, for this configuration or another; the core ends
    them with itself, or, if it has no use for them, at once.
    """
    timeline, clock = timeline or Timeline(), StepClock(config.device)
    start_s = timeline.now()
    executor: Executor
    if workers is not None and not workers.fit(config):
        workers.close()
        workers = None
    with young_collected_alone():
        if config.parallel.executor == "multiprocess":
            names = [given for given in logits_processors if isinstance(given, str)]
            executor = MultiprocessExecutor(
                config,
                LaunchedWorkers.of(config) if workers is None else workers,
                timeline,
                names,
                progress=not isinstance(progress, SilentProgress),
            )
        else:
            found = resolve_logits_processors(tuple(logits_processors))
            executor = InProcessExecutor(config, progress, timeline, clock, found)
    return EngineCore(config, executor, clock, timeline.now() - start_s)
