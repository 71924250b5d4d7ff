"""Triton kernels for the edits of edits.py: additions, masks, penalties, records. Arguments are as in edits.py.

Dimensions: N rows of the row fields, which hold the state of all requests; R or S rows of logits, one for each request
of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.edits import MAX_COUNT, NUM_COLUMNS, StepMasks
from compiled_engine.sampling.token_mask import BITS

_MAX_COUNT = tl.constexpr(MAX_COUNT)
_NUM_COLUMNS = tl.constexpr(NUM_COLUMNS)
_BITS = tl.constexpr(BITS)

BLOCK_V = 2048
BLOCK_A = 128


@quick_launches
@triton.jit(do_not_specialize=["tail_length"], do_not_specialize_on_alignment=["row_index_ptr"])
def add_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    row_index_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    additions_ptr: tl.tensor,
    prefixes_ptr: tl.tensor,
    additions_start_ptr: tl.tensor,
    additions_count_ptr: tl.tensor,
    prefixes_start_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    tail_length: tl.tensor,
    BLOCK_A: tl.constexpr,
) -> None:
    """Add a request's values (logit_bias, bad_words, min_tokens) to its logits, those whose condition holds.

    There is one program per row of logits.

    logits_ptr: float32 [R, V]; row_index_ptr: int32 [R], the request's row in the row fields; positions_ptr: int64 [R].
    additions_ptr: int32 [., NUM_COLUMNS], see edits.NUM_COLUMNS. A row has additions_count additions, which begin at
        additions_start. prefixes_ptr: int32, the tokens of bad words before the last one; a row's prefixes begin at
        prefixes_start. Counts and starts: [N].
    tail_ptr: int32 [N, tail_length], the last generated tokens, or None: no row has bad words.
    """
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + sample)
    if row >= 0:
        start = tl.load(additions_start_ptr + row)
        count = tl.load(additions_count_ptr + row)
        position = tl.load(positions_ptr + sample)
        prefixes = prefixes_ptr + tl.load(prefixes_start_ptr + row)
        for first in range(0, count, BLOCK_A):
            index = first + tl.arange(0, BLOCK_A)
            present = index < count
            columns = additions_ptr + (start + index) * _NUM_COLUMNS
            token_ids = tl.load(columns, mask=present, other=0)
            values = tl.load(columns + 1, mask=present, other=0).to(tl.float32, bitcast=True)
            holds = present & (position < tl.load(columns + 2, mask=present, other=0))
            if tail_ptr is not None:
                prefix_start = tl.load(columns + 3, mask=present, other=0)
                prefix_length = tl.load(columns + 4, mask=present, other=0)
                tail_end = tail_ptr + (row + 1).to(tl.int64) * tail_length
                for back in range(1, tail_length + 1):
                    compared = present & (back <= prefix_length)
                    wanted = tl.load(prefixes + prefix_start + prefix_length - back, mask=compared, other=0)
                    holds = holds & ((wanted == tl.load(tail_end - back)) | ~compared)
            # Atomic, since a token may occur several times: with a bias, and forbidden.
            tl.atomic_add(logits_ptr + sample * logits_stride + token_ids, values, mask=holds)


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["mask_index_ptr"])
def forbid_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    masks_ptr: tl.tensor,
    mask_index_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Set the logits of tokens that a row's mask forbids to minus infinity; one program per row and token block.

    logits_ptr: float32 [R, VOCAB_SIZE]; masks_ptr, mask_index_ptr: see StepMasks.
    """
    sample = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_index_ptr + sample).to(tl.int64)
    if mask >= 0:
        token_ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = token_ids < VOCAB_SIZE
        words_ptr = masks_ptr + mask * ((VOCAB_SIZE + _BITS - 1) // _BITS)
        words = tl.load(words_ptr + token_ids // _BITS, mask=inside, other=0)
        forbidden = inside & (((words >> (token_ids % _BITS)) & 1) == 0)
        tl.store(logits_ptr + sample * logits_stride + token_ids, -float("inf"), mask=forbidden)


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["row_index_ptr"])
def penalise_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    row_index_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Apply a row's penalties to its logits; one program per row of logits and token block.

    logits_ptr: float32 [R, VOCAB_SIZE]; row_index_ptr: int32 [R], the request's row in the row fields; counts_ptr:
    int16 [N, VOCAB_SIZE], see edits.MAX_COUNT; repetition_ptr, frequency_ptr, presence_ptr: float32 [N].
    """
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + sample).to(tl.int64)
    repetition = 1.0
    frequency = 0.0
    presence = 0.0
    if row >= 0:
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        token_ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = token_ids < VOCAB_SIZE
        words = tl.load(counts_ptr + row * VOCAB_SIZE + token_ids, mask=inside, other=0).to(tl.int32)
        counts = (words & _MAX_COUNT).to(tl.float32)
        occurred = inside & (words != 0)
        logits_ptrs = logits_ptr + sample * logits_stride + token_ids
        logits = tl.load(logits_ptrs, mask=occurred, other=0.0)
        logits = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits -= frequency * counts + tl.where(counts > 0, presence, 0.0)
        tl.store(logits_ptrs, logits, mask=occurred)


@quick_launches
@triton.jit(
    do_not_specialize=["tail_length", "first_token"],
    do_not_specialize_on_alignment=["row_index_ptr", "token_ids_ptr"],
)
def record_kernel(
    row_index_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    tail_length: tl.tensor,
    first_token: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TILE_L: tl.constexpr,
) -> None:
    """Count a row's sampled token, and append it to the row's tail, its last tokens; one program per row of logits.

    row_index_ptr: int32 [S], the request's row in the row fields, -1 for padding; token_ids_ptr: int64 [S], negative
    error codes are skipped; counts_ptr: int16 [N, VOCAB_SIZE] or None; tail_ptr: int32 [N, tail_length] or None.
    first_token: token id of the counts' first column.
    """
    sample = tl.program_id(0)
    row = tl.load(row_index_ptr + sample).to(tl.int64)
    token_id = tl.load(token_ids_ptr + sample)
    if (row >= 0) & (token_id >= 0):
        if counts_ptr is not None:
            column = token_id - first_token
            inside = (column >= 0) & (column < VOCAB_SIZE)
            word_ptr = counts_ptr + row * VOCAB_SIZE + column
            word = tl.load(word_ptr, mask=inside, other=0).to(tl.int32)
            word += tl.where((word & _MAX_COUNT) < _MAX_COUNT, 1, 0)
            tl.store(word_ptr, word.to(tl.int16), mask=inside)
        if tail_ptr is not None:
            slots = tl.arange(0, TILE_L)
            tail = tail_ptr + row * tail_length
            later = tl.load(tail + slots + 1, mask=slots + 1 < tail_length, other=0)
            # All threads must have read before any thread writes.
            tl.debug_barrier()
            shifted = tl.where(slots + 1 < tail_length, later, token_id.to(tl.int32))
            tl.store(tail + slots, shifted, mask=slots < tail_length)


def add_(logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor, rows: RowFields) -> None:
    tail_NL = rows.if_declared("tail")
    add_kernel[(len(logits_RV),)](
        logits_RV,
        logits_RV.stride(0),
        row_index_R,
        positions_R,
        rows["additions"],
        rows["prefixes"],
        rows["additions_start"],
        rows["additions_count"],
        rows["prefixes_start"],
        tail_NL,
        0 if tail_NL is None else tail_NL.shape[1],
        BLOCK_A=BLOCK_A,
    )


def forbid_(logits_RV: torch.Tensor, masks: StepMasks) -> None:
    num_rows, vocab_size = logits_RV.shape
    forbid_kernel[(num_rows, cdiv(vocab_size, BLOCK_V))](
        logits_RV,
        logits_RV.stride(0),
        masks.masks_MW,
        masks.mask_index_S,
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
    )


def penalise_(logits_RV: torch.Tensor, row_index_R: torch.Tensor, rows: RowFields) -> None:
    num_rows, vocab_size = logits_RV.shape
    penalise_kernel[(num_rows, cdiv(vocab_size, BLOCK_V))](
        logits_RV,
        logits_RV.stride(0),
        row_index_R,
        rows["counts"],
        rows["repetition_penalty"],
        rows["frequency_penalty"],
        rows["presence_penalty"],
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
    )


def record_(row_index_S: torch.Tensor, token_ids_S: torch.Tensor, rows: RowFields, first_token: int = 0) -> None:
    counts_NV, tail_NL = rows.if_declared("counts"), rows.if_declared("tail")
    tail_length = 0 if tail_NL is None else tail_NL.shape[1]
    record_kernel[(len(row_index_S),)](
        row_index_S,
        token_ids_S,
        counts_NV,
        tail_NL,
        tail_length,
        first_token,
        VOCAB_SIZE=0 if counts_NV is None else counts_NV.shape[1],
        TILE_L=next_power_of_2(max(tail_length, 16)),  # rounded up, so that the kernel is rarely compiled again
    )
