"""The executor: the engine core's interface to the runners, one per rank, which compute each step.

`Executor` is the interface, `InProcessExecutor` its implementation for a single rank in this process. The package
`processes` has the implementations for ranks in other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import apply
from compiled_engine.engine.messages import ControlCall, LateInputs, RunnerOutput, SchedulerOutput
from compiled_engine.engine.runner import Runner
from compiled_engine.engine.step_hooks import MakeFeatures
from compiled_engine.kernels.compile_ahead import triton_digests
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import LayerShare
from compiled_engine.passes.registry import check_registered, load_plugins
from compiled_engine.process.forks import begin_to_compute
from compiled_engine.process.init_cuda import cuda_context
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory


class Executor(Protocol):
    """Has the runners of all ranks execute steps. num_blocks: number of KV cache blocks."""

    num_blocks: int

    def submit(self, step: SchedulerOutput) -> PendingOutput:
        """Submit a step, which runs after the steps submitted before, and return its pending result.

        Does not wait for the device. Raises errors that occur before or during the launch.
        """
        ...

    def sample(self, late: LateInputs) -> None:
        """Launch the sampling of the last submitted step, which has waited for these inputs (`samples_late` was set).

        Call it before the next `submit`.
        """
        ...

    def call(self, call: ControlCall) -> list[Any]:
        """Have all ranks serve a control call, one of Runner.calls, after the submitted steps.

        Returns the result of each rank. Raises ControlError if a rank raises it.
        """
        ...

    def metrics(self) -> dict[str, Any]:
        """Return the metrics, by name, of the runner on the rank that samples."""
        ...

    def close(self) -> None: ...


class PendingOutput(Protocol):
    """The result of a submitted step."""

    def result(self) -> RunnerOutput:
        """Wait for the step to end, and return its result. Call it once. Raises errors of the execution."""
        ...


class InProcessExecutor:
    """Executes steps with a runner in this process."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress,
        timeline: Timeline,
        clock: StepClock,
        make_features: MakeFeatures,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory] = (),
        group: Group | None = None,
        share: LayerShare | None = None,
    ):
        """Load the model and build the runner. group, share: see Runner."""
        load_plugins(config.compile.plugins)
        check_registered(config.compile.passes)
        begin_to_compute(leaves_threads=config.device.type == "cuda" or torch.get_num_threads() > 1)
        self._device = config.device
        if config.device.type == "cuda":  # in the background, while the model is compiled or loaded
            cuda_context(config.device.index or 0)
            triton_digests(config.device)
        with self._own_context():
            self.runner = Runner(config, progress, timeline, clock, make_features, logits_processors, group, share)
        self.num_blocks = self.runner.num_blocks

    def submit(self, step: SchedulerOutput) -> PendingOutput:
        with self._own_context():
            return self.runner.submit(step)

    def sample(self, late: LateInputs) -> None:
        with self._own_context():
            self.runner.sample(late)

    def call(self, call: ControlCall) -> list[Any]:
        with self._own_context():
            return [apply(call, self.runner.calls)]

    def metrics(self) -> dict[str, Any]:
        (metrics,) = self.call(ControlCall("metrics"))
        return dict(metrics)

    def close(self) -> None:
        with self._own_context():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # no running step may lose its memory
            self.runner.close()

    def _own_context(self) -> AbstractContextManager[object]:
        """Make the engine's device current and switch autocast off; return a context whose exit undoes both.

        Use the result in a `with` statement.
        """
        kind = self._device.type
        with ExitStack() as contexts:
            if kind == "cuda":
                contexts.enter_context(torch.cuda.device(self._device))
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
            return contexts.pop_all()
