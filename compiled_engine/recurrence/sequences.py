"""The packed sequences of a step, as recurrences see them, with the row of each request in the states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.config import ModelConfig

# The row of each request in the states of recurrences; padding has none.
ROWS = StepTensor("rows_R", ("requests",), torch.int32, padding=-1)


def model_step_tensors(model: ModelConfig) -> tuple[StepTensor, ...]:
    """The step tensors that the model's own code reads in addition to those of every forward."""
    return () if model.recurrences is None else (ROWS,)


class Sequences(NamedTuple):
    """rows_R: see ROWS; query_start_loc_R1, seq_lens_R: see AttentionInputs.

    A request begins with a state of zeros: that of its row counts from its second step on. So nothing has to clear a
    row when it is given to a request.
    """

    rows_R: torch.Tensor
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor

    @property
    def starts(self) -> torch.Tensor:
        """The first token of each request, int64 [R]."""
        return self.query_start_loc_R1[:-1].long()

    @property
    def lens(self) -> torch.Tensor:
        """Tokens of each request in the step, int64 [R]."""
        return self.query_start_loc_R1.diff().long()

    def places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(request, place within the request's tokens) of each token, int64 [T] each; tokens behind the last request
        count as its own."""
        tokens_T = torch.arange(num_tokens, device=self.rows_R.device)
        request_T = torch.searchsorted(self.query_start_loc_R1[1:].long(), tokens_T, right=True)
        request_T = request_T.clamp(max=len(self.rows_R) - 1)
        return request_T, tokens_T - self.starts[request_T]

    def real(self, request_T: torch.Tensor) -> torch.Tensor:
        """Return whether tokens belong to a request with a row."""
        inside_T = torch.arange(len(request_T), device=request_T.device) < self.query_start_loc_R1[-1]
        return inside_T & (self.rows_R >= 0)[request_T]

    def states(self, state_S: torch.Tensor) -> torch.Tensor:
        """The state of each request before the step, [R, ...]; zeros for new requests and for padding."""
        continues_R = (self.rows_R >= 0) & (self.seq_lens_R > self.lens)
        continues = continues_R.view(-1, *[1] * (state_S.dim() - 1))
        return torch.where(continues, state_S[self.rows_R.clamp(min=0).long()], 0)

    def store(self, state_S: torch.Tensor, new_R: torch.Tensor) -> None:
        """Give the rows of the requests their states after the step, [R, ...]."""
        real_R = (self.rows_R >= 0) & (self.lens > 0)
        state_S[self.rows_R[real_R].long()] = new_R[real_R].to(state_S.dtype)
