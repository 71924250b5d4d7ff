"""The engine that the tests of `AsyncLLM` share, and how they run on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from faulty_processor import NAME
from small_engines import SMALL

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.sampling.params import SamplingParams

ENGINE: dict[str, Any] = SMALL | {
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "num_blocks": 256,
    "logits_processors": [NAME],
}
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

Result = TypeVar("Result")


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def run(main: Awaitable[Result]) -> Result:
    async def bounded() -> Result:
        async with asyncio.timeout(120):
            return await main

    return asyncio.run(bounded())


async def idle(engine: AsyncLLM) -> dict[str, Any]:
    """Wait until the core has processed all messages; assert that it then holds nothing. Returns its metrics."""
    metrics = await engine.metrics()
    assert (metrics["running"], metrics["waiting"]) == (0, 0)
    assert metrics["blocks_free"] == metrics["blocks_total"]
    assert engine.num_unfinished == 0
    return metrics
