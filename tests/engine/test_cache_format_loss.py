"""The bundled model's held-out loss, as its README says it, recomputed through the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bundled_training.held_out import held_out_windows, scored_tokens

from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams


def test_held_out_loss(bundled_model_path: Path, bundled_tokenizer: Tokenizer) -> None:
    text = (bundled_model_path / "held_out.txt").read_bytes().decode()
    stated = json.loads((bundled_model_path / "training.json").read_text())
    windows = held_out_windows(bundled_tokenizer.hf, text)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total = 0.0
    with LLM(device="cpu", mode="compiled", progress=False) as llm:
        for output in llm.generate([{"prompt_token_ids": window} for window in windows], params):
            assert output.prompt_logprobs is not None
            entries = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            total -= sum(entry[token].logprob for entry, token in entries if entry is not None)
    assert scored_tokens(windows) == stated["held_out_tokens_scored"]
    assert total / scored_tokens(windows) == pytest.approx(stated["held_out_loss"], abs=1e-4)
    assert f"{stated['held_out_loss']:.3f}" in (bundled_model_path / "README.md").read_text()
