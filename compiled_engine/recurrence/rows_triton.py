"""Triton function that finds the drafts of a request in a step. Sequences.joined does this with PyTorch's ops."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of_row(
    row: tl.tensor,
    length: tl.tensor,
    seq_len: tl.tensor,
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    place: tl.tensor,
    num_rows: tl.tensor,
    MOST_DRAFTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (index of the request's state, number of the row's tokens, which of the next rows are its drafts).

    This is for the row with index `place` of a step, see Sequences: the state's index is `row`, and the row has
    `length` tokens and the sequence length seq_len. The last result is int32 [D], ones for rows of existing drafts,
    otherwise zeros. A row whose draft does not exist has an empty context (sequence length 0), and becomes padding: the
    index of its state is -1.

    The program of a request's first row handles its drafts too, so a draft's row has no state (-1) and no tokens. Its
    program does not return: the compiler would move loads behind the return, and they would wait for its condition. No
    load of this function waits for another. A caller should load the state before it adds up the last result: the
    state's load then waits only for `row`.

    rows_ptr, seq_lens_ptr: int32 [R], see Sequences. num_rows: R. MOST_DRAFTS: most drafts of a request in a step.
    """
    TILE: tl.constexpr = triton.next_power_of_2(MOST_DRAFTS)
    before = tl.load(rows_ptr + tl.maximum(place - 1, 0))
    next_D = place + 1 + tl.arange(0, TILE)
    near_D = (next_D < num_rows) & (next_D <= place + MOST_DRAFTS)
    row_D = tl.load(rows_ptr + next_D, mask=near_D, other=-1)
    seq_len_D = tl.load(seq_lens_ptr + next_D, mask=near_D, other=0)
    row = tl.where(seq_len > 0, row, -1)
    is_draft = (row >= 0) & (place > 0) & (before == row)
    row, length = tl.where(is_draft, -1, row), tl.where(is_draft, 0, length)
    follows_D = near_D & (seq_len_D > 0) & (row_D == row) & (row_D >= 0)
    return row, length, follows_D.to(tl.int32)
