"""Packed sequences of a step, as recurrences read them: each request's tokens, and its row in the states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.attention.inputs import ROWS, StepTensor
from compiled_engine.config import ModelConfig


def model_step_tensors(model: ModelConfig) -> tuple[StepTensor, ...]:
    """Return the step tensors that only models with recurrences read; empty for other models."""
    return () if model.recurrences is None else (ROWS,)


class Sequences(NamedTuple):
    """The requests of a step. query_start_loc_R1, seq_lens_R: see AttentionInputs.

    A new request begins with a state of zeros, whatever its row contains, so rows need not be cleared.
    """

    rows_R: torch.Tensor  # see ROWS
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor

    @property
    def starts(self) -> torch.Tensor:
        """Index of each request's first token, int64 [R]."""
        return self.query_start_loc_R1[:-1].long()

    @property
    def lens(self) -> torch.Tensor:
        """Each request's number of tokens in the step, int64 [R]."""
        return self.query_start_loc_R1.diff().long()

    def places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's request, and its index among that request's tokens in the step: two int64 [T].

        Padding tokens after the last request are counted as tokens of the last request.
        """
        tokens_T = torch.arange(num_tokens, device=self.rows_R.device)
        request_T = torch.searchsorted(self.query_start_loc_R1[1:].long(), tokens_T, right=True)
        request_T = request_T.clamp(max=len(self.rows_R) - 1)
        return request_T, tokens_T - self.starts[request_T]

    def real(self, request_T: torch.Tensor) -> torch.Tensor:
        """Return which tokens belong to a request with a row, bool [T]; padding does not. request_T: see `places`."""
        inside_T = torch.arange(len(request_T), device=request_T.device) < self.query_start_loc_R1[-1]
        return inside_T & (self.rows_R >= 0)[request_T]

    def states(self, state_S: torch.Tensor) -> torch.Tensor:
        """Return each request's state before the step, [R, ...]; zeros for new requests and for padding."""
        continues_R = (self.rows_R >= 0) & (self.seq_lens_R > self.lens)
        continues = continues_R.view(-1, *[1] * (state_S.dim() - 1))
        return torch.where(continues, state_S[self.rows_R.clamp(min=0).long()], 0)

    def store(self, state_S: torch.Tensor, new_R: torch.Tensor) -> None:
        """Write each request's new state, new_R [R, ...], to its row. Skips requests without a row or tokens."""
        real_R = (self.rows_R >= 0) & (self.lens > 0)
        state_S[self.rows_R[real_R].long()] = new_R[real_R].to(state_S.dtype)
