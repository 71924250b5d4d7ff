"""Applies the rules of a transcription's tokens to logits on the device: suppressed tokens, and timestamps.

The rules are those of Radford et al., arXiv:2212.04356, as transformers applies them when it generates with Whisper. A
text with timestamps begins with one. Each segment of the text is between two timestamps; the last segment may lack its
end. Timestamps never decrease. If all timestamps together are more probable than each other token, the next token is a
timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compiled_engine.features.speech.extras import transcription_of
from compiled_engine.rows.row_fields import RowField, RowFields
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.speech import SpeechRules

# Of each row: the position of its first token; whether timestamps are allowed; whether its last token, and the one
# before, are timestamps, true also of tokens that do not exist; and its last timestamp, -1 for none.
START, TIMED, LAST, BEFORE, NEWEST = ("text_start", "text_is_timed", "last_is_time", "before_is_time", "newest_time")


class TokenRules:
    """Applies the rules to the logits of requests that transcribe, see `transcription_of`. Implements LogitsProcessor.

    The sampler calls `apply` before a token is chosen; `took` records the token afterwards.
    """

    def __init__(self, rules: SpeechRules, fields: RowFields) -> None:
        self._rules, self._fields = rules, fields
        fields.declare(RowField(START), RowField(TIMED), RowField(LAST), RowField(BEFORE), RowField(NEWEST))
        self._is_timed_N = np.zeros(fields.num_rows, dtype=bool)
        self._suppressed = torch.tensor(rules.suppressed, dtype=torch.int64, device=fields.device)
        self._suppressed_first = torch.tensor(rules.suppressed_first, dtype=torch.int64, device=fields.device)

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        kind = transcription_of(params.extra_args)
        if kind is None:
            return False
        first = self._rules.first_timestamp
        times = [token - first for token in token_ids[num_prompt_tokens:]]
        last, before = (len(times) < number or times[-number] >= 0 for number in (1, 2))
        newest = next((time for time in reversed(times) if time >= 0), -1)
        self._is_timed_N[row] = kind == "timestamps"
        values = {START: num_prompt_tokens, TIMED: self._is_timed_N[row], LAST: last, BEFORE: before, NEWEST: newest}
        self._fields.set(row, **values)
        return True

    def remove_row(self, row: int) -> None:
        self._is_timed_N[row] = False

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        rows_R = row_index_R.long()
        logits_RV.index_fill_(1, self._suppressed, -torch.inf)
        first_R1 = (positions_R == self._fields[START][rows_R]).unsqueeze(1)
        chosen_RN = logits_RV.index_select(1, self._suppressed_first).masked_fill_(first_R1, -torch.inf)
        logits_RV.index_copy_(1, self._suppressed_first, chosen_RN)
        if self._is_timed_N.any():
            self._limit(logits_RV, rows_R, first_R1)

    def took(self, rows_N: np.ndarray, last_token_S: torch.Tensor) -> None:
        """Record the newest tokens of requests whose text has timestamps; other requests are ignored.

        rows_N: the requests' rows. last_token_S: newest token by row.
        """
        timed_N = rows_N[self._is_timed_N[rows_N]]
        if not len(timed_N):
            return
        rows = upload(timed_N.astype(np.int64), last_token_S.device)
        time_N = last_token_S[rows] - self._rules.first_timestamp
        last, before, newest = (self._fields[name] for name in (LAST, BEFORE, NEWEST))
        before.index_copy_(0, rows, last[rows])
        last.index_copy_(0, rows, (time_N >= 0).to(last.dtype))
        newest.index_copy_(0, rows, torch.where(time_N >= 0, time_N, newest[rows]))

    def _limit(self, logits_RV: torch.Tensor, rows_R: torch.Tensor, first_R1: torch.Tensor) -> None:
        """Apply the rules of timestamps in place, to the rows that have timestamps.

        first_R1: whether a row's first token is being chosen.
        """
        rules, never = self._rules, -torch.inf
        text_RV, times_RV = logits_RV.tensor_split([rules.first_timestamp], 1)
        timed_R1, last_R1, before_R1 = (self._fields[name][rows_R, None] > 0 for name in (TIMED, LAST, BEFORE))
        newest_R1 = self._fields[NEWEST][rows_R, None]
        closes_R1 = last_R1 & before_R1 & ~first_R1  # a segment has begun, so text must follow
        ends_R1 = last_R1 & ~before_R1  # a segment has ended, so the next one must begin, or the text end
        text_RV[:, : rules.eos].masked_fill_(timed_R1 & (ends_R1 | first_R1), never)
        text_RV[:, rules.eos :].masked_fill_(timed_R1 & first_R1, never)
        text_RV[:, rules.no_timestamps :].masked_fill_(timed_R1, never)
        time_V = torch.arange(times_RV.shape[1], device=times_RV.device)
        wrong_RV = closes_R1 | (time_V < torch.where(ends_R1, newest_R1, newest_R1 + 1))
        if rules.latest_first is not None:
            wrong_RV = wrong_RV | (first_R1 & (time_V > rules.latest_first))
        times_RV.masked_fill_(timed_R1 & wrong_RV, never)
        likely_R1 = times_RV.logsumexp(1, keepdim=True) > text_RV.amax(1, keepdim=True)
        text_RV.masked_fill_(timed_R1 & likely_R1, never)
