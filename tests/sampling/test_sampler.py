"""The sampler's rules: ties, rows, degenerate logits, log-probabilities, wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_cases import EOS, VOCAB_SIZE, make_sampler, random_logits, sample, sample_once

from compiled_engine.sampling.logprobs import logprob_rows
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import row_chunks
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER, NOTHING_ALLOWED, LogprobRows, TokenLogprobs


def test_greedy_takes_the_largest_logit_and_the_lowest_token_on_a_tie() -> None:
    logits_RV = random_logits(8, 1)
    logits_RV[3, [7, 30]] = 50.0
    sampler = make_sampler()
    for row in range(8):
        sampler.add_row(row, SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=1), row, [1], 1, set())
    token_ids = sample(sampler, logits_RV, np.arange(8), np.full(8, 1)).token_ids
    assert token_ids == logits_RV.argmax(dim=1).tolist()
    assert token_ids[3] == 7


def test_bad_words_look_at_the_output_alone() -> None:
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[[7, 8]] = torch.tensor([9.0, 5.0])
    params = SamplingParams(temperature=0, bad_words_token_ids=((5, 6, 7),))
    assert sample_once(logits_V, params, [1, 5, 6], 1) == 8
    assert sample_once(logits_V, params, [1, 5, 6], 2) == 7
    assert sample_once(logits_V, params, [1, 4, 4, 5, 6], 1) == 8  # the end of a longer output
    assert sample_once(logits_V, params, [1, 6, 5], 1) == 7
    assert sample_once(logits_V, params, [1], 1) == 7
    assert sample_once(logits_V, SamplingParams(temperature=0, bad_words_token_ids=((7,),)), [1], 1) == 8


def test_rows_have_bad_words_of_their_own() -> None:
    logits_RV = torch.zeros(2, VOCAB_SIZE)
    logits_RV[:, 7], logits_RV[:, 8] = 9.0, 5.0
    sampler = make_sampler()
    for row, word in enumerate([(5, 6, 7), (6, 5, 7)]):
        sampler.add_row(row, SamplingParams(temperature=0, bad_words_token_ids=(word,)), 0, [1, 6, 5], 1, set())
    assert sample(sampler, logits_RV, np.arange(2), np.full(2, 3)).token_ids == [7, 8]


def test_min_tokens_forbids_every_end_until_then() -> None:
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[[EOS, 9, 4]] = torch.tensor([9.0, 8.0, 7.0])
    for ignore_eos in (False, True):
        params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9], ignore_eos=ignore_eos)
        sampler = make_sampler()
        sampler.add_row(0, params, 0, [1], 1, {EOS, VOCAB_SIZE + 5})
        drawn = [
            sample(sampler, logits_V[None], np.array([0]), np.array([position])).token_ids[0] for position in (1, 2, 3)
        ]
        assert drawn == [4, 4, EOS]


def test_a_row_has_no_memory_of_the_request_before() -> None:
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[5] = 1.0
    sampler = make_sampler()
    everything = SamplingParams(
        temperature=0.5, repetition_penalty=5, presence_penalty=2, logit_bias={5: -9}, bad_words_token_ids=((5,),),
        min_tokens=9, stop_token_ids=[5], logprobs=3, top_k=2, top_p=0.5, min_p=0.5,
    )  # fmt: skip
    sampler.add_row(2, everything, 7, [5, 5], 1, {5})
    sample(sampler, logits_V[None], np.array([2]), np.array([2]))
    sampler.remove_row(2)
    sampler.add_row(2, SamplingParams(temperature=0), 0, [1], 1, set())
    output = sample(sampler, logits_V[None], np.array([2]), np.array([1]))
    assert (output.token_ids, output.logprobs) == ([5], [None])


@pytest.mark.parametrize("temperature", [0, 1e-5, 1.0, 1e37])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_degenerate_logits(temperature: float, filters: dict[str, Any]) -> None:
    """Minus infinity for all but one: that one. For all, or NaN: none, and no failure."""
    params = SamplingParams(temperature=temperature, **filters)
    single_V = torch.full((VOCAB_SIZE,), -torch.inf)
    single_V[11] = -1e30
    assert sample_once(single_V, params) == 11
    for value in (math.inf, 1e30):
        assert 0 <= sample_once(torch.full((VOCAB_SIZE,), value), params) < VOCAB_SIZE
    assert sample_once(torch.full((VOCAB_SIZE,), -math.inf), params) == NOTHING_ALLOWED
    for of_nan in (slice(0, 1), slice(-1, None), slice(None)):
        logits_V = random_logits(1, 0)[0]
        logits_V[of_nan] = math.nan
        assert sample_once(logits_V, params) == NOT_A_NUMBER


# --- log-probabilities ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_raw_log_softmax(dtype: torch.dtype) -> None:
    """Whatever bias, penalties and temperature do; only for rows that ask; 0 for the chosen token alone."""
    counts = [None, 0, 1, 5, -1, None]
    logits_RV = random_logits(len(counts), 8).to(dtype)
    sampler = make_sampler()
    for row, count in enumerate(counts):
        params = SamplingParams(temperature=1.5, logprobs=count, logit_bias={0: 9}, repetition_penalty=1.5)
        sampler.add_row(row, params, row, [3, 4, 5], 2, set())
    output = sample(sampler, logits_RV, np.arange(len(counts)), np.full(len(counts), 3))
    expected_RV = logits_RV.float().log_softmax(dim=1)
    for row, count in enumerate(counts):
        entry = output.logprobs[row]
        if count is None:
            assert entry is None
            continue
        assert entry is not None
        expected_V = expected_RV[row]
        assert len(entry.token_ids) == len(entry.logprobs) == 1 + (VOCAB_SIZE if count == -1 else count)
        assert entry.token_ids[0] == output.token_ids[row]
        assert entry.rank == 1 + int((expected_V > expected_V[entry.token_ids[0]]).sum())
        np.testing.assert_allclose(entry.logprobs, expected_V[list(entry.token_ids)], atol=1e-5)
        np.testing.assert_allclose(
            entry.logprobs[1:], expected_V.sort(descending=True).values[: len(entry.logprobs) - 1], atol=1e-5
        )


def all_logprobs(logits_TV: torch.Tensor, token_ids_T: torch.Tensor, k: int) -> list[TokenLogprobs]:
    """As of a prompt: every position's, k each."""
    return [*LogprobRows.of_array(logprob_rows(logits_TV, token_ids_T.int(), k).numpy())]


def test_prompt_logprobs_are_the_log_softmax() -> None:
    logits_TV = random_logits(9, 3).bfloat16()
    targets_T = torch.arange(9) * 4
    expected_TV = logits_TV.float().log_softmax(dim=1)
    for k in (0, 3):
        entries = all_logprobs(logits_TV, targets_T, k)
        for entry, target, expected_V in zip(entries, targets_T.tolist(), expected_TV, strict=True):
            assert entry is not None
            assert entry.token_ids[0] == target
            assert len(entry.token_ids) == 1 + k
            assert entry.rank == 1 + int((expected_V > expected_V[target]).sum())
            np.testing.assert_allclose(entry.logprobs, expected_V[list(entry.token_ids)], atol=1e-5)
        in_parts = [
            entry for part in (slice(4), slice(4, None)) for entry in all_logprobs(logits_TV[part], targets_T[part], k)
        ]
        assert in_parts == entries


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 1000))
def test_row_chunks_cover_all_rows_within_the_bound(num_rows: int, vocab_size: int, max_elements: int) -> None:
    chunks = list(row_chunks(num_rows, vocab_size, max_elements))
    assert [row for chunk in chunks for row in range(num_rows)[chunk]] == list(range(num_rows))
    assert all((chunk.stop - chunk.start) * vocab_size <= max(max_elements, vocab_size) for chunk in chunks)


# --- what is refused, and what shapes are taken ---


def test_rows_are_added_and_removed_once() -> None:
    sampler = make_sampler(max_num_rows=4)
    sampler.add_row(1, SamplingParams(), 0, [1], 1, set())
    for row in (1, 4, -1):
        with pytest.raises(ValueError, match=rf"row must be a free one from 0 to 3, got {row}"):
            sampler.add_row(row, SamplingParams(), 0, [1], 1, set())
    sampler.remove_row(1)
    for row in (1, 4, -1):
        with pytest.raises(ValueError, match=rf"row must be one that was added, got {row}"):
            sampler.remove_row(row)


@pytest.mark.parametrize(("shape", "positions"), [((3, 40), 2), ((2, 41), 2), ((2, 40), 3)])
def test_shapes_must_agree(shape: tuple[int, int], positions: int) -> None:
    with pytest.raises(ValueError, match=r"logits_SV must be \[2, 40\]"):
        sample(make_sampler(), torch.zeros(shape), np.arange(2), np.arange(positions))


def test_an_empty_batch_and_a_slice_of_padded_logits() -> None:
    sampler = make_sampler()
    empty = sample(sampler, torch.zeros(0, VOCAB_SIZE), np.arange(0), np.arange(0))
    assert (empty.token_ids, empty.logprobs) == ([], [])
    sampler.add_row(0, SamplingParams(logit_bias={1: 1.0}, seed=1), 1, [1], 1, set())
    padded_RV = torch.cat([random_logits(2, 2), torch.full((2, 8), 99.0)], dim=1)
    sliced = sample(sampler, padded_RV[1:, :VOCAB_SIZE], np.array([0]), np.array([5])).token_ids
    assert sliced == sample(sampler, random_logits(2, 2)[1:], np.array([0]), np.array([5])).token_ids
