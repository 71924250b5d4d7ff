"""What the runner keeps of each request: one fixed row from its admission until it is removed.

A preempted request is removed like a finished one and comes back as a new one, so rows never move and nothing is
kept twice.
"""

from __future__ import annotations

import numpy as np

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.scheduling.step import NewRequest


class RequestStates:
    """token_ids[row] are the known tokens, num_tokens[row] of them; block_table[row] its KV blocks in order."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int):
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_rows, max_model_len + 1), np.int64)
        self.num_tokens = np.zeros(max_num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_rows, np.int64)
        self.block_table = np.zeros((max_num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_rows, np.int64)
        self.sampling_params: list[SamplingParams | None] = [None] * max_num_rows
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def add(self, request: NewRequest) -> int:
        """Take a row for a request and fill it; returns the row."""
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self.num_tokens[row] = len(request.token_ids)
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.sampling_params[row] = request.sampling_params
        self.num_blocks[row] = 0
        self.block_table[row] = 0
        self.append_blocks(row, request.block_ids)
        return row

    def append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = int(self.num_blocks[row])
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def append_token(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def remove(self, request_id: str) -> int | None:
        """Free the request's row; returns it, or None for a request without one: its step failed before it got it."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return None
        self.sampling_params[row] = None
        self._free_rows.append(row)
        return row
