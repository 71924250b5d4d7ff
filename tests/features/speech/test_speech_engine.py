"""Prompts with audio: tokens and log-probabilities are those of transformers' whole model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from speech_models import (
    RATE,
    SpeechOracle,
    check_segments,
    random_clip,
    segments_of_generate,
    transcribing_oracle,
)
from speech_requests import COUNT, PROMPTS, check, check_twice, generated, given, greedy

from compiled_engine import LLM

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


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return transcribing_oracle(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(oracle: SpeechOracle) -> Iterator[LLM]:
    with LLM(oracle.folder, mode="eager", **OPTIONS) as made:
        yield made


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_those_of_the_whole_model(oracle: SpeechOracle, llm: LLM) -> None:
    check_twice(oracle, llm)


@pytest.mark.usefixtures("one_thread")
def test_tokens_of_a_compiled_model_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """A model of few layers, since others are further pieces to compile."""
    few = transcribing_oracle(tmp_path, encoder_layers=1, decoder_layers=1)
    with LLM(few.folder, mode="compiled", compile_ranges=(), **OPTIONS) as llm:
        check_twice(few, llm)


@pytest.mark.usefixtures("one_thread")
def test_a_prefix_is_shared_by_prompts_with_the_same_clip_alone(oracle: SpeechOracle, llm: LLM) -> None:
    prompts = [(list(range(30, 42)), 5), (list(range(30, 42)), 5), (list(range(30, 42)), 6)]
    before = llm.metrics()["clips_encoded"]
    outputs = [llm.generate(given(*each), greedy(), use_tqdm=False)[0] for each in prompts]
    expected = [oracle.greedy(ids, random_clip(clip), COUNT)[0] for ids, clip in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 8, 0]
    (output,) = llm.generate(given(*prompts[0]), greedy(n=3, temperature=1, top_k=1), use_tqdm=False)
    assert [list(each.token_ids) for each in output.outputs] == expected[:1] * 3
    assert llm.metrics()["clips_encoded"] == before + 2


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_the_same_if_requests_are_preempted_and_some_have_drafts(oracle: SpeechOracle) -> None:
    """Requests run at once the second time: features of clips that were processed before are there."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(oracle.folder, mode="eager", **OPTIONS | {"num_blocks": 9}, speculative_config=drafts) as llm:
        generated(llm)
        llm.reset_prefix_cache()
        before = llm.metrics()
        check(oracle, generated(llm))
        gained = {name: llm.metrics()[name] - before[name] for name in ("preemptions", "clips_encoded", "draft_tokens")}
    assert gained["preemptions"] > 0
    assert gained["clips_encoded"] == 3
    assert gained["draft_tokens"] > 0


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_the_same_if_requests_wait_for_a_slot(oracle: SpeechOracle) -> None:
    options = {"encoder_cache_size": 50, "max_num_encoder_input_tokens": 50, "async_scheduling": True}
    with LLM(oracle.folder, mode="eager", **OPTIONS | options) as llm:
        check(oracle, generated(llm))
        metrics = llm.metrics()
    assert metrics["clip_slots"] == 1
    assert metrics["encoder_runs"] == metrics["clips_encoded"] >= 3


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_the_same_if_the_device_computes_features(oracle: SpeechOracle) -> None:
    """Files go through a worker, as samples; audio with timestamps does so as features."""
    with LLM(oracle.folder, mode="eager", **OPTIONS | {"skip_tokenizer_init": False}, audio_features="device") as llm:
        check_twice(oracle, llm)
        assert llm.metrics()["mm_cache_queries"] == 0
        file, (ids, number, _) = io.BytesIO(), PROMPTS[0]
        soundfile.write(file, random_clip(number), RATE, format="WAV", subtype="FLOAT")
        asked = given(ids, number) | {"multi_modal_data": {"audio": file.getvalue()}}
        (output,) = llm.generate(asked, greedy(), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == oracle.greedy(ids, random_clip(number), COUNT)[0]
        assert llm.metrics()["mm_cache_queries"] == 1
        long = random_clip(7, seconds=2)
        found = llm.transcribe((long, RATE), language="en", temperature=0.0, timestamps=True)
        check_segments(found.segments, segments_of_generate(oracle, long, language="en", task="transcribe"), 2.0)
        with pytest.raises(ValueError, match=r"has 2.0 s; allowed: at most 1"):
            llm.generate(given([2], 0) | {"multi_modal_data": {"audio": (long, RATE)}}, greedy(), use_tqdm=False)


@pytest.mark.usefixtures("one_thread")
def test_what_cannot_be_done_is_refused_by_name(llm: LLM) -> None:
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
            llm.generate({"prompt_token_ids": [2], "multi_modal_data": data}, greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="has no audio; allowed: one clip"):
        llm.generate({"prompt_token_ids": [2]}, greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match=r"extra_args\['transcription'\] is 'words'; allowed: text, timestamps"):
        llm.generate(given([2], 0), greedy("words"), use_tqdm=False)
    # The engine goes on.
    (output,) = llm.generate(given([2], 0), greedy(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == COUNT
