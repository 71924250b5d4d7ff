"""Speech models with quantised weights: in the encoder, in the decoder, and in the keys and values of clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantised_checkpoints import LAYOUTS, write_quantised
from speech_models import RATE, SpeechOracle, random_clip
from transformers import WhisperForConditionalGeneration

from compiled_engine import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 3,
    "num_blocks": 64,
    "block_size": 4,
    "skip_tokenizer_init": True,
    "audio_workers": 1,
    "progress": False,
}
COUNT = 8
# By the name of a callable: its linears in a model with one layer of encoder and decoder. Cross-attention's k and v are
# in a part of their own.
LINEARS = {"": 8, "encode/": 6, "hoisted/": 2, "logits/": 0}
COMPILED = pytest.mark.shown_by(
    "engine/test_quantised_engine.py::test_each_layout_computes_what_its_codes_stand_for",
    "features/speech/test_speech_engine.py::test_tokens_are_those_of_the_whole_model",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=COMPILED)])
def test_codes_are_what_the_model_computes_with(mode: str, tmp_path: Path) -> None:
    oracle = SpeechOracle(tmp_path / "plain", encoder_layers=1, decoder_layers=1)
    layout = LAYOUTS["compressed-tensors, channel, weights alone"]
    kind: Any = WhisperForConditionalGeneration
    oracle.model = write_quantised(oracle.folder, tmp_path / "fp8", layout, [], kind=kind)
    prompts = (([2, 5, 7], 0), ([2, 9], 1))
    params = SamplingParams(temperature=0, logprobs=0, ignore_eos=True, max_tokens=COUNT)
    given: list[Any] = [
        {"prompt_token_ids": ids, "multi_modal_data": {"audio": (random_clip(clip), RATE)}} for ids, clip in prompts
    ]
    with LLM(tmp_path / "fp8", mode=mode, **OPTIONS) as llm:
        outputs, passes = llm.generate(given, params, use_tqdm=False), llm.metrics()["passes"]
    for (ids, clip), output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        tokens, logprobs = oracle.greedy(ids, random_clip(clip), COUNT)
        assert list(completion.token_ids) == tokens
        found = [each[token].logprob for each, token in zip(completion.logprobs or (), tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=3e-4)
    if mode == "compiled":
        found_linears = {name.rstrip("0123456789-"): each["quantise"]["matches"] for name, each in passes.items()}
        assert found_linears == LINEARS
