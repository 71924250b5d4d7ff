"""Weights from a trainer in another process: by CUDA IPC on one GPU, and over NCCL from another GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from async_engines import run
from old_and_new_weights import ENGINE, Bits, bits, folders, fresh, stored
from trainers import trainer

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.features.weight_updates.frontend.update_calls import Broadcast
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

__all__ = ["folders"]

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "mode": "graphed", "dtype": "bfloat16", "compile_workers": 0}
SAME = ("traces", "compiles", "captures")


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[Bits, Bits]:
    """The bits of the old weights, and of the new ones."""
    return fresh(folders[0], OPTIONS), fresh(folders[1], OPTIONS)


def test_shared_weights_have_the_bits_of_a_fresh_load(folders: tuple[Path, Path], expected: tuple[Bits, Bits]) -> None:
    """Those of the trainer's own tensors, and then in parts of one buffer; it changes both afterwards."""
    with LLM(folders[0], **ENGINE | OPTIONS) as llm, trainer(folders[1]) as sender:
        counts, places = llm.metrics(), [each.data_ptr() for each in stored(llm).values()]
        assert bits(llm) == expected[0]
        llm.update_weights(sender.shared("share"))
        assert bits(llm) == expected[1]
        llm.update_weights(folders[0])
        assert bits(llm) == expected[0]
        llm.start_weight_update()
        for part in range(3):
            llm.update_weights(sender.shared("pack", part, 3))
            assert bits(llm) == expected[0]
        sender.ask("spoil")
        llm.finish_weight_update("packed")
        assert bits(llm) == expected[1]
        assert [each.data_ptr() for each in stored(llm).values()] == places
        after = llm.metrics()
        assert {name: after[name] for name in SAME} == {name: counts[name] for name in SAME}


def test_shared_weights_that_do_not_fit_change_nothing(folders: tuple[Path, Path], expected: tuple[Bits, Bits]) -> None:
    with LLM(folders[0], **ENGINE | OPTIONS) as llm, trainer(folders[1]) as sender:
        with pytest.raises(ControlError, match="missing"):
            llm.update_weights(sender.shared("pack", 0, 2))
        shared = sender.shared("share")
        (storage,) = shared.storages[0].values()
        shared.storages[0] = {"GPU-other": storage}
        with pytest.raises(ControlError, match="cannot open memory of GPU-other"):
            llm.update_weights(shared)
        assert bits(llm) == expected[0]


@pytest.mark.gpu_pair
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_over_nccl_have_the_tokens_of_a_fresh_load(num_ranks: int, folders: tuple[Path, Path]) -> None:
    """In one message, and in a message a tensor. The trainer has the GPU behind those of the engine."""
    if torch.cuda.device_count() <= num_ranks:
        pytest.skip(f"needs {num_ranks + 1} GPUs")
    options = ENGINE | OPTIONS | {"dtype": "float32", "tensor_parallel_size": num_ranks}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = {"prompt_token_ids": [*range(3, 40)]}

    async def tokens(engine: AsyncLLM) -> list[int]:
        async for output in engine.generate(prompt, params, output="final"):
            return output.outputs[0].token_ids
        raise AssertionError("no output")

    async def fresh_tokens(folder: Path) -> list[int]:
        engine = await AsyncLLM.start(folder, **options)
        try:
            return await tokens(engine)
        finally:
            await engine.shutdown()

    async def main() -> None:
        expected = await fresh_tokens(folders[1])
        engine = await AsyncLLM.start(folders[0], **options)
        try:
            before = await tokens(engine)
            assert before != expected
            with trainer(folders[1], f"cuda:{num_ranks}") as sender:
                announced = sender.ask("announced")
                port = sender.ask("listen", num_ranks)
                sender.send("join")
                await engine.connect_weight_sender("127.0.0.1", port, world_size=num_ranks + 1, backend="nccl")
                assert sender.answer() is None
                for packed in (True, False):
                    sender.send("broadcast", packed)
                    await engine.update_weights(Broadcast(*announced, packed))
                    assert await asyncio.to_thread(sender.answer) is None
                    assert await tokens(engine) == expected
                    await engine.update_weights(folders[0])
                    assert await tokens(engine) == before
        finally:
            await engine.shutdown()

    run(main())
