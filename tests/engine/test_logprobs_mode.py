"""Processed log-probabilities are those of the distribution that a token is drawn from; raw ones are the model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}
PROMPT = [3, 5, 7, 11, 5, 3]
VOCAB = 131


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    return np.where(logits < np.sort(logits)[-k], -np.inf, logits)


def top_p(logits: np.ndarray, p: float) -> np.ndarray:
    order = np.argsort(-logits)
    probabilities = np.exp(log_softmax(logits))[order]
    kept = np.cumsum(probabilities) - probabilities < p
    return np.where(np.isin(np.arange(len(logits)), order[kept]), logits, -np.inf)


def min_p(logits: np.ndarray, p: float) -> np.ndarray:
    return np.where(logits < logits.max() + np.log(p), -np.inf, logits)


def biased(logits: np.ndarray) -> np.ndarray:
    found = logits.copy()
    found[[9, 4]] += [5.0, -3.0]
    return found


def allowed(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isin(np.arange(len(logits)), [2, 20, 60]), logits, -np.inf)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)


# Sampling parameters, and what they make of the first token's logits. A repetition penalty depends on the sign of
# logits, which log-probabilities do not tell, so it is tested apart.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "greedy": ({"temperature": 0}, lambda logits: logits),
    "temperature": ({"temperature": 0.7}, lambda logits: logits / 0.7),
    "top-k": ({"temperature": 0.7, "top_k": 5}, lambda logits: top_k(logits / 0.7, 5)),
    "top-p": ({"temperature": 2.0, "top_p": 0.6}, lambda logits: top_p(logits / 2.0, 0.6)),
    "min-p": ({"temperature": 1.5, "min_p": 0.05}, lambda logits: min_p(logits / 1.5, 0.05)),
    "bias": ({"temperature": 0.5, "logit_bias": {9: 5.0, 4: -3.0}}, lambda logits: biased(logits) / 0.5),
    "bias, greedy": ({"temperature": 0, "logit_bias": {9: 5.0, 4: -3.0}}, biased),
    "allowed": ({"temperature": 1.0, "allowed_token_ids": [2, 20, 60]}, allowed),
    "bias and top-k": (
        {"temperature": 0.5, "top_k": 3, "logit_bias": {9: 5.0, 4: -3.0}},
        lambda logits: top_k(biased(logits) / 0.5, 3),
    ),
}


def rows(llm: LLM, many: list[dict[str, Any]]) -> list[tuple[int, np.ndarray, float]]:
    """Return each request's first token, the log-probabilities of all tokens, and the sum of those that were chosen."""
    params = [SamplingParams(max_tokens=3, seed=5, ignore_eos=True, logprobs=-1, **each) for each in many]
    prompts = [{"prompt_token_ids": PROMPT}] * len(many)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        values = np.array([completion.logprobs[0][token].logprob for token in range(VOCAB)])
        found.append((completion.token_ids[0], values, completion.cumulative_logprob or 0.0))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", num_attention_heads=4, num_key_value_heads=2)
    return folder


@pytest.fixture(scope="module")
def raw(folder: Path) -> Iterator[list[tuple[int, np.ndarray, float]]]:
    with LLM(folder, **OPTIONS) as llm:
        yield rows(llm, [params for params, _ in CASES.values()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_processed_values_are_those_that_tokens_are_drawn_from(
    ranks: int, folder: Path, raw: list[tuple[int, np.ndarray, float]]
) -> None:
    """All cases in one batch; the tokens are those of the other mode."""
    with LLM(folder, **OPTIONS, logprobs_mode="processed_logprobs", tensor_parallel_size=ranks) as llm:
        found = rows(llm, [params for params, _ in CASES.values()])
        (penalised,) = rows(llm, [{"temperature": 0, "repetition_penalty": 1.5}])
        (alone,) = rows(llm, [CASES["temperature"][0]])  # a batch whose rows have nothing but a temperature
    for (token, values, _), (same_token, model, _), (_, process) in zip(found, raw, CASES.values(), strict=True):
        expected = log_softmax(process(model.astype(np.float64)))
        assert token == same_token
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
        assert np.isfinite(values[token])
    np.testing.assert_allclose(alone[1], found[1][1], rtol=1e-5, atol=1e-5)
    moved = ~np.isclose(penalised[1], raw[0][1], atol=1e-3)
    assert moved[PROMPT].any()


def test_raw_values_do_not_depend_on_sampling(raw: list[tuple[int, np.ndarray, float]]) -> None:
    for _, values, _ in raw:
        np.testing.assert_allclose(values, raw[0][1], rtol=1e-4, atol=1e-4)


def test_another_mode_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="logprobs_mode is 'raw_logits'; allowed: raw_logprobs, processed_logprobs"):
        LLM(folder, **OPTIONS, logprobs_mode="raw_logits")
