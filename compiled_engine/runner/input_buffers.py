"""The fixed buffers on the device that a step's inputs are made in, and its tokens; captured graphs know them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.attention.step_tensors import STEP_TENSORS, StepTensor, padding_of
from compiled_engine.rows.staged_writes import StagedWrites

# Steps of which tokens may wait to be read by the host: two for each stage and for what is launched ahead.
RING = 64
# Steps are numbered up to here, then from 0 again: int32 holds it, and the ring goes on as before.
LAST_NUMBER = (1 << 30) - 1
NO_GENERATION = -1


@dataclass(frozen=True)
class StagedDecodes:
    """A batch of decodes: `rows` of the states, int32 [R] in batch order, padded to `num_rows`.

    It was made of `step_ids`, a step's requests in the step's order, when the states had `generation`. A step of the
    same decodes has the same batch as long as they have it. `request_ids` and `order` are InputBatch's.
    """

    step_ids: list[str]
    generation: int
    num_rows: int
    request_ids: list[str]
    rows: np.ndarray
    order: np.ndarray | None

    @classmethod
    def padding(cls, num_rows: int) -> StagedDecodes:
        """Of nobody."""
        return cls([], NO_GENERATION, num_rows, [], np.empty(0, np.int32), None)

    def is_of(self, step_ids: list[str], generation: int, num_rows: int) -> bool:
        return self.num_rows == num_rows and self.generation == generation and self.step_ids == step_ids


class InputBuffers:
    """Room for the largest step: max_num_tokens tokens, max_num_rows rows (requests and one for padding).

    Written by the host, as part of the staged writes, int32: rows_R, the state row of each request, -1 for padding,
    and query_start_loc_R1. Made by kernels from these and the states: all else; logits_index_R is each request's last
    token. `step` has the step tensors that are made on the device, with their names and first dimensions; among them
    are those in `asked`, which passes ask for. work_length: of work_W. tokens_KR1 is int32 [RING, rows + 1] and pinned
    on the host: the sampled tokens of the last steps by request (-1 for none), after the number of the step.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        max_blocks: int,
        writes: StagedWrites,
        device: torch.device,
        work_length: int = 0,
        asked: Sequence[StepTensor] = (),
    ):
        self._rows = writes.field(max_num_rows)
        self._query_start_loc = writes.field(max_num_rows + 1)
        self.rows_R = self._rows.tensor
        self.query_start_loc_R1 = self._query_start_loc.tensor
        self.starts_of_decodes_R1 = torch.arange(max_num_rows + 1, dtype=torch.int32, device=device)

        def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        sizes = {
            "tokens": max_num_tokens,
            "requests": max_num_rows,
            "blocks_per_request": max_blocks,
            "work": work_length,
        }
        declared = (*(tensor for tensor in STEP_TENSORS if sizes.keys() >= {*tensor.dims}), *asked)
        step = padding_of(declared, sizes, device)
        self.asked = tuple(asked)
        self.step = [(tensor.name, tensor.dims[0], step[tensor.name]) for tensor in declared]
        self.input_ids_T, self.positions_T = step["input_ids_T"], step["positions_T"]
        self.slot_mapping_T = step["attention_inputs.slot_mapping_T"]
        self.seq_lens_R = step["attention_inputs.seq_lens_R"]
        self.block_table_RB = step["attention_inputs.block_table_RB"]
        self.logits_index_R = made(max_num_rows, dtype=torch.int64)
        self.sample_positions_R = made(max_num_rows, dtype=torch.int64)
        self.num_steps_1 = made(1, dtype=torch.int32)
        self.tokens_KR1 = torch.zeros(
            RING, max_num_rows + 1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self.decodes: StagedDecodes | None = None  # what rows_R holds, where that is decodes

    def stage_decodes(self, decodes: StagedDecodes) -> None:
        """Nothing is staged if the same rows are there."""
        there, self.decodes = self.decodes, decodes
        if there is not None and there.num_rows == decodes.num_rows and np.array_equal(there.rows, decodes.rows):
            return
        padded_rows_R = np.full(decodes.num_rows, -1, np.int32)
        padded_rows_R[: len(decodes.rows)] = decodes.rows
        self._rows.stage(0, padded_rows_R)

    def stage_batch(self, rows_R: np.ndarray, starts_R1: np.ndarray) -> None:
        """Any batch, padding rows included."""
        self.decodes = None
        self._rows.stage(0, rows_R)
        self._query_start_loc.stage(0, starts_R1)

    def forget_staged(self) -> None:
        """What was staged did not reach the device."""
        self.decodes = None
