"""Prompts with audio: tokens and log-probabilities are those of transformers' whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from speech_models import RATE, SpeechOracle, random_clip

from compiled_engine import LLM, RequestOutput, SamplingParams

TOLERANCE = 3e-4  # of log-probabilities
COUNT = 12
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 16,
    "num_blocks": 64,
    "block_size": 4,
    "skip_tokenizer_init": True,
    "audio_workers": 1,
    "progress": False,
}
# Prompts, and the numbers of their clips. The last one is computed in chunks.
PROMPTS = (([2, 5, 7], 0), ([2, 9], 1), ([2, 5, 7], 1), ([2, 9], 1), ([2, *range(50, 72)], 2))
GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True, max_tokens=COUNT)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return SpeechOracle(tmp_path_factory.mktemp("whisper"))


def given(ids: Sequence[int], clip: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"audio": (random_clip(clip), RATE)}}


def check(oracle: SpeechOracle, prompts: Sequence[tuple[list[int], int]], outputs: Sequence[RequestOutput]) -> None:
    for (ids, clip), output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        tokens, logprobs = oracle.greedy(ids, random_clip(clip), COUNT)
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        found = [each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_tokens_are_those_of_the_whole_model(oracle: SpeechOracle, mode: str) -> None:
    """Together; each clip is encoded once."""
    with LLM(oracle.folder, mode=mode, **OPTIONS) as llm:
        check(oracle, PROMPTS, llm.generate([given(*each) for each in PROMPTS], GREEDY, use_tqdm=False))
        assert llm.metrics()["clips_encoded"] == 3
        check(oracle, PROMPTS, llm.generate([given(*each) for each in PROMPTS], GREEDY, use_tqdm=False))
        assert llm.metrics()["clips_encoded"] == 3


@pytest.mark.usefixtures("one_thread")
def test_a_prefix_is_shared_by_prompts_with_the_same_clip_alone(oracle: SpeechOracle) -> None:
    prompts = [(list(range(30, 42)), 0), (list(range(30, 42)), 0), (list(range(30, 42)), 1)]
    with LLM(oracle.folder, mode="eager", **OPTIONS) as llm:
        outputs = [llm.generate(given(*each), GREEDY, use_tqdm=False)[0] for each in prompts]
        check(oracle, prompts, outputs)
        assert [output.num_cached_tokens for output in outputs] == [0, 8, 0]
        several = SamplingParams(n=3, temperature=1, top_k=1, ignore_eos=True, max_tokens=COUNT)
        (output,) = llm.generate(given(*prompts[0]), several, use_tqdm=False)
        expected = oracle.greedy(prompts[0][0], random_clip(0), COUNT)[0]
        assert [list(each.token_ids) for each in output.outputs] == [expected] * 3
        assert llm.metrics()["clips_encoded"] == 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 9},  # so that requests are preempted
        {"encoder_cache_size": 50},  # one slot: requests wait for each other
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_dtype": "auto", "async_scheduling": True, "max_num_encoder_input_tokens": 50},
    ],
    ids=["preempted", "one slot", "drafts", "ahead"],
)
def test_tokens_do_not_depend_on_the_schedule(oracle: SpeechOracle, options: dict[str, Any]) -> None:
    with LLM(oracle.folder, mode="eager", **OPTIONS | options) as llm:
        check(oracle, PROMPTS, llm.generate([given(*each) for each in PROMPTS], GREEDY, use_tqdm=False))
        metrics = llm.metrics()
    if "num_blocks" in options:
        assert metrics["preemptions"] > 0
        assert metrics["clips_encoded"] == 3
    if "encoder_cache_size" in options:
        assert metrics["clip_slots"] == 1
    if "max_num_encoder_input_tokens" in options:
        assert metrics["encoder_runs"] == 3


@pytest.mark.usefixtures("one_thread")
def test_what_cannot_be_done_is_refused_by_name(oracle: SpeechOracle, tmp_path: Path) -> None:
    with LLM(oracle.folder, mode="eager", **OPTIONS) as llm:
        for data, error in (
            ({"image": b"x"}, r"has 'image'; allowed: 'audio'"),
            ({"audio": 3}, r"\['audio'\] must be a pair"),
            ({"audio": [(random_clip(0), RATE)] * 2}, "has 2 clips; allowed: one"),
            ({"audio": (random_clip(0), 16.0)}, "the rate must be a whole number"),
            ({"audio": (random_clip(0).reshape(2, -1), RATE)}, "one channel"),
            ({"audio": (random_clip(0) * float("nan"), RATE)}, "must be finite"),
            ({"audio": (random_clip(0, seconds=2), RATE)}, r"has 2.0 s; allowed: at most 1"),
            ({"audio": b"RIFF"}, r"\['audio'\]: it is no audio file"),
        ):
            with pytest.raises((ValueError, TypeError), match=error):
                llm.generate({"prompt_token_ids": [2], "multi_modal_data": data}, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="has no audio; allowed: one clip"):
            llm.generate({"prompt_token_ids": [2]}, GREEDY, use_tqdm=False)
        # The engine goes on.
        check(oracle, PROMPTS[:1], llm.generate([given(*PROMPTS[0])], GREEDY, use_tqdm=False))
