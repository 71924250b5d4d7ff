"""The runner of an engine in this process."""

from __future__ import annotations

from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.engine.runner import Runner
from compiled_engine.llm import LLM


def runner_of(engine: LLM | EngineCore) -> Runner:
    executor = (engine.core if isinstance(engine, LLM) else engine).executor
    assert isinstance(executor, InProcessExecutor)
    return executor.runner
