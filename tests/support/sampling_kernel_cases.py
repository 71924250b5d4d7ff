"""The sampling kernels against their plain forms: run in Triton's interpreter, and on a GPU.

Every case takes the device that the kernels run on; the plain forms run on the CPU. Nothing that a kernel may not
read is left finite: padding rows, gaps between rows and what outputs held before are NaN, or tokens that do not exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sampler_cases import logprob_entries
from token_masks import ByLastToken, step_masks

from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling import edits, edits_triton, filters_triton, gumbel, gumbel_triton
from compiled_engine.sampling.edits import IN_PROMPT, MAX_COUNT, EditedRows, forbid_
from compiled_engine.sampling.filters import FIELDS, Filters, filter_fields, thresholds
from compiled_engine.sampling.logprobs import FEW_TOKENS, NO_LOGPROBS
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER, NOTHING_ALLOWED, TokenLogprobs
from compiled_engine.sampling.sampler import Sampler
from compiled_engine.sampling.token_mask import TokenMask, ask, num_words

NUM_ROWS = 320
EOS = 2


def strided_logits(
    num_samples: int, vocab_size: int, dtype: torch.dtype, seed: int, ties: bool = False
) -> torch.Tensor:
    """Return logits [S, V] that are a part of longer rows, with NaN in the gaps. Some are minus infinity."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((num_samples, vocab_size + 3), torch.nan, dtype=dtype)
    logits = 3 * torch.randn(num_samples, vocab_size, generator=generator)
    logits = (logits * 2).round() / 2 if ties else logits
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, -1] = 1.0  # never a row without any
    whole[:, :vocab_size] = logits
    return whole[:, :vocab_size]


def to_device(logits_SV: torch.Tensor, device: str) -> torch.Tensor:
    """Return a copy on the device with the same values and stride."""
    base = logits_SV._base
    assert base is not None
    return base.to(device)[:, : logits_SV.shape[1]]


def row_indices(num_samples: int, seed: int, padding: bool = True) -> torch.Tensor:
    """Return int32 [S] with rows from 0 to NUM_ROWS - 1; a few are padding."""
    generator = np.random.default_rng(seed)
    rows = generator.permutation(NUM_ROWS)[:num_samples].astype(np.int32)
    if padding and num_samples > 1:
        rows[generator.random(num_samples) < 0.2] = -1
    return torch.from_numpy(rows)


def choose_matches(
    device: str,
    num_samples: int,
    vocab_size: int,
    dtype: torch.dtype,
    filtered: bool,
    sample: Callable[..., None] = gumbel_triton.sample,
) -> None:
    logits_SV = strided_logits(num_samples, vocab_size, dtype, vocab_size, ties=True)
    row_index_S = row_indices(num_samples, vocab_size)
    if not filtered:  # a threshold always keeps some token
        logits_SV[-1] = -torch.inf
    broken_S = torch.arange(num_samples) % 5 == 2
    logits_SV[broken_S, torch.arange(num_samples)[broken_S] * 997 % vocab_size] = torch.nan
    logits_SV[row_index_S < 0] = torch.nan
    generator = torch.Generator().manual_seed(1)
    temperatures_N = torch.tensor([0.0, 1.0, 0.6, 2.0, 1e-5, 1e3]).repeat(NUM_ROWS)[:NUM_ROWS]
    inverse_N = torch.where(temperatures_N > 0, 1 / temperatures_N, 0.0)
    seeds_N = torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=generator)
    positions_S = torch.randint(0, 2**31, (num_samples,), generator=generator)
    threshold_S = torch.tensor([-torch.inf, 2.0, 0.0]).repeat(num_samples)[:num_samples] if filtered else None
    expected_S, got_S = (torch.full((num_samples,), -7) for _ in range(2))
    got_S = got_S.to(device)
    gumbel.sample(logits_SV.float(), row_index_S, positions_S, inverse_N, seeds_N, threshold_S, expected_S)
    arguments = (row_index_S, positions_S, inverse_N, seeds_N, threshold_S)
    on_device = [None if each is None else each.to(device) for each in arguments]
    sample(to_device(logits_SV, device), *on_device, got_S)
    assert got_S.tolist() == expected_S.tolist()
    got_S = got_S.cpu()
    assert (got_S[row_index_S < 0] == 0).all()
    assert ((got_S == NOT_A_NUMBER) == (broken_S & (row_index_S >= 0))).all()
    assert filtered or row_index_S[-1] < 0 or broken_S[-1] or got_S[-1] == NOTHING_ALLOWED


def filter_requests(vocab_size: int, count: int, seed: int) -> list[SamplingParams]:
    generator = np.random.default_rng(seed)
    return [
        SamplingParams(
            temperature=float(generator.choice([0, 0.3, 1, 1.7])),
            top_k=int(generator.choice([0, 1, 3, 50, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1])),
            top_p=float(generator.choice([1, 1, 1e-6, 0.1, 0.5, 0.9, 0.999])),
            min_p=float(generator.choice([0, 0, 0.01, 0.2, 1])),
        )
        for _ in range(count)
    ]


def thresholds_match(device: str, num_samples: int, vocab_size: int, dtype: torch.dtype, ties: bool) -> None:
    """Check that thresholds keep the same tokens, except where sums differ from the limit by rounding alone."""
    logits_SV = strided_logits(num_samples, vocab_size, dtype, vocab_size + 1, ties)
    requests = filter_requests(vocab_size, NUM_ROWS, vocab_size)
    fields = {name: np.array([filter_fields(params)[name] for params in requests], np.float32) for name in FIELDS}
    fields["top_k"] = fields["top_k"].astype(np.int32)
    row_index_S = row_indices(num_samples, vocab_size)
    present = (row_index_S >= 0).numpy()
    expected_S = torch.full((num_samples,), -torch.inf)
    rows = row_index_S.numpy()[present]
    expected_S[present] = thresholds(logits_SV.float()[present], Filters.from_fields(fields, rows))
    logits_SV[~present] = torch.nan
    on_device = (torch.from_numpy(fields[name]).to(device) for name in FIELDS)
    got_S = filters_triton.thresholds(to_device(logits_SV, device), row_index_S.to(device), *on_device).cpu()
    assert (got_S[~present] == -torch.inf).all()
    for index in np.flatnonzero(present):
        logits_V, params = logits_SV[index].float(), requests[int(row_index_S[index])]
        possible_V = torch.isfinite(logits_V)
        differ_V = ((logits_V >= got_S[index]) != (logits_V >= expected_S[index])) & possible_V
        if differ_V.any():
            check_rounding(logits_V, differ_V, params)


def check_rounding(logits_V: torch.Tensor, differ_V: torch.Tensor, params: SamplingParams) -> None:
    """Check that the probabilities above both thresholds differ from top_p by rounding of float32 sums alone."""
    assert params.top_p < 1, params
    weights_V = ((logits_V.double() - logits_V.max()) / params.temperature).exp()
    by_value = torch.unique(logits_V[differ_V])
    assert len(by_value) <= 2
    weights_V[weights_V < params.min_p] = 0
    if 0 < params.top_k < len(logits_V):
        weights_V[logits_V.argsort(descending=True)[params.top_k :]] = 0
    above = float(weights_V[logits_V > by_value[0]].sum() / weights_V.sum())
    assert abs(above - params.top_p) < 1e-4


def edit_requests(vocab_size: int) -> list[SamplingParams]:
    last = vocab_size - 1
    return [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(frequency_penalty=0.5, presence_penalty=-1.5, logit_bias={0: -3, 5: 2, last: 90}),
        SamplingParams(logit_bias={token_id: token_id / 8 for token_id in range(0, min(vocab_size, 700), 3)}),
        SamplingParams(bad_words_token_ids=((7,), (5, 6, 7), (6, 9), (5, 6, last)), logit_bias={7: 50}),
        SamplingParams(min_tokens=3, stop_token_ids=[9, last], max_tokens=None),
        SamplingParams(repetition_penalty=0.6, min_tokens=3, bad_words_token_ids=((6, 9), (9,)), max_tokens=None),
    ]


def edits_match(device: str, num_samples: int, vocab_size: int) -> None:
    """Check additions, penalties and history over three steps; outputs end with the beginnings of bad words."""
    requests = edit_requests(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    row_index_S = row_indices(num_samples, num_samples, padding=False)
    words_NV = torch.randint(0, 3, (NUM_ROWS, vocab_size), generator=generator, dtype=torch.int16)
    words_NV[torch.rand(words_NV.shape, generator=generator) < 0.1] |= IN_PROMPT
    words_NV[:, 3] = MAX_COUNT
    tail_NL = torch.randint(0, 5, (NUM_ROWS, 3), generator=generator, dtype=torch.int32)
    tail_NL[::2] = torch.tensor([-1, 5, 6], dtype=torch.int32)
    on_cpu, on_device = RowFields(NUM_ROWS, "cpu"), RowFields(NUM_ROWS, device, triton=True)
    for fields in (on_cpu, on_device):
        edited = EditedRows(fields, VocabularySlice.of(vocab_size, None))
        for row in sorted({*range(len(requests)), *row_index_S.tolist()}):
            edited.add_row(row, requests[row % len(requests)], [1] * 4, 4, [EOS])
        fields.lengthen("tail", 3)
        fields.writes.apply()
        fields["counts"].copy_(words_NV)
        fields["tail"].copy_(tail_NL)
    for step in range(3):
        positions_S = torch.randint(4, 10, (num_samples,), generator=generator)
        logits_SV = strided_logits(num_samples, vocab_size, torch.float32, step)
        expected_SV, got_SV = logits_SV.clone(), to_device(logits_SV, device).clone()
        edits.add_(expected_SV, row_index_S, positions_S, on_cpu)
        edits.penalise_(expected_SV, row_index_S, on_cpu)
        rows, positions = row_index_S.to(device), positions_S.to(device)
        edits_triton.add_(got_SV, rows, positions, on_device)
        edits_triton.penalise_(got_SV, rows, on_device)
        torch.testing.assert_close(got_SV.cpu(), expected_SV, rtol=1e-6, atol=1e-6)
        token_ids_S = torch.randint(0, min(vocab_size, 12), (num_samples,), generator=generator)
        token_ids_S[::3] = 3
        token_ids_S[1::5] = NOT_A_NUMBER
        padded_S = row_index_S.clone()
        padded_S[::4] = -1
        edits.record_(padded_S, token_ids_S, on_cpu)
        edits_triton.record_(padded_S.to(device), token_ids_S.to(device), on_device)
        for name in ("counts", "tail"):
            assert torch.equal(on_device[name].cpu(), on_cpu[name])


def masks_match(device: str, num_samples: int, vocab_size: int) -> None:
    """Check masks, which some rows have and some share; memory between rows of logits must not change."""
    generator = np.random.default_rng(vocab_size + num_samples)
    words = generator.integers(-(2**31), 2**31, (num_samples, num_words(vocab_size)), dtype=np.int64)
    masks_S = [mask if generator.random() < 0.7 else None for mask in words.astype(np.int32)]
    masks_S[0] = np.full(num_words(vocab_size), -1, np.int32)
    logits_SV = strided_logits(num_samples, vocab_size, torch.float32, vocab_size)
    logits_SV[::3] = torch.nan
    expected_SV, got_SV = logits_SV.clone(), to_device(logits_SV, device)
    forbid_(expected_SV, step_masks(masks_S, "cpu"))
    edits_triton.forbid_(got_SV, step_masks(masks_S, device))
    torch.testing.assert_close(got_SV.cpu(), expected_SV, rtol=0, atol=0, equal_nan=True)
    assert got_SV._base is not None
    assert got_SV._base[:, vocab_size:].isnan().all()
    for mask, logits_V, before_V in zip(masks_S, expected_SV, logits_SV, strict=True):
        for token_id in {0, 31, 32, vocab_size // 2, vocab_size - 1} & set(range(vocab_size)):
            allowed = mask is None or mask[token_id // 32] >> token_id % 32 & 1
            wanted = before_V[token_id] if allowed else torch.tensor(-torch.inf)
            torch.testing.assert_close(logits_V[token_id], wanted, rtol=0, atol=0, equal_nan=True)
    order = torch.from_numpy(generator.permutation(num_samples))
    shuffled_SV = logits_SV[order]
    forbid_(shuffled_SV, step_masks(masks_S, "cpu").select(order))
    torch.testing.assert_close(shuffled_SV, expected_SV[order], rtol=0, atol=0, equal_nan=True)


def logprobs_match(device: str, num_samples: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Check log-probabilities of few and many tokens, in a batch and alone, with ties and minus infinity."""
    logits_SV = strided_logits(num_samples, vocab_size, dtype, 5, ties=True)
    logits_SV[0] = -torch.inf
    logits_SV[0, 1] = 4.0
    token_ids_S = torch.arange(num_samples) % vocab_size
    wanted = [NO_LOGPROBS, 0, NO_LOGPROBS, 3, 20, min(FEW_TOKENS, vocab_size), -1]
    for counts_S in (np.resize(wanted, num_samples), np.full(num_samples, 5), np.zeros(num_samples, np.int64)):
        got = logprob_entries(to_device(logits_SV, device), token_ids_S.to(device), counts_S, triton=True)
        expected = logprob_entries(logits_SV, token_ids_S, counts_S, triton=False)
        same_logprobs(got, expected)
        for entry, logits_V in zip(got, logits_SV.double(), strict=True):
            if entry is not None:
                logprobs_V = logits_V - logits_V.logsumexp(0)
                np.testing.assert_allclose(entry.logprobs, logprobs_V[list(entry.token_ids)], rtol=1e-5, atol=1e-5)


def same_logprobs(got: list[TokenLogprobs | None], expected: list[TokenLogprobs | None]) -> None:
    """Assert that log-probabilities are equal, except for the order of equally likely tokens."""
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.token_ids[0], one.rank) == (other.token_ids[0], other.rank)
            assert len(set(one.token_ids[1:])) == len(one.token_ids) - 1
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


def samplers_match(device: str, vocab_size: int, num_rows: int, num_steps: int) -> None:
    """Check that kernels and CPU sample the same tokens for requests with all parameters that come and go."""
    requests = [
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=3),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.1, top_k=20, top_p=0.95, logprobs=0),
        SamplingParams(min_p=0.1, logit_bias={3: 2.0}),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, min_tokens=4, bad_words_token_ids=((5,), (6, 7))),
        SamplingParams(temperature=0, bad_words_token_ids=((1, 2, 1), (1, 1), (2, 2))),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, top_p=0.8, logprobs=1, token_mask=ByLastToken(vocab_size)),
        SamplingParams(temperature=0, logit_bias={3: 9.0}, token_mask=ByLastToken(vocab_size)),
        SamplingParams(temperature=0.9, allowed_token_ids=[3, 33, vocab_size - 1], presence_penalty=0.5),
        SamplingParams(temperature=0, allowed_token_ids=[*range(5, 20)], token_mask=ByLastToken(vocab_size)),
        SamplingParams(temperature=0, logprobs=2, token_mask=ByLastToken(vocab_size)),
        SamplingParams(temperature=0.7, token_mask=ByLastToken(vocab_size)),
    ]
    masks = [params.token_mask for params in requests]
    places = RowFields(num_rows, "cpu"), RowFields(num_rows, device, triton=True)
    samplers = [Sampler(place, vocab_size) for place in places]
    generator = np.random.default_rng(vocab_size)
    outputs: dict[int, list[int]] = {}
    mask_of: dict[int, TokenMask | None] = {-1: None}
    arrivals = itertools.count()
    for step in range(num_steps):
        for row in range(num_rows):
            if row in outputs and generator.random() < 0.2:
                del outputs[row]
                for place, sampler in zip(places, samplers, strict=True):
                    sampler.remove_row(row)
                    place.free(row)
            if row not in outputs and generator.random() < 0.7:
                outputs[row] = generator.integers(0, 8, generator.integers(0, 4)).tolist()
                arrival = next(arrivals)
                mask_of[row] = masks[arrival % len(requests)]
                for place, sampler in zip(places, samplers, strict=True):
                    params = requests[arrival % len(requests)]
                    masked = params.token_mask is not None
                    place.start(row)
                    sampler.add_row(row, params, arrival, [1, 2, 3, *outputs[row]], 3, {EOS}, edited_late=masked)
        rows = np.array([*generator.permutation(list(outputs)), -1], dtype=np.int64)
        positions = np.array([3 + len(outputs.get(int(row), [])) for row in rows])
        logits_SV = strided_logits(len(rows), vocab_size, torch.bfloat16, step, ties=True)
        logits_SV[:, 1:3] = 9.0
        logits_SV[-1] = torch.nan
        index, at = torch.from_numpy(rows.astype(np.int32)), torch.from_numpy(positions)
        asked = [mask and ask(mask, outputs[row], vocab_size) for row in rows.tolist() for mask in [mask_of[row]]]
        some = any(mask is not None for mask in asked)
        on_cpu, on_device = (step_masks(asked, d) if some else None for d in ("cpu", device))
        expected = samplers[0].sample(logits_SV, rows, index, at, on_cpu)
        given = to_device(logits_SV, device)
        got = samplers[1].sample(given, rows, index.to(device), at.to(device), on_device)
        torch.testing.assert_close(given.cpu(), logits_SV, rtol=0, atol=0, equal_nan=True)
        token_ids = expected.tolist()
        assert got.tolist() == token_ids
        by_device = zip((samplers[1], samplers[0]), (given, logits_SV), (got, expected), (True, False), strict=True)
        found = [logprob_entries(logits, chosen, each.num_logprobs(rows), on) for each, logits, chosen, on in by_device]
        same_logprobs(*found)
        for row, token_id, mask in zip(rows[:-1].tolist(), token_ids, asked, strict=False):
            assert mask is None or mask[token_id // 32] >> token_id % 32 & 1
            outputs[row].append(token_id)


def composition_does_not_matter(device: str, vocab_size: int, num_samples: int) -> None:
    """Check that a row gets the same token alone as among other rows, in other places and with padding."""
    logits_SV = strided_logits(num_samples, vocab_size, torch.float32, 9)
    sampler = Sampler(RowFields(NUM_ROWS, device, triton=True), vocab_size)
    requests = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(temperature=0)]
    rows = row_indices(num_samples, 3, padding=False).tolist()
    for row in rows:
        sampler.add_row(row, requests[row % 3], row % 40, [1], 1, set())

    def tokens(rows: list[int], places: list[int]) -> list[int]:
        index = torch.tensor(rows, dtype=torch.int32, device=device)
        positions = torch.tensor([row % 7 for row in rows], device=device)
        return sampler.sample(logits_SV[places].to(device), np.array(rows), index, positions).tolist()

    places = list(range(num_samples))
    together = tokens(rows, places)
    shuffled = np.random.default_rng(0).permutation(num_samples)
    padded = tokens([-1, *[rows[i] for i in shuffled], -1], [0, *shuffled, 0])
    assert padded == [0, *[together[i] for i in shuffled], 0]
    for i in range(0, num_samples, max(1, num_samples // 7)):
        assert tokens([rows[i]], [i]) == [together[i]]


def degenerate_logits(device: str, vocab_size: int, triton: bool) -> None:
    """Check rows of extreme logits.

    If all but one are minus infinity, that token is chosen. If all are, or one is NaN, no token is. Of the largest
    floats, any token may be chosen.
    """
    filters: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.5}]
    requests = [SamplingParams(temperature=t, **each) for t in (0, 1e-5, 1.0, 1e37) for each in filters]
    sampler = Sampler(RowFields(len(requests), device, triton), vocab_size)
    for row, params in enumerate(requests):
        sampler.add_row(row, params, row, [1], 1, set())
    rows = np.arange(len(requests))
    index, positions = torch.from_numpy(rows).int().to(device), torch.ones(len(rows), dtype=torch.int64, device=device)
    single_V = torch.full((vocab_size,), -torch.inf)
    single_V[11] = -1e30
    sampled = sampler.sample(single_V.expand(len(rows), -1).to(device), rows, index, positions)
    assert sampled.tolist() == [11] * len(rows)
    mixed_V = torch.tensor([-torch.inf, -3e38, -1.0, -0.0, 0.0, 1.0, 3e38, torch.inf]).repeat(vocab_size)[:vocab_size]
    uniform = [torch.full((vocab_size,), value) for value in (torch.inf, 1e30, 3.4e38)]
    last_V = torch.arange(vocab_size) == vocab_size - 1

    def tokens(logits_V: torch.Tensor) -> set[int]:
        return set(sampler.sample(logits_V.expand(len(rows), -1).to(device), rows, index, positions).tolist())

    for logits_V in (*uniform, mixed_V, mixed_V[torch.arange(vocab_size) % 7]):
        assert tokens(logits_V) <= set(range(vocab_size))
        for of_nan_V in (last_V, mixed_V > 0, mixed_V < -1, torch.ones(vocab_size, dtype=torch.bool)):
            assert tokens(torch.where(of_nan_V, torch.nan, logits_V)) == {NOT_A_NUMBER}
    assert tokens(torch.full((vocab_size,), -torch.inf)) == {NOTHING_ALLOWED}


def frequencies(device: str, params: dict[str, Any], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each of 25 tokens was drawn, and the exact probabilities."""
    logits_V = torch.randn(25, generator=torch.Generator().manual_seed(4))
    requested = SamplingParams(**params)
    sampler = Sampler(RowFields(NUM_ROWS, device, triton=True), 25)
    for row in range(NUM_ROWS):
        sampler.add_row(row, requested, row, [1], 1, set())
    rows = np.arange(NUM_ROWS)
    index = torch.arange(NUM_ROWS, dtype=torch.int32, device=device)
    counts = np.zeros(25, dtype=np.int64)
    for position in range(1, 1 + draws // NUM_ROWS):
        positions = torch.full((NUM_ROWS,), position, device=device)
        drawn = sampler.sample(logits_V.expand(NUM_ROWS, -1).to(device), rows, index, positions)
        counts += np.bincount(drawn.cpu().numpy(), minlength=25)
    fields = {name: np.array([value], np.float32) for name, value in filter_fields(requested).items()}
    threshold = thresholds(logits_V[None], Filters.from_fields(fields, np.array([0])))
    weights = np.exp(logits_V.double().numpy() / requested.temperature) * (logits_V >= threshold).numpy()
    return counts, weights / weights.sum()
