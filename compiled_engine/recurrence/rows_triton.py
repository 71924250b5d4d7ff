"""Triton function that finds the drafts of a request in a step. Sequences.joined does this with PyTorch's ops."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of_row(
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    place: tl.tensor,
    num_rows: tl.tensor,
    MOST_DRAFTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (index of the request's state, number of drafts) for the row with index `place` of a step; see Sequences.

    The drafts are those in the rows that follow. For the row of a draft, their number is -1: the program of the
    request's first row handles it. A row whose draft does not exist has an empty context (sequence length 0), and
    becomes padding: the index of its state is -1.

    rows_ptr, seq_lens_ptr: int32 [R], see Sequences. num_rows: R. MOST_DRAFTS: most drafts of a request in a step.
    """
    TILE: tl.constexpr = 64
    tl.static_assert(MOST_DRAFTS <= TILE)
    row = tl.load(rows_ptr + place)
    row = tl.where(tl.load(seq_lens_ptr + place) > 0, row, -1)
    next_D = place + 1 + tl.arange(0, TILE)
    near_D = (next_D < num_rows) & (next_D <= place + MOST_DRAFTS)
    row_D = tl.load(rows_ptr + next_D, mask=near_D, other=-1)
    exists_D = near_D & (tl.load(seq_lens_ptr + next_D, mask=near_D, other=0) > 0)
    num_drafts = tl.sum((exists_D & (row_D == row)).to(tl.int32), 0)
    num_drafts = tl.where(row >= 0, num_drafts, 0)
    before = tl.load(rows_ptr + tl.maximum(place - 1, 0))
    num_drafts = tl.where((row >= 0) & (place > 0) & (before == row), -1, num_drafts)
    return row.to(tl.int64), num_drafts
