"""Triton kernels for causal depthwise convolutions with a state, see convolution.py.

convolve_kernel computes the outputs, in tiles of tokens. keep_inputs_kernel writes each request's new state; in a step
of only decodes it computes the outputs too, so that one launch is enough. Grids depend only on the numbers of tokens
and requests, and the kernels read the index of each request's state on the device, so CUDA graphs can capture both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.recurrence.rows_triton import request_of_row
from compiled_engine.recurrence.sequences import Sequences

TILE_T, TILE_D = 16, 64
# The most requests that are compared at a time to find the request of each token.
TILE_R = 256
# Channels per program of the kernel that handles one request.
FEW_D = 256


@triton.jit
def _inputs(
    x_ptr: tl.tensor, factor_ptr: tl.tensor, x_offsets: tl.tensor, factor_offsets: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Load the inputs of the convolution and return x * factor, in the dtype of x; zeros where the mask is not set.

    factor_ptr may be None, for x alone. The offsets are in elements.
    """
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + factor_offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _finished(
    y: tl.tensor,
    gate_ptr: tl.tensor,
    gate_offsets: tl.tensor,
    mask: tl.tensor,
    ACTIVATION: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return activation(y) * gate in `dtype`. y: fp32, rounded to `dtype` first.

    The results of the activation and of the multiplication are rounded too. gate_ptr may be None, for no gate.
    """
    y = y.to(dtype)
    if ACTIVATION == "silu":
        wide = y.to(tl.float32)
        y = (wide * tl.sigmoid(wide)).to(dtype)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * gate).to(dtype)
    return y


@quick_launches
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "x_stride", "factor_stride", "gate_stride"])
def convolve_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    factor_stride: tl.tensor,
    gate_stride: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Convolve each channel causally and write the outputs; see `recurrence.op.convolve`. The states are only read.

    Program: (tile of TILE_T tokens, tile of TILE_D channels).

    x_ptr: [T, D]; weight_ptr: [D, W]; bias_ptr: [D] or None; factor_ptr, gate_ptr: [T, D] or None. x_stride,
        factor_stride, gate_stride: elements from one token to the next.
    state_ptr: [S, D, SLOTS], the last inputs before this step, see `recurrence.op.convolve`; read only for requests
        with earlier tokens. With more than W - 1 SLOTS there may be drafts, see Sequences.
    out_ptr: [T, D], contiguous; padding tokens get zeros.
    rows_ptr: int32 [R], the index of each request's state, -1 for padding; query_start_loc_ptr, seq_lens_ptr: see
        AttentionInputs. num_tokens: T. num_rows: R.
    TILE_R: how many requests are compared at a time to find the request of each token.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token_T = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    channel_D = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    inside_T, inside_D = token_T < num_tokens, channel_D < D
    # A token's request is the number of requests that end before it.
    request_T = tl.zeros([TILE_T], tl.int32)
    for first in range(0, num_rows, TILE_R):
        request_R = first + tl.arange(0, TILE_R)
        end_R = tl.load(query_start_loc_ptr + 1 + request_R, mask=request_R < num_rows, other=2147483647)
        request_T += tl.sum((end_R[None, :] <= token_T[:, None]).to(tl.int32), 1)
    known_T = inside_T & (request_T < num_rows)
    row_T = tl.load(rows_ptr + request_T, mask=known_T, other=-1).to(tl.int64)
    start_T = tl.load(query_start_loc_ptr + request_T, mask=known_T, other=0)
    end_T = tl.load(query_start_loc_ptr + request_T + 1, mask=known_T, other=0)
    length_T = tl.load(seq_lens_ptr + request_T, mask=known_T, other=0)
    real_T = row_T >= 0
    if SLOTS > W - 1:
        real_T = real_T & (length_T > 0)
    place_T = token_T - start_T
    position_T = length_T - (end_T - start_T) + place_T
    y_TD = tl.zeros([TILE_T, TILE_D], tl.float32)
    if bias_ptr is not None:
        y_TD += tl.load(bias_ptr + channel_D, mask=inside_D, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        weight_D = tl.load(weight_ptr + channel_D * W + tap, mask=inside_D, other=0.0).to(tl.float32)
        distance = W - 1 - tap
        here_T = real_T & (place_T >= distance)
        if SLOTS > W - 1:  # the token before a draft is in the row before it
            ahead_T = known_T & (end_T - start_T == 1) & (request_T >= distance)
            here_T = here_T | (real_T & (tl.load(rows_ptr + request_T - distance, mask=ahead_T, other=-1) == row_T))
        here_TD = here_T[:, None] & inside_D[None, :]
        source_T = (token_T - distance).to(tl.int64)
        x_offsets_TD = source_T[:, None] * x_stride + channel_D[None, :]
        factor_offsets_TD = source_T[:, None] * factor_stride + channel_D[None, :]
        x_TD = _inputs(x_ptr, factor_ptr, x_offsets_TD, factor_offsets_TD, here_TD).to(tl.float32)
        if distance > 0:
            before_TD = (real_T & (here_T == 0) & (position_T >= distance))[:, None] & inside_D[None, :]
            slot_T = (position_T - distance) % SLOTS
            state_ptrs_TD = state_ptr + (row_T[:, None] * D + channel_D[None, :]) * SLOTS + slot_T[:, None]
            x_TD += tl.load(state_ptrs_TD, mask=before_TD, other=0.0).to(tl.float32)
        y_TD += x_TD * weight_D[None, :]
    y_TD = tl.where(real_T[:, None], y_TD, 0.0)
    gate_offsets_TD = token_T.to(tl.int64)[:, None] * gate_stride + channel_D[None, :]
    gated_TD = real_T[:, None] & inside_D[None, :]
    out_TD = _finished(y_TD, gate_ptr, gate_offsets_TD, gated_TD, ACTIVATION, out_ptr.dtype.element_ty)
    out_ptrs_TD = out_ptr + token_T.to(tl.int64)[:, None] * D + channel_D[None, :]
    tl.store(out_ptrs_TD, out_TD, mask=inside_T[:, None] & inside_D[None, :])


@quick_launches
@triton.jit(do_not_specialize=["num_rows", "rows_of_each", "x_stride", "factor_stride", "gate_stride"])
def keep_inputs_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_of_each: tl.tensor,
    x_stride: tl.tensor,
    factor_stride: tl.tensor,
    gate_stride: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_D: tl.constexpr,
    COMPUTES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the last inputs of each request to its state. Program: (request, tile of TILE_D channels).

    rows_of_each: how many rows of the step each request has, one for its newest token and one for each draft (see
        Sequences), or 1 if requests have different numbers. With 1 there is a program for each row, and the program of
        a request's first row handles its drafts too.
    COMPUTES: first compute the outputs of the request's tokens, one after another, and write them to out_ptr; otherwise
        out_ptr is not written.
    See convolve_kernel for the remaining arguments.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * rows_of_each
    channel_D = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    inside_D = channel_D < D
    row = tl.load(rows_ptr + place).to(tl.int64)
    start = tl.load(query_start_loc_ptr + place)
    length = tl.load(query_start_loc_ptr + place + 1) - start
    seq_len = tl.load(seq_lens_ptr + place)
    num_before = seq_len - length
    num_missing = 0  # tokens of drafts that do not exist
    if SLOTS > W - 1:
        row, length, follows_D = request_of_row(
            *(row, length, seq_len, rows_ptr, seq_lens_ptr, place, num_rows, SLOTS - W + 1)
        )
        num_drafts = tl.sum(follows_D, 0)
        length += num_drafts
        num_missing = rows_of_each - 1 - num_drafts
    # Vectors, since the interpreter cannot combine a block and a scalar to a mask.
    zero_D = tl.zeros([TILE_D], tl.int64)
    real_D = inside_D & (zero_D + row >= 0)
    state_ptrs_D = state_ptr + (row * D + channel_D) * SLOTS
    first_D = zero_D + start
    if COMPUTES:
        for token in range(length):
            y_D = tl.zeros([TILE_D], tl.float32)
            if bias_ptr is not None:
                y_D += tl.load(bias_ptr + channel_D, mask=inside_D, other=0.0).to(tl.float32)
            for tap in tl.static_range(W):
                weight_D = tl.load(weight_ptr + channel_D * W + tap, mask=inside_D, other=0.0).to(tl.float32)
                source_D = zero_D + token - (W - 1 - tap)
                here_D, before_D = real_D & (source_D >= 0), real_D & (source_D < 0) & (num_before + source_D >= 0)
                x_offsets_D = (first_D + source_D) * x_stride + channel_D
                factor_offsets_D = (first_D + source_D) * factor_stride + channel_D
                x_D = _inputs(x_ptr, factor_ptr, x_offsets_D, factor_offsets_D, here_D).to(tl.float32)
                slot_D = (num_before + source_D) % SLOTS
                x_D += tl.load(state_ptrs_D + slot_D, mask=before_D, other=0.0).to(tl.float32)
                y_D += x_D * weight_D
            y_D = tl.where(real_D, y_D, 0.0)
            gate_offsets_D = (first_D + token) * gate_stride + channel_D
            out_D = _finished(y_D, gate_ptr, gate_offsets_D, real_D, ACTIVATION, out_ptr.dtype.element_ty)
            tl.store(out_ptr + (start + token).to(tl.int64) * D + channel_D, out_D, mask=inside_D)
        for token in range(length, length + num_missing):
            out_ptrs_D = out_ptr + (start + token).to(tl.int64) * D + channel_D
            tl.store(out_ptrs_D, tl.zeros([TILE_D], out_ptr.dtype.element_ty), mask=inside_D)
    for back in tl.static_range(SLOTS):
        # Decodes have few tokens, and a round without a token to keep still costs its barriers. Prompts fill all slots,
        # and without branches their loads overlap.
        if not COMPUTES or back < length:
            source_D = zero_D + length - 1 - back
            kept_D = real_D & (source_D >= 0)
            x_offsets_D = (first_D + source_D) * x_stride + channel_D
            factor_offsets_D = (first_D + source_D) * factor_stride + channel_D
            x_D = _inputs(x_ptr, factor_ptr, x_offsets_D, factor_offsets_D, kept_D)
            tl.store(state_ptrs_D + (num_before + source_D) % SLOTS, x_D, mask=kept_D)


def convolve_triton(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    factor_TD: torch.Tensor | None,
    gate_TD: torch.Tensor | None,
    state_SDN: torch.Tensor,
    out_TD: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute the short convolution `recurrence.op.convolve` of each channel, W taps long, with Triton kernels.

    invariant: one compiled kernel computes the outputs of all steps.
    Writes out_TD and updates state_SDN, both contiguous. state_SDN: the last N inputs of each channel, for each of S
    rows. Other arguments are those of the op.
    """
    x_TD = _with_dense_rows(x_TD)
    factor_TD, gate_TD = (None if each is None else _with_dense_rows(each) for each in (factor_TD, gate_TD))
    (num_tokens, num_channels), width = x_TD.shape, weight_DW.shape[1]
    num_rows = len(sequences.rows_R)
    tensors = (x_TD, weight_DW.contiguous(), bias_D, factor_TD, gate_TD, state_SDN, out_TD, *sequences.on_device)
    strides = [0 if each is None else each.stride(0) for each in (x_TD, factor_TD, gate_TD)]
    constants = {"D": num_channels, "W": width, "SLOTS": state_SDN.shape[2], "ACTIVATION": activation}
    constants |= dependent_launch(x_TD.device)
    # In a step of decodes each row has one token: a single launch does both.
    computes = num_tokens == num_rows and not invariant
    rows_of_each = sequences.rows_of_each(num_tokens) if state_SDN.shape[2] > width - 1 else 1
    if not computes:
        tile_r = TILE_R if invariant else min(TILE_R, next_power_of_2(num_rows))
        convolve_kernel[(cdiv(num_tokens, TILE_T), cdiv(num_channels, TILE_D))](
            *tensors, num_tokens, num_rows, *strides, **constants, TILE_T=TILE_T, TILE_D=TILE_D, TILE_R=tile_r
        )
    keep_inputs_kernel[(num_rows // rows_of_each, cdiv(num_channels, FEW_D))](
        *tensors, num_rows, rows_of_each, *strides, **constants, TILE_D=FEW_D, COMPUTES=computes
    )


def _with_dense_rows(given_TD: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy if the elements of a row are not consecutive in memory."""
    return given_TD if given_TD.stride(1) == 1 else given_TD.contiguous()
