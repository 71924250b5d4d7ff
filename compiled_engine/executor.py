"""How the engine core reaches its runner or runners."""

from __future__ import annotations

from typing import Any, Protocol

from compiled_engine.config import EngineConfig
from compiled_engine.progress import Progress
from compiled_engine.runner.model_runner import Runner
from compiled_engine.scheduling.step import RunnerOutput, SchedulerOutput


class Executor(Protocol):
    """One or more runners that execute each step together."""

    num_blocks: int

    def execute(self, step: SchedulerOutput) -> RunnerOutput: ...

    def metrics(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class InProcessExecutor:
    """A single runner in this process."""

    def __init__(self, config: EngineConfig, progress: Progress):
        self._runner = Runner(config, progress)
        self.num_blocks = self._runner.num_blocks

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        return self._runner.execute(step)

    def metrics(self) -> dict[str, Any]:
        return self._runner.metrics()

    def close(self) -> None:
        self._runner.close()
