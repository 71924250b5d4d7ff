"""Ranks that have some columns of the logits each choose the tokens of one that has all, and exchange few numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreting_process import interpret
from sampler_cases import EOS, logprob_entries, random_logits
from test_push_kernel import Ranks
from thread_ranks import ThreadGroup, on_ranks

from compiled_engine.parallel.group import FakeGroup
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling import gumbel, gumbel_triton, ranks
from compiled_engine.sampling.edits import StepMasks, mask_of
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import Best, VocabularySlice, keys_of
from compiled_engine.sampling.sampled_tokens import NO_TOKENS, TokenLogprobs
from compiled_engine.sampling.sampler import Sampler

VOCAB_SIZE, NUM_ROWS = 84, 8
LAST = VOCAB_SIZE - 1
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "seeded": {"temperature": 1.3, "logprobs": 0},
    "top-k": {"top_k": 5},
    "all filters": {"top_k": 30, "top_p": 0.7, "min_p": 0.05},
    "min-p": {"min_p": 0.2, "logprobs": -1},
    "top-p": {"top_p": 0.6},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    "biases": {"temperature": 0, "logit_bias": {0: 3.0, 41: 4.0, 42: 4.0, LAST: 5.0}},
    "words": {"temperature": 0, "bad_words_token_ids": ((LAST,), (7, 3), (5,)), "min_tokens": 3, "max_tokens": 9},
    "allowed": {"allowed_token_ids": [3, 40, 43, LAST]},
    "masked": {},
    "masked, filtered": {"top_k": 4},
}


class Doubled:
    """A logits processor that needs whole rows: the largest logit of each loses to the second."""

    def add_row(self, row: int, params: SamplingParams, token_ids: object, num_prompt_tokens: int) -> bool:
        return params.extra_args is not None

    def remove_row(self, row: int) -> None:
        pass

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        assert logits_RV.shape[1] == VOCAB_SIZE
        logits_RV.scatter_(1, logits_RV.argmax(1, keepdim=True), -torch.inf)


Outputs = list[tuple[list[int], list[TokenLogprobs | None]]]


def outputs_of(kinds: list[dict[str, object]], seed: int, group: ThreadGroup | FakeGroup, *, broken: bool) -> Outputs:
    """Return three steps of a request of each kind: tokens and log-probabilities."""
    sampler = Sampler(RowFields(NUM_ROWS, "cpu"), VOCAB_SIZE, processors=[Doubled()], group=group)
    masked = ["min_tokens" not in kind and kind in (KINDS["masked"], KINDS["masked, filtered"]) for kind in kinds]
    for row, kind in enumerate(kinds):
        sampler.add_row(row, SamplingParams(**kind), seed + row, [1, LAST, 50, 7], 2, {EOS}, edited_late=masked[row])  # type: ignore[arg-type]
    rows = np.array([*range(len(kinds)), -1])
    words_MW = mask_of(list(range(1, VOCAB_SIZE, 5)), VOCAB_SIZE)[None]
    found = []
    for step in range(3):
        logits_SV = (2 * random_logits(len(rows), seed + step, VOCAB_SIZE)).round() / 2  # with ties
        if broken:
            logits_SV[0, 60] = torch.nan
            logits_SV[-2] = -torch.inf
        own_SV = sampler.vocabulary.of_whole(logits_SV)
        masks = None
        if any(masked):
            index_S = np.where([*masked, False], 0, -1)
            masks = StepMasks.of(sampler.vocabulary.own_words(words_MW), index_S, torch.device("cpu"))
        row_index_S, positions_S = torch.from_numpy(rows.astype(np.int32)), torch.full((len(rows),), 4 + step)
        token_ids_S = sampler.sample(own_SV, rows, row_index_S, positions_S, masks)
        wanted_S = sampler.num_logprobs(rows)
        entries = logprob_entries(own_SV, token_ids_S, wanted_S, vocabulary=sampler.vocabulary)
        found.append((token_ids_S.tolist(), entries))
    return found


def check(kinds: list[dict[str, object]], seed: int, num_ranks: int, *, broken: bool = False) -> list[list[int]]:
    """Return the numbers per row that each rank sent, by rank."""
    expected = outputs_of(kinds, seed, FakeGroup(), broken=broken)

    def work(group: ThreadGroup) -> tuple[Outputs, list[int]]:
        return outputs_of(kinds, seed, group, broken=broken), group.exchanged

    exchanged = []
    for found, numbers in on_ranks(num_ranks, work):
        exchanged.append(numbers)
        for (tokens, entries), (expected_tokens, expected_entries) in zip(found, expected, strict=True):
            assert tokens == expected_tokens
            for entry, other in zip(entries, expected_entries, strict=True):
                assert (entry is None) == (other is None)
                if entry is not None and other is not None and not broken:
                    assert (entry.rank, entry.logprobs) == (other.rank, pytest.approx(other.logprobs, abs=1e-5))
    return exchanged


@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=NUM_ROWS),
    st.integers(0, 999),
    st.sampled_from((2, 3, 4)),
)
def test_tokens_are_those_of_one(names: list[str], seed: int, num_ranks: int) -> None:
    check([KINDS[name] for name in names], seed, num_ranks)


def test_logits_processors_see_whole_rows() -> None:
    check([{"temperature": 0, "extra_args": {"double": True}}, KINDS["top-k"]], 0, 2)


def test_why_there_is_no_token_is_known_to_all() -> None:
    kinds = [KINDS["greedy"], KINDS["seeded"], KINDS["allowed"]]
    (tokens, _), *_ = outputs_of(kinds, 0, FakeGroup(), broken=True)
    assert {tokens[0], tokens[2]} == NO_TOKENS
    check(kinds, 0, 2, broken=True)


@pytest.mark.parametrize(
    ("name", "most"), [("seeded", 1), ("penalties", 1), ("biases", 1), ("allowed", 1), ("top-k", 5), ("min-p", 1)]
)
def test_few_numbers_are_exchanged(name: str, most: int) -> None:
    kind = {key: value for key, value in KINDS[name].items() if key != "logprobs"}
    for numbers in check([kind], 1, 2):
        assert 0 < max(numbers) <= most
    for numbers in check([kind | {"logprobs": 3}], 1, 2):
        assert max(numbers) <= 8


def test_what_filters_cannot_do_with_few_candidates_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(check([KINDS["top-p"]], 1, 2)[0]) == VOCAB_SIZE // 2
    monkeypatch.setattr(ranks, "CANDIDATES", 4)
    assert max(check([KINDS["top-k"]], 1, 2)[0]) == VOCAB_SIZE // 2


def check_kernels(num_ranks: int, rank: int) -> None:
    """One rank runs; what the others' kernels would write into its memory is put there before."""
    vocab_size, num_rows = 2 * 3 * 1050, 4
    ranks = Ranks(num_ranks, rank, torch.float32)
    group = FakeGroup(num_ranks, rank, ranks.own)
    generator = torch.Generator().manual_seed(0)
    seeds_N, inverse_N = torch.arange(num_rows), torch.tensor([0.0, 1.0, 2.0, 1.0])
    for count in (4, 2, 3):
        logits_SV = torch.randn(count, vocab_size, generator=generator)
        logits_SV[1, 77] = torch.nan
        row_index_S = torch.tensor([0, 1, 2, -1], dtype=torch.int32)[:count]
        arguments = row_index_S, torch.arange(count), inverse_N, seeds_N, None
        expected_S, found_S = torch.zeros(count, dtype=torch.int64), torch.full((count,), -7)
        gumbel.sample(logits_SV, *arguments, expected_S)
        for peer in set(range(num_ranks)) - {rank}:
            slice_ = VocabularySlice.of(vocab_size, FakeGroup(num_ranks, peer))
            scores_S, tokens_S = torch.empty(count), torch.zeros(count, dtype=torch.int64)
            gumbel.sample(slice_.of_whole(logits_SV), *arguments, tokens_S, Best(slice_.first, scores_S))
            keys_S = keys_of(torch.where(scores_S.isnan(), torch.inf, scores_S), tokens_S)
            for slot, key in enumerate(keys_S):
                epoch = int(ranks.own.epochs[slot]) + 1
                ranks.rows(rank)[epoch & 1, slot, peer][:2] = key[None].view(torch.float32)
                ranks.flags(rank)[slot, peer] = epoch
        own = VocabularySlice.of(vocab_size, group)
        gumbel_triton.sample(own.of_whole(logits_SV), *arguments, found_S, None, own)
        assert found_S.tolist() == expected_S.tolist()
        for slot in range(count):
            assert int(ranks.flags(rank)[slot, rank]) == int(ranks.own.epochs[slot])


INTERPRETED = """
from test_sampling_on_ranks import check_kernels
for num_ranks, rank in ((1, 0), (2, 0), (2, 1), (3, 1)):
    check_kernels(num_ranks, rank)
print("right")
"""


def test_the_kernel_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]
