"""Pools the hidden states of steps into one vector per request, or into one per token.

Pooling by the last token reads its hidden state in the step that computes it. Every other kind of pooling is a weighted
sum or a maximum over all tokens of a prompt, whose length is known from the start. For causal models the sum or maximum
is accumulated in a row field, so that a prompt may be computed in chunks. A request that asks for a vector per token
gets the vectors of each step's tokens.

Nothing waits for the device: results are copied to pinned memory, and read when the step has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from compiled_engine.attention.inputs import NO_SECOND_TEXT, SECOND_TEXT
from compiled_engine.engine.forward import ForwardOutput
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import NewRequest
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature, Tail
from compiled_engine.engine.step_sampling import Advance, Deferred
from compiled_engine.features.pooling.extras import NAME, TOKEN_TYPES, Vectors
from compiled_engine.graphs.compiler.signature import POOLER
from compiled_engine.pooling import LAST, Pooling
from compiled_engine.rows.row_fields import RowField, RowFields
from compiled_engine.rows.staged_writes import download, upload

Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the weight of each token, fp32 [T], from its position, int32 [T], and its request's length, fp32 [T]."""

WEIGHTS: dict[str, Weights] = {
    "cls": lambda position_T, length_T: (position_T == 0).float(),
    "mean": lambda position_T, length_T: 1 / length_T,
    "mean_sqrt_len_tokens": lambda position_T, length_T: length_T.rsqrt(),
    "weightedmean": lambda position_T, length_T: 2 * (position_T + 1) / (length_T * (length_T + 1)),
    "lasttoken": lambda position_T, length_T: (position_T == length_T - 1).float(),
}
MAXIMUM = "max"


@dataclass(frozen=True)
class PooledRows:
    """The pooled rows of a step, which are being copied to the host. Implements Deferred."""

    request_ids: list[str]
    firsts: list[int]  # Vectors.first of each request
    counts: list[int]  # number of rows of each request
    rows_ML: torch.Tensor  # the requests' rows, one after the other

    def by_request(self) -> dict[str, Vectors]:
        """Return the vectors by request id. See Deferred."""
        rows_ML, width = self.rows_ML.numpy(), self.rows_ML.shape[1]
        ends = accumulate(self.counts)
        return {
            request_id: Vectors(first, width, rows_ML[end - count : end].tobytes())
            for request_id, first, count, end in zip(self.request_ids, self.firsts, self.counts, ends, strict=True)
        }


class ByToken(StepFeature):
    """Tracks the rows of requests that get a vector for each token."""

    name = NAME

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def added(self, row: int, request: NewRequest) -> None:
        if request.extras.get(self.name):
            self.rows.add(row)
        else:  # the row may have been such a request's
            self.rows.discard(row)


class TokenTypes(StepFeature):
    """Stores where the second of a request's two texts begins, for models with token type embeddings.

    The value is in the request's row of the field SECOND_TEXT on the device. The forward's input of token types is
    computed from this field, see attention/inputs.py.
    """

    name = TOKEN_TYPES

    def __init__(self, fields: RowFields) -> None:
        self._fields = fields
        fields.declare(RowField(SECOND_TEXT, initial=NO_SECOND_TEXT))

    def added(self, row: int, request: NewRequest) -> None:
        if (before := request.extras.get(self.name)) is not None:
            self._fields.set(row, **{SECOND_TEXT: before})


class StepPooling(Tail):
    """Pools the forward's output.

    Only causal models need row fields (a row of state for each request), since their prompts may take several steps.
    """

    def __init__(self, pooling: Pooling, parts: RunnerParts, by_token: ByToken, advance: Advance) -> None:
        model = parts.config.model
        self._kinds, self._states, self._buffers = pooling.kinds, parts.states, parts.buffers
        self._by_token, self.advance = by_token.rows, advance
        self._pooler = parts.model.ends.get(POOLER, nn.Identity())
        self._whole = not model.causal
        if pooling.every_token and not self._whole:
            shape = (model.hidden_size,)
            fields = (RowField(f"pooled_{kind}", torch.float32, shape=shape) for kind in pooling.kinds)
            self._states.fields.declare(*fields)

    def launch_rest(self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]) -> None:
        """Pool the forward's output, and add the pooled rows to `results`. See Tail.

        If the batch has no decode graph, this first advances the request states.
        """
        if not batch.has_decode_graph:
            self.advance(batch, None, batch.num_real_rows)
        if (pooled := self._results(batch, output.tensor)) is not None:
            results[ByToken.name] = pooled

    def _results(self, batch: InputBatch, hidden_TD: torch.Tensor) -> PooledRows | None:
        """Launch the pooling of a step and return its results, or None if no request gets a result."""
        count, by_token = batch.num_real_rows, self._by_token
        done = np.flatnonzero(batch.samples).tolist()
        if by_token:
            done = [i for i in done if int(batch.rows[i]) not in by_token]
        pooled_RW = self._pooled(batch, hidden_TD) if self._kinds != LAST else None
        parts, firsts, counts = [], [0] * len(done), [1] * len(done)
        if done:
            index_M = None if len(done) == count else upload(np.array(done, np.int64), hidden_TD.device)
            if pooled_RW is None:
                last_R = self._buffers.logits_index_R[:count]
                parts.append(hidden_TD[last_R if index_M is None else last_R[index_M]].float())
            else:
                parts.append(pooled_RW if index_M is None else pooled_RW[index_M])
        each = [i for i in range(count) if int(batch.rows[i]) in by_token] if by_token else []
        for i in each:
            start, end = int(batch.query_starts[i]), int(batch.query_starts[i + 1])
            parts.append(hidden_TD[start:end].float())
            firsts.append(int(batch.num_computed[i]))
            counts.append(end - start)
        if not parts:
            return None
        result_ML = self._pooler(parts[0] if len(parts) == 1 else torch.cat(parts))
        request_ids = [batch.request_of_row[i] for i in (*done, *each)]
        return PooledRows(request_ids, firsts, counts, download(result_ML))

    def _pooled(self, batch: InputBatch, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Pool each request's tokens up to the end of this step. Return fp32 [R, W], W values for each of R requests.

        For causal models, the result is also stored in row fields, the requests' state on the device.
        """
        count, num_tokens = batch.num_real_rows, batch.num_tokens
        buffers = self._buffers
        starts_R1 = buffers.starts_of_decodes_R1 if batch.decodes_only else buffers.query_start_loc_R1
        starts_R1 = starts_R1[: count + 1].long()
        tokens_R = starts_R1.diff()
        request_T = torch.repeat_interleave(tokens_R, output_size=num_tokens)
        position_T = buffers.positions_T[:num_tokens]
        length_R = tokens_R
        if not self._whole:
            rows_R = buffers.rows_R[:count].long()
            length_R = self._states.prefill_len_S[rows_R]
        length_T = length_R.float()[request_T]
        hidden_TD = hidden_TD[:num_tokens].float()
        pooled = []
        for kind in self._kinds:
            if kind == MAXIMUM:
                new_RD = torch.segment_reduce(hidden_TD, "max", offsets=starts_R1, axis=0, unsafe=True)
            else:
                weighted_TD = WEIGHTS[kind](position_T, length_T).unsqueeze(1) * hidden_TD
                new_RD = torch.segment_reduce(weighted_TD, "sum", offsets=starts_R1, axis=0, unsafe=True)
            if not self._whole:
                field_SD = self._states.fields[f"pooled_{kind}"]
                both = torch.maximum if kind == MAXIMUM else torch.add
                # When a request begins, its row still holds the values of an earlier request.
                begins_R1 = (buffers.seq_lens_R[:count] == tokens_R).unsqueeze(1)
                new_RD = torch.where(begins_R1, new_RD, both(field_SD[rows_R], new_RD))
                field_SD[rows_R] = new_RD
            pooled.append(new_RD)
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
