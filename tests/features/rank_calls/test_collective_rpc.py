"""Calls of methods by name, and of functions on every rank, in this process and in others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_functions
from async_engines import run
from checkpoints import make_checkpoint
from old_and_new_weights import ENGINE, PARAMS, PROMPTS, bits, fresh, stored, tensors_in

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.features.rank_calls.frontend.collective_calls import REFUSED
from compiled_engine.features.weight_updates.frontend.update_calls import STATE
from compiled_engine.llm import LLM

OPTIONS: dict[str, Any] = ENGINE | {"enable_sleep_mode": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the old weights and the new ones, of a model that two ranks can share."""
    found = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for seed, folder in enumerate(found):
        make_checkpoint(folder, "llama", seed=seed, num_attention_heads=4, num_key_value_heads=2)
    return found


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(folders[0], **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[AsyncLLM]:
    """An engine with two ranks: core and ranks are in other processes."""
    engine = AsyncLLM(folders[0], **OPTIONS, tensor_parallel_size=2)
    yield engine
    asyncio.run(engine.shutdown())


def test_one_rank_calls_any_function_and_returns_any_object(llm: LLM) -> None:
    here: list[Any] = []
    result = object()

    def remember(rank: Any, value: Any, *, more: Any) -> object:
        here.append((rank.index, rank.num_ranks, rank.device.type, value, more))
        return result

    assert llm.collective_rpc(remember, args=(here,), kwargs={"more": llm}) == [result]
    assert here == [(0, 1, "cpu", here, llm)]
    expected = sum(tensor.numel() for tensor in stored(llm).values())
    assert llm.collective_rpc(rank_functions.num_elements) == [expected]
    assert llm.collective_rpc("rank_functions:num_elements") == [expected]
    assert [llm.collective_rpc(rank_functions.count) for _ in range(2)] == [[1], [2]]
    with pytest.raises(ControlError, match="does not support item assignment"):
        llm.collective_rpc(lambda rank: _set(rank.tensors))


def _set(tensors: Any) -> None:
    tensors["x"] = 1


def test_a_function_gives_the_weights_of_an_update(llm: LLM, folders: tuple[Path, Path]) -> None:
    before, new = bits(llm), str(folders[1])
    with pytest.raises(ControlError, match="no weight update is under way; start one first"):
        llm.collective_rpc(rank_functions.load, args=(new,))
    llm.collective_rpc("start_weight_update")
    (number,) = llm.collective_rpc(rank_functions.load, args=(new,))
    assert llm.core.call(STATE)["received"] == number > 10
    assert bits(llm) == before
    with pytest.raises(ControlError, match="a weight update is under way; finish it first"):
        llm.collective_rpc("reload_weights")
    assert llm.collective_rpc("finish_weight_update", kwargs={"version": "theirs"}) == ["theirs"]
    assert bits(llm) == fresh(folders[1], {})
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=([*tensors_in(folders[0]).items()][:3],))
    with pytest.raises(ControlError, match="ZeroDivisionError"):
        llm.collective_rpc(lambda rank: 1 // 0)
    assert llm.core.call(STATE)["received"] is None  # the update is dropped
    llm.collective_rpc("reload_weights")
    assert bits(llm) == before


def test_sleep_and_weights_by_their_names(llm: LLM, folders: tuple[Path, Path]) -> None:
    before = bits(llm)
    assert llm.collective_rpc("sleep", kwargs={"level": 2}) == [None]
    assert llm.collective_rpc("is_sleeping") == [True]
    llm.collective_rpc("wake_up", args=(["weights"],))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
    llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
    assert llm.collective_rpc("is_sleeping") == [False]
    assert bits(llm) == fresh(folders[1], {})
    assert llm.collective_rpc("reset_prefix_cache") == [True]
    assert llm.collective_rpc("reset_encoder_cache") == [None]
    llm.collective_rpc("reload_weights")
    assert bits(llm) == before


def test_what_cannot_be_called_is_refused_by_name(llm: LLM, engine: AsyncLLM) -> None:
    with pytest.raises(ValueError, match=r"timeout is 3; allowed: None"):
        llm.collective_rpc("is_sleeping", 3)
    with pytest.raises(ValueError, match=r"method is 'exit'; allowed: get_world_size, .* or a function"):
        llm.collective_rpc("exit")
    for name, why in REFUSED.items():
        with pytest.raises(ValueError, match=f"method is '{name}', ") as refused:
            llm.collective_rpc(name)
        assert why in str(refused.value)
    with pytest.raises(ControlError, match="which cannot be imported"):
        llm.collective_rpc("rank_functions:missing")

    async def main() -> None:
        with pytest.raises(ValueError, match="which other processes cannot import; allowed: a function of a module"):
            await engine.collective_rpc(lambda rank: 1)
        with pytest.raises(ValueError, match="args and kwargs must be plain data"):
            await engine.collective_rpc(rank_functions.describe, args=(object(),))
        with pytest.raises(ControlError, match="rank_functions:a_tensor returned Tensor; allowed: plain data"):
            await engine.collective_rpc(rank_functions.a_tensor)
        with pytest.raises(ValueError, match="timeout must be above 0, got 0"):
            await engine.collective_rpc("is_sleeping", 0)
        with pytest.raises(TimeoutError):
            await engine.collective_rpc(rank_functions.wait, 0.1, args=(1.0,))
        assert await engine.collective_rpc(rank_functions.wait, 60, args=(0.0,)) == ["waited"] * 2

    run(main())


def test_functions_of_modules_are_called_in_the_processes_of_ranks(
    engine: AsyncLLM, folders: tuple[Path, Path]
) -> None:
    async def tokens() -> list[int]:
        async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS, output="final"):
            return output.outputs[0].token_ids
        raise AssertionError("no output")

    async def main() -> None:
        assert await engine.collective_rpc("get_world_size") == [2, 2]
        found = await engine.collective_rpc(rank_functions.describe, args=("ab",), kwargs={"times": 2})
        assert found == [[0, 2, "cpu", "abab"], [1, 2, "cpu", "abab"]]
        before = await tokens()
        await engine.start_weight_update()
        with pytest.raises(ControlError, match=r"rank 1.*no weights here"):
            await engine.collective_rpc(rank_functions.load_on_one, args=(str(folders[1]),))
        with pytest.raises(ControlError, match="no weight update is under way"):
            await engine.finish_weight_update()
        assert await tokens() == before
        await engine.start_weight_update()
        numbers = await engine.collective_rpc("rank_functions:load", args=(str(folders[1]),))
        assert len(numbers) == 2
        assert numbers[0] == numbers[1] > 10
        await engine.finish_weight_update()
        assert await tokens() == fresh(folders[1], {})[0][0][0] != before

    run(main())
