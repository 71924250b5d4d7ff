"""Sequences, the description of a step's packed requests that recurrences read: their tokens and their states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.attention.inputs import ROWS, StepTensor
from compiled_engine.config import ModelConfig


def model_step_tensors(model: ModelConfig) -> tuple[StepTensor, ...]:
    """Return the declarations of inputs of the forward that only models with recurrences have; () for other models."""
    return () if model.recurrences is None else (ROWS,)


class Sequences(NamedTuple):
    """The R rows of a step. A row is a request with its tokens; the rows' tokens are packed one row after another.

    In a step with drafts, a request's row has its newest token, and is followed by a row for each draft, see `joined`.

    rows_R has the index of each request's state in a state tensor [S, ...]. A request without earlier tokens begins
    with a state of zeros, whatever the tensor contains, so states need not be cleared. The other fields are those of
    AttentionInputs.
    """

    rows_R: torch.Tensor  # see ROWS
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    host_3: torch.Tensor

    @property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All fields but host_3, for kernels."""
        return self.rows_R, self.query_start_loc_R1, self.seq_lens_R

    def rows_of_each(self, num_tokens: int) -> int:
        """Return how many consecutive rows each request has, if all rows are decodes of one token; otherwise 1.

        num_tokens: tokens of the step, padding included.
        """
        num_rows = len(self.rows_R)
        num_decodes, query_len, _ = self.host_3.tolist()
        return query_len if num_tokens == num_rows == num_decodes else 1

    @property
    def starts(self) -> torch.Tensor:
        """Index of each request's first token, int64 [R]."""
        return self.query_start_loc_R1[:-1].long()

    @property
    def lens(self) -> torch.Tensor:
        """Each request's number of tokens in the step, int64 [R]."""
        return self.query_start_loc_R1.diff().long()

    @property
    def num_before(self) -> torch.Tensor:
        """Each request's number of tokens before the step, int64 [R]; arbitrary for padding."""
        return self.seq_lens_R.long() - self.lens

    def joined(self) -> tuple[Sequences, torch.Tensor]:
        """Return (sequences with one row for each request, number of each request's tokens that are not drafts).

        The numbers are int64 [R]. The rows of a request's drafts directly follow the row of its newest token, and are
        merged into that row. A row whose draft does not exist has an empty context (sequence length 0), and becomes
        padding.
        """
        exists_R = (self.rows_R >= 0) & (self.seq_lens_R > 0)
        first_R = torch.ones_like(exists_R)
        first_R[1:] = ~(exists_R[1:] & (self.rows_R[1:] == self.rows_R[:-1]))
        (at,) = first_R.nonzero(as_tuple=True)
        ends = torch.cat((at[1:], at.new_tensor([len(first_R)])))
        starts_R1 = torch.cat((self.query_start_loc_R1[at], self.query_start_loc_R1[-1:]))
        rows_R = torch.where(exists_R[at], self.rows_R[at], -1)
        return Sequences(rows_R, starts_R1, self.seq_lens_R[ends - 1], self.host_3), self.lens[at]

    def places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (request of each token, index of the token among its request's tokens in the step), int64 [T] each.

        Padding tokens at the end are counted as tokens of the last request; `real` tells them apart.
        """
        tokens_T = torch.arange(num_tokens, device=self.rows_R.device)
        request_T = torch.searchsorted(self.query_start_loc_R1[1:].long(), tokens_T, right=True)
        request_T = request_T.clamp(max=len(self.rows_R) - 1)
        return request_T, tokens_T - self.starts[request_T]

    def real(self, request_T: torch.Tensor) -> torch.Tensor:
        """Return which tokens are real, bool [T]: neither padding tokens nor tokens of a padding request.

        request_T: the request of each token, see `places`.
        """
        inside_T = torch.arange(len(request_T), device=request_T.device) < self.query_start_loc_R1[-1]
        return inside_T & (self.rows_R >= 0)[request_T]

    def states(self, state_S: torch.Tensor) -> torch.Tensor:
        """Return each request's state before the step, [R, ...], from `state_S` [S, ...].

        Requests without earlier tokens, and padding requests, get zeros.
        """
        continues_R = (self.rows_R >= 0) & (self.seq_lens_R > self.lens)
        continues = continues_R.view(-1, *[1] * (state_S.dim() - 1))
        return torch.where(continues, state_S[self.rows_R.clamp(min=0).long()], 0)

    def store(self, state_S: torch.Tensor, new_R: torch.Tensor) -> None:
        """Write each request's new state, new_R [R, ...], to its place in `state_S` [S, ...].

        Padding requests, and requests without tokens in the step, are skipped.
        """
        real_R = (self.rows_R >= 0) & (self.lens > 0)
        state_S[self.rows_R[real_R].long()] = new_R[real_R].to(state_S.dtype)
