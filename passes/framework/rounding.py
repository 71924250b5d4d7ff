"""Quantises matrices to codes with one scale per tile, and dequantises them, for the loader and reference functions.

Shapes: values [N, K], divided into R x C tiles; scales [R, C]; E experts. Codes of four bits are packed two per byte,
in B = K / 2 bytes per row.

A tile's scale, in fp32, is the tile's largest magnitude divided by the largest value of the element format. A code is
the value divided by the scale, rounded. A tile of zeros gets a small scale, never zero. For integers of four bits the
scale is searched, since a smaller scale that clips the largest values often has the smaller error.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F

from compiled_engine.quantisation import LinearScheme, Rounding

SMALLEST_MAXIMUM = 2.0**-24
# Most columns of a unit of `in_halves`: 16 bytes, the most that a thread reads at once.
MOST_UNIT = 32
# Scales that are tried for codes in four bits, relative to that of the largest magnitude.
SEARCHED = tuple(1.075 - 0.025 * step for step in range(20))
# Values of a tile, one row, that a kernel searches on a GPU, at most; a power of two.
MOST_SEARCHED = 1024
# Values that are searched at once otherwise: on a GPU, to save memory; on a CPU, to stay in its cache, as each is read
# often.
_SEARCHED_ON_CPU, _SEARCHED_ON_GPU = 1 << 17, 1 << 22
_REORDERED_ROWS = 4096


def scales_of(values_NK: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the scale with which to quantise each tile of the values, fp32 [R, C]. `rounding` has the tiles' size."""
    tiles_RrCc = _tiles(values_NK, rounding)
    if (zero := rounding.format.zero) is not None:
        if _has_kernel(tiles_RrCc):
            from compiled_engine.kernels.scale_search import searched_scales  # Triton is not installed everywhere

            found_G = searched_scales(tiles_RrCc.flatten(0, 2).contiguous(), _factors(rounding), SMALLEST_MAXIMUM, zero)
            return found_G.unflatten(0, (len(tiles_RrCc), -1))
        at_once = _SEARCHED_ON_CPU if tiles_RrCc.device.type == "cpu" else _SEARCHED_ON_GPU
        rows = max(1, at_once // tiles_RrCc[0].numel())
        return torch.cat([_searched(part, rounding) for part in tiles_RrCc.split(rows)])
    largest_RC = tiles_RrCc.float().abs().amax((1, 3))
    # Divide by a tensor: for a Python number, PyTorch on CUDA multiplies by the reciprocal, which rounds twice.
    return largest_RC.clamp_min(SMALLEST_MAXIMUM) / torch.full_like(largest_RC, rounding.largest)


def _tiles(values_NK: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return values as tiles, [R, rows, C, columns]; zeros fill incomplete tiles at the end of both dimensions."""
    N, K = values_NK.shape
    rows, columns = rounding.rows or N, rounding.columns or K
    padded = F.pad(values_NK, (0, -K % columns, 0, -N % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _has_kernel(tiles_RrCc: torch.Tensor) -> bool:
    _, rows, _, size = tiles_RrCc.shape
    return tiles_RrCc.device.type == "cuda" and rows == 1 and size & (size - 1) == 0 and size <= MOST_SEARCHED


def _factors(rounding: Rounding) -> tuple[float, ...]:
    return tuple(size / rounding.largest for size in SEARCHED)


def _searched(tiles_RrCc: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return for each tile the scale with the smallest squared error, [R, C], of those that SEARCHED gives.

    Scales are rounded to bfloat16, since stored scales are.
    """
    tiles = tiles_RrCc.float()
    largest = tiles.abs().amax((1, 3), keepdim=True).clamp_min(SMALLEST_MAXIMUM)
    best_RC = least_RC = torch.empty(0)
    values = torch.empty_like(tiles)
    for factor in _factors(rounding):
        # Stored scales are rounded before codes are computed.
        scales = (largest * factor).bfloat16().float()
        _round(torch.div(tiles, scales, out=values), rounding)
        # In fp64 the order of the sum does not decide between two scales.
        error_RC = values.mul_(scales).sub_(tiles).square_().sum((1, 3), dtype=torch.float64)
        scales_RC = scales.squeeze((1, 3))
        if not len(best_RC):
            best_RC, least_RC = scales_RC, error_RC
        best_RC = torch.where(error_RC < least_RC, scales_RC, best_RC)
        least_RC = torch.minimum(error_RC, least_RC)
    return best_RC


def _round(scaled: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Round values, already divided by their scales, in place to integers from -z to z - 1; z: the zero point."""
    zero = rounding.format.zero
    assert zero is not None, rounding
    return scaled.round_().clamp_(-zero, zero - 1)


def codes_of(values_NK: torch.Tensor, scales_RC: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the codes [N, K] of values [N, K], or [N, B] in a packed format. Values out of range are clamped."""
    scaled_NK = values_NK.float() / spread(scales_RC, rounding, *values_NK.shape)
    if (zero := rounding.format.zero) is not None:
        return pack(_round(scaled_NK, rounding).add_(zero).to(rounding.dtype), rounding)
    assert not rounding.format.values, rounding
    scaled_NK = scaled_NK.clamp(rounding.least, rounding.largest)
    return (scaled_NK.round() if rounding.is_integer else scaled_NK).to(rounding.dtype)


def decode(
    codes_NK: torch.Tensor, scales_RC: torch.Tensor, rounding: Rounding, zeros_RC: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the fp32 values [N, K] of codes, [N, K] or in a packed format [N, B].

    zeros_RC: zero points, for formats that have them per tile.
    """
    return dequantise(unpack(codes_NK, rounding), scales_RC, rounding, zeros_RC)


def dequantise(
    codes_NK: torch.Tensor, scales_RC: torch.Tensor, rounding: Rounding, zeros_RC: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the fp32 values [N, K] of codes [N, K], one per element even in a packed format. See `decode`."""
    values_NK = values_of(codes_NK, rounding)
    if rounding.format.has_zeros:
        assert zeros_RC is not None, rounding
        values_NK -= spread(zeros_RC, rounding, *values_NK.shape)
    elif rounding.format.zero is not None:
        values_NK -= rounding.format.zero
    return values_NK * spread(scale_values(scales_RC), rounding, *values_NK.shape)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return stored scales as fp32. A uint8 scale is the exponent of a power of two plus 127 (E8M0); 255 is NaN."""
    if scales.dtype != torch.uint8:
        return scales.float()
    exponents = scales.float()
    return torch.where(exponents == 255, torch.nan, torch.exp2(exponents - 127))


def values_of(codes: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the fp32 value of each code before its zero point is subtracted and its scale applied.

    codes: any shape, one per element.
    """
    if not rounding.format.values:
        return codes.float()
    return _table(rounding.format.values, codes.device)[codes.int()]


# A tensor cannot be made of Python numbers while a CUDA graph is captured; a run before it fills the cache.
@cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def pack(codes: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Pack codes [..., K], one per byte, two into each byte: [..., K / 2]. The even column is in the low four bits.

    Codes of a format with one code per byte are returned unchanged.
    """
    if rounding.format.per_byte == 1:
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(codes: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return codes that are packed as by `pack` as codes [..., K], one per byte."""
    if rounding.format.per_byte == 1:
        return codes
    return _unpacked(codes)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def to_words(codes_NB: torch.Tensor) -> torch.Tensor:
    """Return packed codes of four bits [N, K / 2] reordered as Hopper's kernel reads them: int32 words [N, K / 8].

    A block of 128 columns is 16 words. Word w has the codes of the block's columns w, 16 + w, ..., 112 + w, the first
    in the lowest bits. K must be a multiple of 128.
    """
    num_rows, num_bytes = codes_NB.shape
    words = torch.empty((num_rows, num_bytes // 4), dtype=torch.int32, device=codes_NB.device)
    # In parts, since single codes take twice the memory.
    for part, out in zip(codes_NB.split(_REORDERED_ROWS), words.split(_REORDERED_ROWS), strict=True):
        singly = torch.stack((part & 15, part >> 4), -1).view(len(part), -1, 8, 16)
        pairs = singly[:, :, 0::2] | singly[:, :, 1::2] << 4
        out.copy_(pairs.transpose(2, 3).contiguous().view(torch.int32).flatten(1))
    return words


def from_words(words: torch.Tensor) -> torch.Tensor:
    """Undo `to_words`: return packed codes in the order of their columns, uint8 [N, K / 2]."""
    pairs = words.contiguous().view(torch.uint8).view(len(words), -1, 16, 4).transpose(2, 3)
    singly = torch.stack((pairs & 15, pairs >> 4), 3).view(len(words), -1)
    return singly[:, 0::2] | singly[:, 1::2] << 4


def unit_of(rounding: Rounding, num_columns: int) -> int:
    """Return the argument `unit` of `in_halves`: a number of columns that divides a tile's columns and num_columns."""
    return math.gcd(MOST_UNIT, rounding.columns, num_columns)


def in_halves(codes_ENB: torch.Tensor, unit: int) -> torch.Tensor:
    """Return packed codes of four bits, reordered as the kernels of experts read them, in the same shape [E, N, K / 2].

    Columns are taken in units of `unit`. The low bits of a unit's bytes hold the codes of its first half of columns,
    and the high bits those of its second half.
    """
    found = torch.empty_like(codes_ENB)
    for codes_NB, out_NB in zip(codes_ENB, found, strict=True):  # one by one, to save memory
        first, second = _unpacked(codes_NB).unflatten(-1, (-1, 2, unit // 2)).unbind(-2)
        out_NB.copy_((first | second << 4).flatten(-2))
    return found


def from_halves(codes_NB: torch.Tensor, unit: int) -> torch.Tensor:
    """Return codes, given as [N, K / 2] in the order of `in_halves`, one per byte in column order: [N, K]."""
    units = codes_NB.unflatten(-1, (-1, unit // 2))
    return torch.cat((units & 15, units >> 4), -1).flatten(-2)


def spread(scales_RC: torch.Tensor, rounding: Rounding, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return each tile's scale, repeated for the tile's elements, [num_rows, num_columns].

    A dimension with a single scale keeps size 1 and broadcasts.
    """
    for dim, size, tile in ((0, num_rows, rounding.rows), (1, num_columns, rounding.columns)):
        if tile > 1 and scales_RC.shape[dim] > 1:
            scales_RC = scales_RC.repeat_interleave(tile, dim).narrow(dim, 0, size)
    return scales_RC


def retile(scales: torch.Tensor, stored: Rounding, kept: Rounding, num_rows: int, num_columns: int) -> torch.Tensor:
    """Convert scales for the tiles of `stored` to scales for the tiles of `kept`, which are as large or smaller.

    Each kept tile gets the scale of the stored tile that contains it. scales: one per stored tile, in any shape.
    Returns one per kept tile, [R, C]. num_rows, num_columns: shape of the weight.
    """
    scales_RC = scales.reshape(stored.grid(num_rows, num_columns))
    for dim, size in ((0, num_rows), (1, num_columns)):
        old, new = ((stored.rows, kept.rows), (stored.columns, kept.columns))[dim]
        count = -(-size // new) if new else 1
        if old != new:
            scales_RC = scales_RC.repeat_interleave((old or size) // new, dim).narrow(dim, 0, count)
    return scales_RC


def round_inputs(
    x_TK: torch.Tensor, rounding: Rounding, static_1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a linear's inputs. Returns codes [T, K] and scales [T, C], or [1, 1] with a static scale.

    static_1: the scale from the checkpoint; None: compute the scales from the inputs.
    """
    scales = static_1.view(1, 1) if static_1 is not None else scales_of(x_TK, rounding)
    return codes_of(x_TK, scales, rounding), scales


def weight_codes(weight: torch.Tensor, scheme: str, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise a weight [N, K], or [E, N, K] for experts, while it is loaded. Returns its codes, maybe packed.

    scheme: the text form of a LinearScheme. With experts, N must be a multiple of a tile's rows. scales: the result of
    `weight_scales`, if it is known.
    """
    rounding = LinearScheme.parse(scheme).weight
    scales_RC = (weight_scales(weight, scheme) if scales is None else scales).flatten(0, -2)
    return codes_of(weight.flatten(0, -2), scales_RC, rounding).unflatten(0, weight.shape[:-1])


def weight_scales(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the scales, [R, C] or [E, R, C], of the codes that `weight_codes` returns for the same arguments."""
    scales_RC = scales_of(weight.flatten(0, -2), LinearScheme.parse(scheme).weight)
    return scales_RC.unflatten(0, (*weight.shape[:-2], -1))


def the_same(values: torch.Tensor, names: str) -> torch.Tensor:
    """Return the value that S merged linears share, as [1, ...]. Raises ValueError if their values differ.

    values: a value for each of the S linears: input scales [S] or column orders [S, K]. names: the linears' parameters,
    for the error.
    """
    if (values != values[0]).any():
        found = f"the scales of the inputs of {names} are {values.tolist()}"
        if values.dim() > 1:
            found = f"the orders of the columns of {names} differ"
        raise ValueError(
            f"{found}; they can be merged where these are the same: start with disable_passes=('merge_linears',)"
        )
    return values[:1]
