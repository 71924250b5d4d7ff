"""Check the tensors of experts in MXFP4, and find their placements in the model or decode them to the model's dtype.

Format: 32 values share a scale, a power of two in one byte (E8M0). Each value has four bits (E2M1). A byte holds two
values, the first one in the low half. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.foreign.placement import Placement, whole
from compiled_engine.passes.framework.parameter import CODES, Parameter
from compiled_engine.passes.framework.rounding import decode, retile
from compiled_engine.passes.linear.experts_codes import LARGEST_EXPONENT
from compiled_engine.quantisation import LinearScheme, Rounding

BLOCK, BYTES = 32, 16  # values that share a scale, and their bytes
# Ends of the names of a weight's two tensors.
BLOCKS, SCALES = "_blocks", "_scales"
NAN = 255  # the stored scale that is no power of two
_FORMAT = Rounding("mxfp4", 1, BLOCK)


def decode_mxfp4(part: Placement, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Decode a part of an expert weight into `target`, one expert at a time, on the device of `target` in its dtype.

    sources: blocks [E, R, G, 16] and scales [E, R, G], both uint8, for E experts with R rows of 32 G values. part:
    says which part of the values [E, R, 32 G] to decode, with all experts, and whether to transpose it.
    """
    _, (first_row, last_row), (first, last) = part.taken
    within = slice(first // BLOCK, -(-last // BLOCK))  # the blocks that hold the columns
    by_rows = target.mT if part.transposed else target
    for blocks, scales, out in zip(*sources, by_rows, strict=True):
        codes = blocks[first_row:last_row, within].to(target.device).flatten(1)
        values = decode(codes, scales[first_row:last_row, within].to(target.device), _FORMAT)
        out.copy_(values[:, first - within.start * BLOCK : last - within.start * BLOCK])


def check_blocks(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise ValueError, with names and values, unless each expert weight in MXFP4 has valid blocks and scales.

    Both must be uint8 of fitting shapes, without scales that are NaN. path: the checkpoint's folder, for the error.
    """
    names = {name.removesuffix(end) for name in tensors for end in (BLOCKS, SCALES) if name.endswith(end)}
    problems = [problem for name in sorted(names) if (problem := _problem(name, tensors))]
    if problems:
        raise ValueError(f"the tensors in {path} do not fit quantization_config: {name_some(problems, most=3)}")


def _problem(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a text about the first problem of the blocks and scales of the weight `name`; "" if there is none."""
    found = {f"{name}{end}": tensors.get(f"{name}{end}") for end in (BLOCKS, SCALES)}
    for each, tensor in found.items():
        if tensor is None:
            return f"{each} is missing"
        if tensor.dtype != torch.uint8:
            return f"{each} must be torch.uint8, got {tensor.dtype}"
    blocks, scales = (tensors[each] for each in found)
    if blocks.dim() != 4 or blocks.shape[3] != BYTES:
        return f"{name}{BLOCKS} must have four dimensions, the last of {BYTES}, got {list(blocks.shape)}"
    if scales.shape != blocks.shape[:3]:
        return f"{name}{SCALES} must be {list(blocks.shape[:3])}, got {list(scales.shape)}"
    if int(scales.max()) == NAN:
        return f"{name}{SCALES} must hold scales up to {NAN - 1}, got {NAN}, which is NaN"
    return f"{name} is a second copy of {name}{BLOCKS}" if name in tensors else ""


def place_mxfp4(leaf: Parameter, of_weight: Placement, tensors: dict[str, torch.Tensor]) -> Placement:
    """Return the placement of `leaf`, the parameter with the codes or the scales of an expert weight in MXFP4.

    For codes, the checkpoint's blocks in `tensors` are replaced by codes [E, N, K / 2]. For scales, its scales are
    replaced by scales [E, N, C] for tiles of the size that leaf.scheme states. of_weight: the placement of the whole
    weight, whose sources are the blocks and the scales. Raises ValueError, with the tensor's name, for scales that are
    too large for the kernels.
    """
    blocks, scales = of_weight.sources
    if leaf.role == CODES:
        tensors[blocks] = tensors[blocks].flatten(2)
        return whole(blocks, leaf.name, tensors[blocks].shape)
    tile = LinearScheme.parse(leaf.scheme).weight
    num_experts, num_rows, num_blocks = tensors[scales].shape
    if int(tensors[scales].max()) > LARGEST_EXPONENT:
        raise ValueError(f"{scales} must hold scales of at most 2^{LARGEST_EXPONENT - 127}, got a larger one or NaN")
    by_row = retile(tensors[scales].flatten(0, 1), _FORMAT, tile, num_experts * num_rows, num_blocks * BLOCK)
    tensors[scales] = by_row.unflatten(0, (num_experts, num_rows))
    return whole(scales, leaf.name, tensors[scales].shape)
