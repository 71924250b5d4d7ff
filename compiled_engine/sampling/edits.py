"""Edits of logits before sampling: the row fields that hold a request's edits, and the edits' CPU implementation.

In order of application:

Additions: logit_bias, bad_words and min_tokens become lists of (token, value, condition). A bias always applies.
min_tokens adds minus infinity to ending tokens before some position. A bad word adds minus infinity to its last token
if its other tokens have just been generated. The device evaluates the conditions, so a step needs nothing from the
host.

Masks: allowed_token_ids, a mask that stays on the device, and token masks, which are sent with a step.

Penalties, from counts of the row's tokens. The repetition penalty (Keskar et al., "CTRL", 2019, as in transformers)
divides positive logits of tokens in prompt or output, and multiplies negative ones. Frequency and presence penalties
are those of OpenAI's API, for tokens in the output.

The Triton kernels are in edits_triton.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from compiled_engine.rows.row_fields import RowField, RowFields
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.token_mask import BITS, num_words

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# allowed_mask: index of the row's mask in allowed_words, -1 for none.
FIELDS = (
    RowField("repetition_penalty", torch.float32, initial=1),
    RowField("frequency_penalty", torch.float32),
    RowField("presence_penalty", torch.float32),
    RowField("allowed_mask", initial=-1),
)
ALWAYS = 2**31 - 1
# Columns of an addition: token id; bits of the float32 to add; the position before which it applies; start of the
# tokens that must precede it, within its row's prefixes; their number.
NUM_COLUMNS = 5
# An int16 holds a token's count, which saturates, and in the sign bit whether the prompt contains the token.
IN_PROMPT = -(2**15)
MAX_COUNT = 2**15 - 1


def counts_field(vocab_size: int) -> RowField:
    """Return the field, with a row for each request, that counts the request's tokens by column of the logits."""
    return RowField("counts", torch.int16, (vocab_size,))


def penalty_bytes(max_num_rows: int, vocab_size: int) -> int:
    """Return the bytes of device memory that the first request with penalties allocates. The runner reserves them."""
    return counts_field(vocab_size).num_bytes(max_num_rows)


class RowEdits(NamedTuple):
    """The kinds of edits that the logits of a request need."""

    added_to: bool  # logit_bias, bad_words or min_tokens
    limited: bool  # allowed_token_ids
    penalised: bool
    remembered: bool  # its generated tokens are recorded


class EditedRows:
    """Writes the edits of each request's logits to the row fields, the requests' state on the device.

    Large fields are declared when the first request needs them: `counts`; `tail`, the last generated tokens, padded
    with -1; `allowed_words`, masks with one bit per row and token.
    """

    def __init__(self, rows: RowFields, vocabulary: VocabularySlice):
        self._rows, self._vocabulary = rows, vocabulary
        self._tail_length = 0
        rows.declare(*FIELDS)
        rows.declare_list("additions", NUM_COLUMNS)
        rows.declare_list("prefixes", 1)

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: Iterable[int],
    ) -> RowEdits:
        """Write a request's edits to the fields of its row, which has just been started.

        Returns the kinds of edits that the row needs. See Sampler.add_row for the arguments.
        """
        additions = row_additions(params, num_prompt_tokens, eos_token_ids, self._vocabulary.whole_size)
        output_ids = token_ids[num_prompt_tokens:]
        penalised = params.has_penalties
        if penalised:
            self._start_counts(row, token_ids[:num_prompt_tokens], output_ids)
        if additions.longest_prefix > 0:
            self._start_tail(row, output_ids, additions.longest_prefix)
        if additions is not NO_ADDITIONS:
            self._rows.write_list("additions", row, additions.of(self._vocabulary).additions_NC)
            self._rows.write_list("prefixes", row, additions.prefixes_P)
        if penalised:
            self._rows.set(row, **{name: getattr(params, name) for name in PENALTIES})
        limited = params.allowed_token_ids is not None
        if params.allowed_token_ids is not None:
            self._allow(row, params.allowed_token_ids)
            self._rows.set(row, allowed_mask=row)
        return RowEdits(len(additions.additions_NC) > 0, limited, penalised, penalised or additions.longest_prefix > 0)

    def _start_counts(self, row: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if "counts" not in self._rows:
            self._rows.declare(counts_field(self._vocabulary.size))
        counts_V = np.zeros(self._vocabulary.size, dtype=np.int16)
        token_ids, counts = np.unique(self._vocabulary.own(output_ids), return_counts=True)
        counts_V[token_ids] = np.minimum(counts, MAX_COUNT)
        counts_V[self._vocabulary.own(prompt_ids)] |= np.int16(IN_PROMPT)
        self._rows.write("counts", row, counts_V)

    def _start_tail(self, row: int, output_ids: Sequence[int], length: int) -> None:
        """Write a row's last generated tokens to the field `tail`, with room for at least `length` tokens.

        The tails of all rows are equally long, so a larger `length` lengthens them all.
        """
        if "tail" not in self._rows:
            self._rows.declare(RowField("tail", shape=(length,), initial=-1))
        self._tail_length = have = max(self._tail_length, length)
        self._rows.lengthen("tail", have)
        tail_L = np.full(have, -1, dtype=np.int32)
        last = list(output_ids[-have:])
        tail_L[have - len(last) :] = last
        self._rows.write("tail", row, tail_L, offset=-have)

    def _allow(self, row: int, token_ids: Sequence[int]) -> None:
        size = self._vocabulary.size
        if "allowed_words" not in self._rows:
            self._rows.declare(RowField("allowed_words", shape=(num_words(size),)))
        self._rows.write("allowed_words", row, mask_of(self._vocabulary.own(token_ids), size))

    def allowed(self, row_index_R: torch.Tensor) -> StepMasks:
        """Return the masks of allowed tokens for R rows, at least one of which has a mask.

        row_index_R: int32 [R], the indices of the rows in the fields, on the device, no padding.
        """
        return StepMasks(self._rows["allowed_words"], self._rows["allowed_mask"].index_select(0, row_index_R))


class RowAdditions(NamedTuple):
    """The values that a request adds to its logits, each for one token and under a condition, as rows of integers."""

    additions_NC: np.ndarray  # int32 [n, NUM_COLUMNS]; a comment at NUM_COLUMNS describes the columns
    prefixes_P: np.ndarray  # int32 [p, 1], the tokens of bad words before the last one
    longest_prefix: int

    def of(self, vocabulary: VocabularySlice) -> RowAdditions:
        """Return only the additions to the logits of this rank's slice of the vocabulary.

        Their token ids become columns of the slice: relative to its first token. The tokens that must precede the last
        token of a bad word (prefixes_P) keep their ids.
        """
        if not vocabulary.is_divided:
            return self
        columns = self.additions_NC[:, 0] - vocabulary.first
        own = (columns >= 0) & (columns < vocabulary.size)
        additions_NC = self.additions_NC[own]
        additions_NC[:, 0] = columns[own]
        return self._replace(additions_NC=additions_NC)


NO_ADDITIONS = RowAdditions(np.zeros((0, NUM_COLUMNS), np.int32), np.zeros((0, 1), np.int32), 0)


def row_additions(
    params: SamplingParams, num_prompt_tokens: int, eos_token_ids: Iterable[int], vocab_size: int
) -> RowAdditions:
    """Return the values that logit_bias, bad_words and min_tokens add to a request's logits; NO_ADDITIONS for none.

    min_tokens forbids eos_token_ids and the request's stop_token_ids, as far as they are below vocab_size.
    """
    entries, prefixes = [], list[int]()
    forbidden = _bits(-np.inf)
    for token_id, bias in (params.logit_bias or {}).items():
        entries.append((token_id, _bits(bias), ALWAYS, 0, 0))
    for word in params.bad_words_token_ids:
        entries.append((word[-1], forbidden, ALWAYS, len(prefixes), len(word) - 1))
        prefixes += word[:-1]
    if params.min_tokens > 0:
        first_free = num_prompt_tokens + params.min_tokens
        ending_ids = {*eos_token_ids, *(params.stop_token_ids or ())}
        entries += [(token_id, forbidden, first_free, 0, 0) for token_id in ending_ids if token_id < vocab_size]
    if not entries:
        return NO_ADDITIONS
    longest = max(entry[-1] for entry in entries)
    return RowAdditions(np.array(entries, dtype=np.int32), np.array(prefixes, dtype=np.int32)[:, None], longest)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def add_(logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor, rows: RowFields) -> None:
    """Add each row's values (logit_bias, bad_words, min_tokens) to its logits, in place, where their condition holds.

    logits_RV: float32 [R, V]. row_index_R: int32 [R], each request's row in `rows`, no padding. positions_R: int64 [R],
    positions of the tokens to be sampled.
    """
    logits, positions, tail_NL = logits_RV.numpy(), positions_R.numpy(), rows.if_declared("tail")
    all_entries, all_prefixes = rows["additions"].numpy(), rows["prefixes"].numpy()[:, 0]
    starts_N, counts_N, prefixes_N = (
        rows[name].numpy() for name in ("additions_start", "additions_count", "prefixes_start")
    )
    for index, row in enumerate(row_index_R.tolist()):
        prefixes = all_prefixes[prefixes_N[row] :]
        entries = all_entries[starts_N[row] : starts_N[row] + counts_N[row]]
        tail = np.zeros(0, np.int32) if tail_NL is None else tail_NL[row].numpy()
        holds = positions[index] < entries[:, 2]
        for each in np.flatnonzero(entries[:, 4]):
            first, length = entries[each, 3:]
            holds[each] &= _ends_with(tail, prefixes[first : first + length])
        np.add.at(logits[index], entries[holds, 0], entries[holds, 1].copy().view(np.float32))


def _ends_with(tail: np.ndarray, prefix: np.ndarray) -> bool:
    return bool(np.array_equal(tail[len(tail) - len(prefix) :], prefix))


def mask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the mask (see TokenMask) that allows only these tokens: int32 [num_words]."""
    bits = np.zeros(num_words(vocab_size) * BITS, np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


@dataclass(frozen=True)
class StepMasks:
    """Masks of the tokens that each row of a step's logits may choose, for S rows; see token_mask.py."""

    masks_MW: torch.Tensor  # int32: M masks of W words
    mask_index_S: torch.Tensor  # int32: index of each row's mask; -1 for none

    @classmethod
    def of(cls, words_MW: np.ndarray, mask_index_S: np.ndarray, device: torch.device) -> StepMasks:
        """Upload masks (at least one) and each row's mask index from the host, without waiting for the device."""
        return cls(upload(words_MW, device), upload(mask_index_S.astype(np.int32), device))

    def select(self, index_R: torch.Tensor) -> StepMasks:
        """Return the masks of the rows with these indices (int64 [R], on the device)."""
        return replace(self, mask_index_S=self.mask_index_S.index_select(0, index_R))


def forbid_(logits_RV: torch.Tensor, masks: StepMasks) -> None:
    """Set the logits of tokens that a row's mask forbids to minus infinity, in place.

    logits_RV: float32 [R, V], for the R rows of the masks.
    """
    vocab_size = logits_RV.shape[1]
    words_MW = masks.masks_MW.numpy().astype("<i4", copy=False)
    for logits_V, mask in zip(logits_RV.numpy(), masks.mask_index_S.tolist(), strict=True):
        if mask >= 0:
            allowed_V = np.unpackbits(words_MW[mask].view(np.uint8), count=vocab_size, bitorder="little")
            logits_V[allowed_V == 0] = -np.inf


def penalise_(logits_RV: torch.Tensor, row_index_R: torch.Tensor, rows: RowFields) -> None:
    """Apply each row's penalties to its logits, in place. Only logits of tokens that occur in the request change.

    logits_RV: float32 [R, V]. row_index_R: int32 [R], each request's row in `rows`, no padding.
    """
    values_NP = np.stack([rows[name].numpy() for name in PENALTIES], axis=1)
    for logits_V, row in zip(logits_RV.numpy(), row_index_R.tolist(), strict=True):
        repetition, frequency, presence = values_NP[row]
        if repetition == 1 and frequency == 0 and presence == 0:
            continue  # the row may still hold counts of an earlier request
        words_V = rows["counts"][row].numpy()
        token_ids = np.flatnonzero(words_V)
        counts = (words_V[token_ids] & MAX_COUNT).astype(np.float32)
        logits = logits_V[token_ids]
        with np.errstate(over="ignore"):  # to infinity, as on the device
            logits = np.where(logits > 0, logits / repetition, logits * repetition)
        logits_V[token_ids] = logits - (frequency * counts + presence * (counts > 0))


def record_(row_index_S: torch.Tensor, token_ids_S: torch.Tensor, rows: RowFields, first_token: int = 0) -> None:
    """Record each request's sampled token: count it, and append it to the tail, the request's last tokens.

    Counts and tails are in the fields `counts` and `tail`, as far as these are declared. token_ids_S: int64 [S];
    negative values are error codes, which are skipped. row_index_S: int32 [S], each request's row in `rows`, -1 for
    padding; a row that uses counts or a tail must not occur twice. first_token: the token id of the first column of
    `counts`.
    """
    counts_NV, tail_NL = rows.if_declared("counts"), rows.if_declared("tail")
    taken_S = (row_index_S >= 0) & (token_ids_S >= 0)
    taken_rows, token_ids = row_index_S[taken_S].long(), token_ids_S[taken_S]
    if counts_NV is not None:
        own = (token_ids >= first_token) & (token_ids < first_token + counts_NV.shape[1])
        places = taken_rows[own], token_ids[own] - first_token
        words = counts_NV[places]
        counts_NV[places] = torch.where((words & MAX_COUNT) < MAX_COUNT, words + 1, words)
    if tail_NL is not None:
        tail_NL[taken_rows] = torch.cat([tail_NL[taken_rows, 1:], token_ids[:, None].int()], dim=1)
