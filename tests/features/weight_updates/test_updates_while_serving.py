"""Weights that change under requests: what these get, from which weights, and what a core in a process says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from async_engines import run
from old_and_new_weights import ENGINE, folders, stored, tensors_in
from torch.distributed import TCPStore

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.weight_updates.extras import SharedTensors
from compiled_engine.features.weight_updates.frontend import update_calls
from compiled_engine.features.weight_updates.plan import WeightUpdates
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

__all__ = ["folders"]

PROMPT = [*range(3, 40)]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with LLM(folder, **ENGINE) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["one step", "two steps in flight"])
def test_running_requests_continue_with_the_new_weights_alone(folders: tuple[Path, Path], options: Any) -> None:
    """The tokens after the update are those that the new weights give the tokens before it."""
    old, new = folders
    with LLM(old, **ENGINE | options) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
        for _ in range(7):
            output = next(stream)
        llm.update_weights(new)
        (*_, last) = stream
        llm.core.check_integrity()
        assert last.weight_version is None  # its first token is older than the first update
        (later,) = llm.generate({"prompt_token_ids": PROMPT}, LONG, use_tqdm=False)
        assert later.weight_version == "1"
        assert llm.metrics()["preemptions"] == 1
    tokens = last.outputs[0].token_ids
    known = len(output.outputs[0].token_ids) + (1 if options else 0)  # one was in flight
    assert tokens[:known] == greedy(old, PROMPT, known)
    assert tokens[known:] == greedy(new, PROMPT + tokens[:known], LONG.max_tokens - known)  # type: ignore[operator]
    assert later.outputs[0].token_ids == greedy(new, PROMPT, 40)


def test_keys_that_a_request_keeps_are_nobody_elses(folders: tuple[Path, Path]) -> None:
    """A request that keeps the old weights' keys ends as another one than a new request with its prompt, which finds
    none of its blocks; but later requests find those of the new weights."""
    old, new = folders
    with LLM(old, **ENGINE) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
        for _ in range(7):
            next(stream)
        llm.update_weights(new, recompute=False)
        (*_, last) = stream
        assert llm.metrics()["preemptions"] == 0
        prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT + last.outputs[0].token_ids}]
        for prompt in prompts:
            outputs = [llm.generate(prompt, LONG, use_tqdm=False)[0] for _ in range(2)]
            assert outputs[0].num_cached_tokens in (0, 32)  # of the second prompt, the blocks of the first one
            assert outputs[1].num_cached_tokens == (len(prompt["prompt_token_ids"]) - 1) // 16 * 16
            expected = greedy(new, prompt["prompt_token_ids"], len(outputs[0].outputs[0].token_ids))
            assert [output.outputs[0].token_ids for output in outputs] == [expected] * 2


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(folders[0], **ENGINE)
    yield engine
    asyncio.run(engine.shutdown())


async def tokens_of(engine: AsyncLLM) -> tuple[list[int], str | None]:
    async for output in engine.generate({"prompt_token_ids": PROMPT}, LONG, output="final"):
        return output.outputs[0].token_ids, output.weight_version
    raise AssertionError("no output")


def test_a_core_in_a_process_takes_folders_and_tensors(
    engine: AsyncLLM, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are sent in several files here, of a tensor or a few each."""
    monkeypatch.setattr(update_calls, "BUCKET_BYTES", 20_000)
    old, new = (greedy(folder, PROMPT, 40) for folder in folders)

    async def main() -> None:
        assert await tokens_of(engine) == (old, None)
        await engine.update_weights(folders[1], version="a folder")
        assert await tokens_of(engine) == (new, "a folder")
        await engine.update_weights(tensors_in(folders[0]))
        assert await tokens_of(engine) == (old, "2")
        await engine.start_weight_update()
        for pair in tensors_in(folders[1]).items():
            await engine.update_weights([pair])
        assert await tokens_of(engine) == (old, "2")
        assert await engine.finish_weight_update() == "3"
        assert await tokens_of(engine) == (new, "3")
        with pytest.raises(ControlError, match="the tensors in the update do not fit LlamaForCausalLM: 1 unexpected"):
            await engine.update_weights({**tensors_in(folders[0]), "other": torch.zeros(2)})
        assert await tokens_of(engine) == (new, "3")
        metrics = await engine.metrics()
        assert (metrics["weight_version"], metrics["weight_updates"]) == ("3", 3)
        await engine.update_weights(folders[0], version="1")

    run(main())


def test_a_client_that_goes_in_the_middle_of_an_update_is_followed_by_another(
    engine: AsyncLLM, folders: tuple[Path, Path]
) -> None:
    async def main() -> None:
        before = await tokens_of(engine)
        assert engine.address is not None
        gone = await AsyncLLM.join(engine.address)
        await gone.start_weight_update()
        await gone.update_weights([*tensors_in(folders[1]).items()][:5])
        await gone.shutdown()
        assert await tokens_of(engine) == before
        with pytest.raises(ControlError, match="missing"):
            await engine.finish_weight_update()
        assert await tokens_of(engine) == before
        await engine.update_weights(folders[1], version="next")
        assert await tokens_of(engine) == (greedy(folders[1], PROMPT, 40), "next")

    run(main())


def test_what_only_gpus_can_do_is_refused_on_a_cpu(engine: AsyncLLM) -> None:
    async def main() -> None:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        for backend, message in (("nccl", "NCCL sends between GPUs, but the device is 'cpu'"), ("mpi", "gloo, nccl")):
            with pytest.raises(ControlError, match=message):
                await engine.connect_weight_sender("127.0.0.1", store.port, world_size=2, backend=backend)
        with pytest.raises(ControlError, match="CUDA IPC shares memory of a GPU, but the device is 'cpu'"):
            await engine.update_weights(SharedTensors(names=[], tensors=[], storages=[]))

    run(main())


class Ranks:
    """Ranks that fail in a call."""

    def __init__(self) -> None:
        self.fails_in: str | None = None

    def call(self, call: ControlCall) -> list[Any]:
        if call.name == self.fails_in:
            raise ControlError("rank 1: no memory")
        return [3, 3]


def test_weights_that_are_half_in_place_hold_all_steps_until_an_update_is_whole() -> None:
    ranks = Ranks()
    updates = WeightUpdates(ranks.call)
    updates.start_weight_update()
    assert updates.receive_weights(path="somewhere") == 3
    ranks.fails_in = "weights.apply"
    with pytest.raises(ControlError, match=r"failed while it was put into place: rank 1: no memory; no step is run"):
        updates.finish_weight_update("new")
    assert "failed while it was put into place" in updates.holds_steps()
    assert updates.weight_update_state() == {"version": None, "updates": 0, "received": None}
    ranks.fails_in = None
    updates.start_weight_update()
    assert updates.holds_steps()
    updates.receive_weights(path="somewhere")
    updates.finish_weight_update("newer")
    assert not updates.holds_steps()
    assert (updates.takes_stale(), updates.takes_stale()) == ("all", "")


def test_an_llm_whose_steps_are_held_says_why(folders: tuple[Path, Path]) -> None:
    """And serves again after a whole update."""
    with LLM(folders[0], **ENGINE) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
        next(stream)
        llm.start_weight_update()
        llm.update_weights(folders[1])
        weights = stored(llm)
        kept = weights.pop("model.norm.weight")
        with pytest.raises(ControlError, match="no step is run until another update is finished"):
            llm.finish_weight_update()
        weights["model.norm.weight"] = kept
        with pytest.raises(RuntimeError, match="no step is run: a weight update failed"):
            next(stream)
        with pytest.raises(RuntimeError, match="no step is run: a weight update failed while it was put into place"):
            llm.generate({"prompt_token_ids": PROMPT}, LONG, use_tqdm=False)
        llm.update_weights(folders[1])
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, LONG, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(folders[1], PROMPT, 40)
