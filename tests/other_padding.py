"""Input preparation with other padding than zeros, to show that padding does not matter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compiled_engine.runner import input_batch
from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.request_states import RequestStates


def prepare_with(padding_1: torch.Tensor) -> Callable[[InputBatch, RequestStates, InputBuffers], None]:
    """Input preparation that gives padding tokens the id and the position that are in padding_1 when it runs."""

    def prepare(batch: InputBatch, states: RequestStates, buffers: InputBuffers) -> None:
        input_batch.prepare(batch, states, buffers)
        tokens = slice(0, batch.padded_tokens)
        for made_T in (buffers.input_ids_T, buffers.positions_T):
            made_T[tokens] = torch.where(buffers.slot_mapping_T[tokens] < 0, padding_1, made_T[tokens])

    return prepare
