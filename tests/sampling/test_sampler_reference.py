"""The sampler against a slow reference in 64-bit floats, transformers and exact probabilities."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import EOS, VOCAB_SIZE, make_sampler, random_logits, sample, sample_once
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_engine.sampling.filters import FIELDS, Filters, filter_fields, thresholds
from compiled_engine.sampling.params import SamplingParams

MASK_64 = 2**64 - 1


def splitmix64(seed: int, index: int) -> int:
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK_64
    return bits ^ (bits >> 31)


def reference_noise(seed: int, position: int, token_id: int) -> float:
    u = (splitmix64(splitmix64(seed & MASK_64, position), token_id) >> 1) * 2.0**-63
    return -math.log(-math.log1p(-u))


def reference_logits(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Return the logits after bias, bans and penalties."""
    logits = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for word in params.bad_words_token_ids:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            logits[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (EOS, *(params.stop_token_ids or ())):
            logits[token] = -math.inf
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -math.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            positive = logits[token] > 0
            logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    return logits


@dataclass
class Choice:
    """A token, and the margin (in scores or probabilities) by which it was chosen."""

    token_id: int
    margin: float


def reference_choice(logits: list[float], params: SamplingParams, seed: int, position: int) -> Choice:
    if params.greedy:
        best, second = sorted(logits, reverse=True)[:2]
        return Choice(logits.index(best), best - second)
    scaled = [logit / params.temperature for logit in logits]
    top = max(scaled)
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    margins = []

    kept = [token for token in order if math.exp(scaled[token] - top) >= params.min_p]
    margins += [abs(math.exp(value - top) - params.min_p) for value in scaled if params.min_p > 0]
    if 0 < params.top_k < len(kept):
        margins.append(scaled[kept[params.top_k - 1]] - scaled[kept[params.top_k]])
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total = sum(math.exp(scaled[token] - top) for token in kept)
        count, mass = 0, 0.0
        while count < len(kept) and mass < params.top_p:
            mass += math.exp(scaled[kept[count]] - top) / total
            count += 1
            margins.append(abs(mass - params.top_p))
        kept = kept[:count]
    scores = sorted((scaled[token] + reference_noise(seed, position, token), token) for token in kept)
    if len(scores) > 1:
        margins.append(scores[-1][0] - scores[-2][0])
    return Choice(scores[-1][1], min(margins, default=1.0))


token = st.integers(0, VOCAB_SIZE - 1)
words = st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    def sometimes(strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(st.one_of(st.just(otherwise), strategy))

    return SamplingParams(
        temperature=sometimes(st.floats(0.2, 3), 0),
        top_k=sometimes(st.integers(1, VOCAB_SIZE + 2), 0),
        top_p=sometimes(st.floats(0.05, 0.99), 1),
        min_p=sometimes(st.floats(0.001, 0.9), 0),
        repetition_penalty=sometimes(st.floats(0.5, 2), 1),
        frequency_penalty=sometimes(st.floats(-2, 2), 0),
        presence_penalty=sometimes(st.floats(-2, 2), 0),
        # More than the others can forbid.
        allowed_token_ids=sometimes(st.lists(token, min_size=9, max_size=20, unique=True), None),
        logit_bias=sometimes(st.dictionaries(token, st.floats(-10, 10), max_size=4), None),
        bad_words_token_ids=sometimes(words, ()),
        min_tokens=sometimes(st.integers(0, 8), 0),
        stop_token_ids=sometimes(st.lists(token, max_size=3), None),
        max_tokens=None,
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_feature_against_the_reference(data: st.DataObject) -> None:
    """Random requests together for some steps, each token checked; output that repeats, for bad words to match."""
    num_rows = data.draw(st.integers(1, 5))
    logits_seed = data.draw(st.integers(0, 2**20))
    requests = [data.draw(sampling_params()) for _ in range(num_rows)]
    prompts = [data.draw(st.lists(token, min_size=1, max_size=6)) for _ in range(num_rows)]
    outputs = [data.draw(st.lists(token, max_size=6)) for _ in range(num_rows)]
    seeds = [data.draw(st.integers(-(2**63), 2**64 - 1)) for _ in range(num_rows)]
    rows = np.array(data.draw(st.permutations(range(8)))[:num_rows])

    sampler = make_sampler()
    for i, row in enumerate(rows.tolist()):
        sampler.add_row(row, requests[i], seeds[i], prompts[i] + outputs[i], len(prompts[i]), {EOS})
    for step in range(4):
        logits_RV = random_logits(num_rows, logits_seed + step)
        before = logits_RV.clone()
        positions = np.array([len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)])
        token_ids = sample(sampler, logits_RV, rows, positions).token_ids
        assert torch.equal(logits_RV, before)
        for i, token_id in enumerate(token_ids):
            logits = reference_logits(logits_RV[i].tolist(), requests[i], prompts[i], outputs[i])
            expected = reference_choice(logits, requests[i], seeds[i], int(positions[i]))
            assert token_id == expected.token_id or expected.margin < 1e-4
            outputs[i].append(token_id)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_row_depends_on_nothing_but_itself(data: st.DataObject) -> None:
    """Alone in row 0, or in any row among any others, added late, preempted: the same tokens and logprobs."""
    logits_TV = random_logits(12, data.draw(st.integers(0, 2**20)))
    params = data.draw(sampling_params())
    params = dataclasses.replace(params, logprobs=2)
    prompt = data.draw(st.lists(token, min_size=1, max_size=6))

    alone = make_sampler(max_num_rows=1)
    alone.add_row(0, params, 99, prompt, len(prompt), {EOS})
    expected = [sample(alone, logits_TV[i : i + 1], np.array([0]), np.array([len(prompt) + i])) for i in range(12)]

    crowd = make_sampler()
    token_ids = list(prompt)
    others: dict[int, int] = {}
    row = -1
    for i in range(12):
        if row == -1 or data.draw(st.booleans()):
            if row >= 0:
                crowd.remove_row(row)
            row = data.draw(st.sampled_from([r for r in range(16) if r not in others]))
            crowd.add_row(row, params, 99, token_ids, len(prompt), {EOS})
        for other in data.draw(st.sets(st.integers(0, 15), max_size=3)) - {row, *others}:
            crowd.add_row(other, data.draw(sampling_params()), other, [1, 2], 2, {EOS})
            others[other] = 2
        rows = data.draw(st.permutations([row, *others]))
        logits_RV = random_logits(len(rows), i)
        logits_RV[rows.index(row)] = logits_TV[i]
        positions = np.array([len(token_ids) if r == row else others[r] for r in rows])
        output = sample(crowd, logits_RV, np.array(rows), positions)
        at = rows.index(row)
        assert output.token_ids[at] == expected[i].token_ids[0]
        assert output.logprobs[at] is not None
        assert output.logprobs[at].token_ids == expected[i].logprobs[0].token_ids  # type: ignore[union-attr]
        token_ids.append(output.token_ids[at])


# --- statistics ---


def draw_many(logits_V: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """Count each token over neighbouring seeds and positions."""
    num_rows = 500
    sampler = make_sampler(len(logits_V), num_rows)
    for row in range(num_rows):
        sampler.add_row(row, params, row, [1], 1, set())
    logits_RV = logits_V.expand(num_rows, -1)
    counts = np.zeros(len(logits_V), dtype=np.int64)
    for position in range(1, 1 + count // num_rows):
        output = sample(sampler, logits_RV, np.arange(num_rows), np.full(num_rows, position))
        counts += np.bincount(output.token_ids, minlength=len(logits_V))
    return counts


@pytest.mark.parametrize(
    "given_params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
    ],
)
def test_frequencies_follow_the_softmax(given_params: dict[str, Any]) -> None:
    """Pearson's chi-square over 40,000 draws; what is filtered out never comes."""
    logits_V = torch.randn(25, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(**given_params)
    kept = torch.isfinite(warped(logits_V[None], params)[0]).numpy()
    probabilities = np.where(kept, np.exp(logits_V.double().numpy() / params.temperature), 0)
    probabilities /= probabilities.sum()
    counts = draw_many(logits_V, params, 40_000)
    assert counts[~kept].sum() == 0
    expected = counts.sum() * probabilities[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 8  # beyond the 0.01 % point


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should() -> None:
    """One token of probability 1/2 among 150,000 that share the rest."""
    vocab_size = 150_000
    logits_V = torch.zeros(vocab_size)
    logits_V[77] = math.log(vocab_size - 1)
    sampler = make_sampler(vocab_size)
    sampler.add_row(0, SamplingParams(), 1, [1], 1, set())
    drawn = [
        sample(sampler, logits_V[None], np.array([0]), np.array([position])).token_ids[0] for position in range(400)
    ]
    assert abs(drawn.count(77) - 200) < 5 * math.sqrt(100)
    rest = [token_id for token_id in drawn if token_id != 77]
    assert len(set(rest)) >= len(rest) - 5
    assert abs(np.mean(rest) / vocab_size - 0.5) < 5 / math.sqrt(12 * len(rest))


# --- transformers ---


def warped(logits_RV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply transformers' warpers in vLLM's order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    no_ids: Any = torch.zeros(len(logits_RV), 1, dtype=torch.long)
    return warpers(no_ids, logits_RV)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    requests=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.3, 1.0, 1.7]),
            top_k=st.sampled_from([0, 1, 3, 20, 299, 300]),
            top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
            min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_kept_tokens_are_those_of_transformers(seed: int, requests: list[SamplingParams]) -> None:
    logits_RV = random_logits(len(requests), seed, 300)
    fields = {name: np.array([filter_fields(params)[name] for params in requests], np.float32) for name in FIELDS}
    filters = Filters.from_fields(fields, np.arange(len(requests)))
    kept_RV = logits_RV >= thresholds(logits_RV, filters)[:, None]
    for row, params in enumerate(requests):
        expected_V = torch.isfinite(warped(logits_RV[row : row + 1], params)[0])
        assert torch.equal(kept_RV[row], expected_V)


def test_equal_logits_at_the_border_are_kept_together() -> None:
    """With top_k 1, both of two equal best tokens are drawn, and never a third."""
    logits_V = torch.tensor([0.0, 5.0, 1.0, 5.0])
    counts = draw_many(logits_V, SamplingParams(top_k=1), 2000)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert min(counts[[1, 3]]) > 800


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Seen through greedy choice: biases make every token in turn the winner by what the penalty leaves."""
    logits_RV = random_logits(30, 5)
    token_ids = [3, 4, 4, 9, 17, 20, 3, 30]
    expected_RV = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids] * 30), logits_RV.clone())
    for logits_V, expected_V in zip(logits_RV, expected_RV, strict=True):
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        assert sample_once(logits_V, params, token_ids, 5) == int(expected_V.argmax())
