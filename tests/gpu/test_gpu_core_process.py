"""The engine core in a process or thread of its own, on a GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "progress": False,
    "num_blocks": 4096,
    "max_num_seqs": 16,
}
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self", "import os\n"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2),
    SamplingParams(temperature=1.2, seed=4, max_tokens=24, top_k=50, stop=["return"]),
]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM(**OPTIONS) as llm:
        pairs = zip(PROMPTS, PARAMS, strict=True)
        return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in pairs]


@pytest.mark.parametrize("core", ["process", "in_process"])
def test_tokens_are_those_of_llm(core: Any, expected: list[RequestOutput]) -> None:
    """One after the other, so that batches are the same; then many at once, which replay graphs."""

    async def final(engine: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
        async for output in engine.generate(prompt, params, output="final"):
            return output
        raise AssertionError

    async def main() -> None:
        engine = await AsyncLLM.start(**OPTIONS, core=core)
        for prompt, params, want in zip(PROMPTS, PARAMS, expected, strict=True):
            assert (await final(engine, prompt, params)).outputs == want.outputs
        outputs = await asyncio.gather(*(final(engine, prompt, params) for prompt in PROMPTS * 20 for params in PARAMS))
        assert all(output.finished for output in outputs)
        metrics = await engine.metrics()
        assert metrics["graph_replays"] > 0
        assert metrics["blocks_free"] == metrics["blocks_total"]
        await engine.shutdown()

    asyncio.run(main())
