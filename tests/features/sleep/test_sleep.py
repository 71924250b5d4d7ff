"""Sleep on a CPU: memory goes back to the system, and after waking the tokens are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_engines import collect, run
from checkpoints import make_checkpoint

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# Large enough that its memory stands out: tens of megabytes of weights, and of keys and values that are used.
WIDE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "num_blocks": 512,
    "block_size": 16,
}
PROMPTS = [{"prompt_token_ids": [*range(start, start + 900)]} for start in (3, 1000, 2000, 3000)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", **WIDE)
    return folder


@pytest.fixture(scope="module", params=["eager", "graphed"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, mode=request.param, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM) -> list[Any]:
    """Return tokens and log-probabilities, computed without cached prefixes: these are computed in other shapes."""
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


def rss() -> int:
    return psutil.Process().memory_info().rss


def used_bytes(llm: LLM, *, weights: bool) -> int:
    executor: Any = llm.core.executor
    model = executor.runner.model
    blocks = 4 * (907 // 16 + 1)
    found = sum(cache[:blocks].nbytes for cache in model.kv_caches)
    stored = executor.runner.calls["weights.apply"].__self__.weights.stored
    return found + (sum(tensor.nbytes for tensor in stored.filled()) if weights else 0)


@pytest.mark.product(one_in=1000, each=("level",))
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_the_tokens_are_the_same_afterwards(level: int, llm: LLM, folder: Path) -> None:
    expected = tokens(llm)
    tokens(llm)  # with graphs, the calls of decodes are recorded by now
    counts, before = llm.metrics(), rss()
    llm.sleep(level)
    assert llm.is_sleeping()
    given_back = before - rss()
    assert given_back > 0.95 * used_bytes(llm, weights=level == 2)
    with pytest.raises(RuntimeError, match="no step is run: the engine is paused"):
        tokens(llm)
    llm.wake_up(["weights"])
    if level == 2:
        llm.update_weights(folder)
    assert llm.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    assert tokens(llm) == expected
    after = llm.metrics()
    assert [after[name] for name in ("traces", "compiles")] == [counts[name] for name in ("traces", "compiles")]


def test_level_two_needs_new_weights(llm: LLM, folder: Path) -> None:
    expected = tokens(llm)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(RuntimeError, match=r"sleep\(level=2\) has dropped the weights; a whole update brings new ones"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


@pytest.mark.parametrize("pauses_first", [False, True], ids=["LLM", "AsyncLLM"])
def test_a_stream_that_is_kept_continues_after_the_sleep(llm: LLM, pauses_first: bool) -> None:
    """Also after a pause that keeps keys and values, with which AsyncLLM begins to sleep."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    stream = llm.stream(PROMPTS[0], params)
    for _ in range(5):
        next(stream)
    if pauses_first:
        llm.core.call(ControlCall("pause", {"mode": "keep", "clear_cache": False}))
    llm.sleep(1, mode="keep")
    llm.wake_up()
    (*_, last) = stream
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.core.check_integrity()


def test_what_is_no_sleep_is_refused(llm: LLM, folder: Path) -> None:
    with pytest.raises(ControlError, match="level is 3; allowed: 0, 1, 2"):
        llm.sleep(3)
    with pytest.raises(ControlError, match="mode is 'wait'; allowed: abort, keep"):
        llm.sleep(1, mode="wait")
    with pytest.raises(ControlError, match="tags has 'graphs'; allowed: weights, kv_cache"):
        llm.wake_up(["graphs"])
    assert not llm.is_sleeping()
    with (
        LLM(folder, mode="eager", **OPTIONS | {"enable_sleep_mode": False}) as other,
        pytest.raises(ControlError, match="call is 'sleep'; allowed"),
    ):
        other.sleep()


def test_a_core_in_a_process_sleeps_and_serves_again(folder: Path) -> None:
    async def main() -> None:
        engine = await AsyncLLM.start(folder, mode="eager", **OPTIONS)
        try:
            (before,) = await collect(engine.generate(PROMPTS[0], PARAMS, output="final"))
            await engine.sleep(level=2)
            assert await engine.is_sleeping()
            waiting = asyncio.ensure_future(collect(engine.generate(PROMPTS[0], PARAMS, output="final")))
            await engine.wake_up(tags=["weights"])
            await engine.update_weights(folder)
            await engine.wake_up(tags=["kv_cache"])
            (after,) = await waiting
            assert after.outputs == before.outputs
            assert not await engine.is_sleeping()
        finally:
            await engine.shutdown()

    run(main())
