"""Single logits that something is added to before a token is chosen: logit_bias, bad_words, min_tokens.

All three are additions (token, value, condition). A bias holds always; min_tokens adds minus infinity to the tokens
that end generation before some position; a bad word adds it to its last token where its other tokens have just been
generated. So a step needs nothing from the host: which conditions hold is seen on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from compiled_engine.sampling.async_copies import upload
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.row_table import RowTable
from compiled_engine.sampling.vocabulary_slice import VocabularySlice

ALWAYS = 2**31 - 1
# Columns of an addition: token id; bits of the float32 to add; the position before which it holds; where the tokens
# that have to precede it start among its request's prefixes, and how many they are.
NUM_COLUMNS = 5


class RowAdditions(NamedTuple):
    """One request's additions_NC [n, NUM_COLUMNS] and prefixes_P [p], both int32."""

    additions_NC: np.ndarray
    prefixes_P: np.ndarray
    longest_prefix: int

    def of(self, vocabulary: VocabularySlice) -> RowAdditions:
        """Those to a rank's columns, tokens counted from its first; prefixes stay as they are."""
        columns = self.additions_NC[:, 0] - vocabulary.first
        own = (columns >= 0) & (columns < vocabulary.size)
        additions_NC = self.additions_NC[own]
        additions_NC[:, 0] = columns[own]
        return self._replace(additions_NC=additions_NC)


def row_additions(
    params: SamplingParams, num_prompt_tokens: int, eos_token_ids: Iterable[int], vocab_size: int
) -> RowAdditions | None:
    """None if the request asks for none of the three."""
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
        return None
    longest = max(entry[-1] for entry in entries)
    return RowAdditions(np.array(entries, dtype=np.int32), np.array(prefixes, dtype=np.int32), longest)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


class LogitAdditions:
    """The additions of all rows in one list on the device; the row table says which part of it is a row's."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._rows: dict[int, RowAdditions] = {}
        self._changed = False
        self.additions_NC = torch.zeros(0, NUM_COLUMNS, dtype=torch.int32, device=device)
        self.prefixes_P = torch.zeros(0, dtype=torch.int32, device=device)

    def set_row(self, row: int, additions: RowAdditions | None) -> None:
        if additions is not None:
            self._rows[row] = additions
        elif self._rows.pop(row, None) is None:
            return
        self._changed = True

    def publish(self) -> None:
        """Bring the device up to date, if anything changed; the table is to be published after this."""
        if not self._changed:
            return
        self._table.set_row(slice(None), additions_count=0)
        additions_start = prefixes_start = 0
        for row, own in self._rows.items():
            self._table.set_row(
                row,
                additions_start=additions_start,
                additions_count=len(own.additions_NC),
                prefixes_start=prefixes_start,
            )
            additions_start += len(own.additions_NC)
            prefixes_start += len(own.prefixes_P)
        # Steps in flight keep the lists that they were launched with.
        nothing = RowAdditions(np.zeros((0, NUM_COLUMNS), np.int32), np.zeros(0, np.int32), 0)
        parts = [nothing, *self._rows.values()]
        self.additions_NC = upload(np.concatenate([part.additions_NC for part in parts]), self._device)
        self.prefixes_P = upload(np.concatenate([part.prefixes_P for part in parts]), self._device)
        self._changed = False


def add_(
    logits_RV: torch.Tensor,
    row_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    additions: LogitAdditions,
    tail_NL: torch.Tensor | None,
    table: RowTable,
) -> None:
    """Make each row's additions in place, on the CPU.

    logits_RV: float32 [R, V]. row_index_R: int32 [R], rows of the table, none of them padding. positions_R: int64
    [R], of the tokens to be chosen. tail_NL: int32 [N, L], the last generated tokens of each row (see history.py).
    """
    logits, positions = logits_RV.numpy(), positions_R.numpy()
    for index, row in enumerate(row_index_R.tolist()):
        start, count = table.host["additions_start"][row], table.host["additions_count"][row]
        prefixes = additions.prefixes_P.numpy()[table.host["prefixes_start"][row] :]
        entries = additions.additions_NC.numpy()[start : start + count]
        tail = np.zeros(0, np.int32) if tail_NL is None else tail_NL[row].numpy()
        holds = positions[index] < entries[:, 2]
        for each in np.flatnonzero(entries[:, 4]):
            first, length = entries[each, 3:]
            holds[each] &= _ends_with(tail, prefixes[first : first + length])
        np.add.at(logits[index], entries[holds, 0], entries[holds, 1].copy().view(np.float32))


def _ends_with(tail: np.ndarray, prefix: Sequence[int] | np.ndarray) -> bool:
    return bool(np.array_equal(tail[len(tail) - len(prefix) :], prefix))
