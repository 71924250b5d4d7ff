"""What the runner keeps of each request: one fixed row from its admission until it is removed.

A preempted request is removed like a finished one and comes back as a new one, so rows never move and nothing is
kept twice. What steps read and advance lives on the device; the host writes it only when a request comes or gets
blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.messages import NewRequest
from compiled_engine.runner.staged_writes import StagedWrites


class RequestStates:
    """Suffix S: rows. On the device, int32:

    num_computed_S: tokens whose keys and values are in the cache, counting the steps that were launched.
    num_known_S: tokens that the host knew when the request came; from there on each step samples.
    last_token_S: the newest sampled token. block_table_SB: KV blocks in order.
    known_row_S: which of known_ids_KL is the row's.

    On the host: known_ids_KL, int32 [places * rows, max_model_len + 1], the tokens that were known when the request
    came. Kernels read them there (pinned, unified addressing), so that prompts are not kept on the device as well. A
    row has as many places for them, in turn, as steps may be in flight, since one may still have to read those of the
    request before; so many steps back, none is in flight. prompt_logprobs: how many are wanted, by row, where any are.
    generation: as long as it is the same, no request got or lost a row.
    """

    def __init__(
        self, max_num_rows: int, max_model_len: int, block_size: int, device: torch.device, steps_in_flight: int = 2
    ):
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # Rows of a batch: one more than requests, for padding tokens.
        max_batch = max_num_rows + 1
        self.writes = StagedWrites(max_num_rows * (max_blocks + 32) + 4 * max_batch + 4096, device)
        self._num_computed = self.writes.field(max_num_rows)
        self._num_known = self.writes.field(max_num_rows)
        self._last_token = self.writes.field(max_num_rows)
        self._block_table = self.writes.field(max_num_rows, max_blocks)
        self.num_computed_S = self._num_computed.tensor
        self.num_known_S = self._num_known.tensor
        self.last_token_S = self._last_token.tensor
        self.block_table_SB = self._block_table.tensor
        self._known_row = self.writes.field(max_num_rows)
        self.known_row_S = self._known_row.tensor
        self.known_ids_KL = torch.zeros(
            steps_in_flight * max_num_rows,
            max_model_len + 1,
            dtype=torch.int32,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        self._known_ids_KL = self.known_ids_KL.numpy()
        self._known_rows = np.arange(max_num_rows)

        self.num_prompt_tokens = np.zeros(max_num_rows, np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self.generation = 0
        self._num_blocks = [0] * max_num_rows
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def rows(self, request_ids: list[str]) -> np.ndarray:
        """int32 [R]"""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int32, len(request_ids))

    def add(self, request: NewRequest, num_computed: int) -> int:
        """Take a row for a request of which num_computed tokens are in the cache, and fill it; returns the row."""
        row = self._free_rows.pop()
        self.generation += 1
        self._row_of[request.request_id] = row
        self._known_rows[row] = known_row = (self._known_rows[row] + len(self._known_rows)) % len(self.known_ids_KL)
        self.known_ids(row)[: len(request.token_ids)] = request.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        if (wanted := request.sampling_params.prompt_logprobs) is not None:
            self.prompt_logprobs[row] = wanted
        self._num_computed.stage_one(row, num_computed)
        self._num_known.stage_one(row, len(request.token_ids))
        self._known_row.stage_one(row, known_row)
        self._num_blocks[row] = 0
        (block_ids,) = request.block_ids
        self.append_blocks(row, block_ids)
        return row

    def known_ids(self, row: int) -> np.ndarray:
        """int32 [max_model_len + 1]: the known tokens of the request that has the row."""
        known_ids_L: np.ndarray = self._known_ids_KL[self._known_rows[row]]
        return known_ids_L

    def append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        self._block_table.stage(row, np.array(block_ids, np.int32), offset=start)
        self._num_blocks[row] = start + len(block_ids)

    def remove(self, request_id: str) -> int | None:
        """Free the request's row; returns it, or None for a request without one: its step failed before it got it."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return None
        self.generation += 1
        self.prompt_logprobs.pop(row, None)
        self._free_rows.append(row)
        return row
