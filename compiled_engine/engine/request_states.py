"""Holds the state of running requests on the device. Each request has a fixed row, from admission until removal.

A preempted request is removed like a finished one, and added again as a new one, so rows never move. Steps update the
states on the device. The host writes to them only when a request arrives or gets blocks (rows/row_fields.py).
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.engine.messages import NewRequest
from compiled_engine.rows.row_fields import RowField, RowFields

# Name of the row field position_shift_S.
POSITION_SHIFT = "position_shift"


class RequestStates:
    """Assigns rows to requests, and holds the state of each row. Other modules may declare further `fields`.

    In an engine whose steps may yield several tokens per request, a row has up to `num_ahead` guesses of the tokens
    that follow its newest token, called the tokens *ahead* of it. has_history: keep each row's tokens on the device,
    see history_SL. S in names of tensors: rows.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        steps_in_flight: int = 2,
        num_ahead: int = 0,
        *,
        has_history: bool = False,
    ):
        self.block_size = block_size
        self.fields = fields = RowFields(max_num_rows, device)
        self.writes = fields.writes
        fields.declare(
            RowField("num_computed"),
            RowField("prefill_len"),
            RowField("last_token"),
            RowField("token_row"),
            RowField("block_table", shape=(-(-max_model_len // block_size),)),
        )
        # Number of tokens with keys and values in the cache once the launched steps have run, and number of tokens
        # known at admission: a step that computes all of these samples.
        self.num_computed_S, self.prefill_len_S = fields["num_computed"], fields["prefill_len"]
        # The newest sampled token, and the place of the row's prompt in all_token_ids_KL.
        self.last_token_S, self.token_row_S = fields["last_token"], fields["token_row"]
        self.block_table_SB = fields["block_table"]
        # Guesses of the tokens ahead of the newest one, -1 for missing ones; None if steps yield single tokens.
        self.ahead_SK: torch.Tensor | None = None
        # All tokens of each row; None without has_history.
        self.history_SL: torch.Tensor | None = None
        # Added to the positions of each row's tokens, for the model to read; None if no position is shifted.
        self.position_shift_S: torch.Tensor | None = None
        if num_ahead:
            fields.declare(RowField("ahead", shape=(num_ahead,), initial=-1))
            self.ahead_SK = fields["ahead"]
        if has_history:
            fields.declare(RowField("history", shape=(max_model_len + 1,)))
            self.history_SL = fields["history"]
        # The tokens known at admission, int32. Kernels read them from pinned host memory, so that prompts take no
        # device memory. A row has one place per step in flight, used in turn, because a step may still read the prompt
        # of the row's previous request. With guesses and without history_SL, steps append the tokens that they yield.
        self.all_token_ids_KL = torch.zeros(
            steps_in_flight * max_num_rows,
            max_model_len + 1,
            dtype=torch.int32,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        self._all_token_ids_KL = self.all_token_ids_KL.numpy()
        self._token_rows = list(range(max_num_rows))

        self.num_prompt_tokens = np.zeros(max_num_rows, np.int64)
        self.prefill_len = np.zeros(max_num_rows, np.int64)
        self.generation = 0  # changes when a request gets or loses a row
        self._num_blocks = [0] * max_num_rows
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def shift_positions(self) -> None:
        """Declare the row field POSITION_SHIFT, whose values are then added to the positions that the model reads."""
        self.fields.declare(RowField(POSITION_SHIFT))
        self.position_shift_S = self.fields[POSITION_SHIFT]

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def rows(self, request_ids: list[str]) -> np.ndarray:
        """Return the requests' rows, int32 [R]."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int32, len(request_ids))

    def add(self, request: NewRequest, num_computed: int) -> int:
        """Assign a row to a request, stage the row's state, and return the row.

        num_computed: number of the request's tokens whose K and V are in the cache.
        """
        row = self._free_rows.pop()
        self.generation += 1
        self._row_of[request.request_id] = row
        prefill_len = len(request.token_ids)
        self._token_rows[row] = token_row = (self._token_rows[row] + len(self._token_rows)) % len(
            self._all_token_ids_KL
        )
        self._all_token_ids_KL[token_row, :prefill_len] = request.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.prefill_len[row] = prefill_len
        self.fields.start(row, num_computed=num_computed, prefill_len=prefill_len, token_row=token_row)
        if self.history_SL is not None:
            self.fields.write("history", row, self.all_token_ids(row)[:prefill_len])
        self._num_blocks[row] = 0
        if request.block_ids:
            (block_ids,) = request.block_ids  # there is a single block table
            self.append_blocks(row, block_ids)
        return row

    def all_token_ids(self, row: int) -> np.ndarray:
        """Return the tokens of the row's request that were known at its admission, int32 [max_model_len + 1].

        Arbitrary values follow them, or the tokens sampled since, see `all_token_ids_KL`.
        """
        all_token_ids_L: np.ndarray = self._all_token_ids_KL[self._token_rows[row]]
        return all_token_ids_L

    def append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        self.fields.write("block_table", row, np.array(block_ids, np.int32), offset=start)
        self._num_blocks[row] = start + len(block_ids)

    def remove(self, request_id: str) -> int | None:
        """Free the request's row and return it. Returns None if the request never got one because its step failed."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return None
        self.generation += 1
        self._free_rows.append(row)
        self.fields.free(row)
        return row
