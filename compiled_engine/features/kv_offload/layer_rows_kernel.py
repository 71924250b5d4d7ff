"""Triton kernel that copies rows of all layers to a buffer, or from it, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launcher import quick_launches

TILE = 1024


@quick_launches
@triton.jit(do_not_specialize=["row_words", "num_pieces"])
def copy_rows_kernel(
    layers_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    buffer_ptr: tl.tensor,
    row_words: tl.tensor,
    num_pieces: tl.tensor,
    GATHERS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy up to TILE words of one row of one layer. The program ids are (row * num_pieces + piece, layer).

    layers_ptr: int64 [L, 4], for each layer: the address of its first row, the words from one row to the next, the
        words of a row, and the index of its first word in a row of the buffer.
    rows_ptr: int64 [R], the rows to copy. buffer_ptr: uint8 or int64 [R, row_words]; the words have its dtype.
    num_pieces: programs that copy a row of the layer that has most words. GATHERS: whether rows are copied to the
        buffer; otherwise they are copied from it.
    """
    place = tl.program_id(0) // num_pieces
    piece = tl.program_id(0) % num_pieces
    layer_ptr = layers_ptr + tl.program_id(1) * 4
    first_ptr = tl.load(layer_ptr).to(buffer_ptr.dtype)
    stride = tl.load(layer_ptr + 1)
    num_words = tl.load(layer_ptr + 2)
    start = tl.load(layer_ptr + 3)
    word_W = piece.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside_W = word_W < num_words
    layer_W_ptr = first_ptr + tl.load(rows_ptr + place) * stride + word_W
    buffer_W_ptr = buffer_ptr + place.to(tl.int64) * row_words + start + word_W
    if GATHERS:
        tl.store(buffer_W_ptr, tl.load(layer_W_ptr, mask=inside_W), mask=inside_W)
    else:
        tl.store(layer_W_ptr, tl.load(buffer_W_ptr, mask=inside_W), mask=inside_W)


def launch(layers: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor, most_words: int, *, gathers: bool) -> None:
    """Launch the kernel, which copies rows of all layers to the buffer, or from it unless `gathers`.

    most_words: words in the longest row of a layer. See `copy_rows_kernel` for the tensors.
    """
    num_pieces = triton.cdiv(most_words, TILE)
    grid = (len(rows) * num_pieces, len(layers))
    copy_rows_kernel[grid](layers, rows, buffer, buffer.shape[1], num_pieces, GATHERS=gathers, TILE=TILE, num_warps=4)
