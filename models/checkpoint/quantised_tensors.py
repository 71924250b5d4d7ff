"""Check the quantised weights of a checkpoint, find the placements of their codes and scales, and dequantise them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.models.checkpoint.mxfp4 import place_mxfp4
from compiled_engine.models.checkpoint.nvfp4 import NVFP4, WHOLE, combined
from compiled_engine.models.checkpoint.packed_weights import NAMES
from compiled_engine.models.foreign.placement import Placement, Span
from compiled_engine.passes.framework.parameter import (
    CODES,
    COLUMNS,
    INPUT_SCALE,
    QUANTISED,
    ROW_SCALES,
    SCALES,
    Parameter,
)
from compiled_engine.passes.framework.rounding import retile, unpack, values_of
from compiled_engine.quantisation import ELEMENTS, LinearScheme, Quantisation, Rounding

INPUT_SCALE_NAME = "input_scale"
# Names of the scales of queries, keys and values, which belong to no weight. kv_scales.py reads those of an FP8 cache.
KV_SCALES = re.compile(r".*(\.[qkv]_scale|\.[kv]_proj\.output_scale)$")


@dataclass(frozen=True)
class Stored:
    """The names of the tensors that a checkpoint stores beside a quantised weight's codes, and the weight's scheme.

    scales: scales of the weight's tiles. input_scale: static scale of the inputs. zeros: zero points. columns: order of
    the columns. whole: the scale by which those of tiles are multiplied. A name is None if the scheme has no such
    tensor.
    """

    scales: str
    input_scale: str | None
    scheme: LinearScheme
    zeros: str | None = None
    columns: str | None = None
    whole: str | None = None

    @property
    def decoding(self) -> list[str]:
        """The names of the tensors that decode the codes: scales, zero points, column order, scale of the whole."""
        return [name for name in (self.scales, self.zeros, self.columns, self.whole) if name is not None]

    @property
    def beside(self) -> list[str]:
        """The names of all tensors stored beside the codes: those that decode them, and the input scale."""
        return self.decoding if self.input_scale is None else [*self.decoding, self.input_scale]


def find_stored(
    tensors: Mapping[str, torch.Tensor], quantisation: Quantisation | None
) -> tuple[dict[str, Stored], dict[str, list[str]]]:
    """Return the names of the tensors that are stored beside each quantised tensor, and the problems found.

    The first dict is by the quantised tensor's name. The second one has texts about wrong tensors by kind of problem.
    tensors: the checkpoint's. quantisation: the checkpoint's rules; if it is None, or if weights are quantised while
    they are loaded, nothing is found.
    """
    found: dict[str, Stored] = {}
    kinds = ("missing", "of another shape", "of a value that is not allowed", "quantised against the rules")
    problems: dict[str, list[str]] = {kind: [] for kind in kinds}
    dtypes = {element.dtype for element in ELEMENTS.values()}
    if quantisation is None or quantisation.is_online:
        return found, problems
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype not in dtypes or name == module or tensor.dim() != 2:
            continue
        scheme = quantisation.scheme_of(module)
        if scheme is None or tensor.dtype != scheme.weight.dtype:
            reason = quantisation.why_not(module) if scheme is None else f"they ask for {scheme.weight}"
            problems["quantised against the rules"].append(f"{name} ({tensor.dtype}; {reason})")
            continue
        static = scheme.inputs is not None and scheme.inputs.static
        scales = f"{module}.{quantisation.scale_name}"
        input_scale = f"{module}.{INPUT_SCALE_NAME}" if static else None
        zeros, columns = _names_beside(module, scheme, quantisation)
        whole = f"{module}.{WHOLE}" if NVFP4.holds(scheme) else None
        found[name] = Stored(scales, input_scale, scheme, zeros, columns, whole)
        grids: dict[str, tuple[int, ...]] = {scales: scheme.weight.grid(*tensor.shape)}
        for beside, grid in (grids | ({input_scale: (1,)} if input_scale else {})).items():
            if beside not in tensors:
                problems["missing"].append(beside)
            elif tensors[beside].numel() != math.prod(grid) or (min(grid) > 1 and tuple(tensors[beside].shape) != grid):
                shape = list(tensors[beside].shape)
                problems["of another shape"].append(f"{beside} ({shape} instead of {list(grid)})")
            elif wrong := _wrong_value(tensors[beside], of_inputs=beside == input_scale):
                problems["of a value that is not allowed"].append(f"{beside} ({wrong})")
            elif wrong := "" if whole is None else _wrong_product(tensors[beside], tensors[whole]):
                problems["of a value that is not allowed"].append(f"{whole} ({wrong} with the scales of tiles)")
    return found, problems


def _wrong_product(scales: torch.Tensor, whole: torch.Tensor) -> str:
    """Return what `_wrong_value` says of the largest scale of a tile times the scale of the whole weight."""
    return _wrong_value(combined(scales.float().max(), whole), of_inputs=False)


def _wrong_value(scales: torch.Tensor, *, of_inputs: bool) -> str:
    """Return a text about a value that is not allowed in `scales`; "" if all values are allowed.

    of_inputs: whether these are scales of inputs, which must be above 0. Scales of weights may be 0, but not all.
    """
    if not scales.dtype.is_floating_point:
        return ""
    least, most = (float(value) for value in torch.aminmax(scales.float() if scales.itemsize == 1 else scales))
    for value in (least, most):
        if not math.isfinite(value):
            return f"{value} instead of finite numbers"
    if of_inputs and least <= 0:
        return f"{least} instead of a number above 0"
    return "0 alone instead of at least one other number" if least == most == 0 else ""


def _names_beside(module: str, scheme: LinearScheme, quantisation: Quantisation) -> tuple[str | None, str | None]:
    """Return the names of the tensors with a module's zero points and with the order of its columns.

    A name is None if the scheme has no such tensor. The tensors need no check here, since `read_packed` checks them.
    """
    if not quantisation.layout:
        return None, None
    names = NAMES[quantisation.layout]
    zeros = f"{module}.{names.zeros}" if scheme.weight.format.has_zeros else None
    return zeros, f"{module}.{names.groups}" if scheme.reordered else None


def encoded(placement: Placement, stored: Mapping[str, Stored]) -> Placement:
    """Return the placement, with the way to dequantise it added if its source is quantised.

    The fields `decode` and `beside` of Placement are set. stored: the result of `find_stored`.
    """
    if placement.source not in stored:
        return placement
    beside = stored[placement.source]
    return replace(placement, decode=str(beside.scheme._replace(inputs=None)), beside=tuple(beside.decoding))


def place_quantised(
    leaf: Parameter, of_weight: Sequence[Placement], stored: Mapping[str, Stored], tensors: dict[str, torch.Tensor]
) -> list[Placement]:
    """Return the placements of one parameter of a quantised weight, such as its codes or its scales.

    leaf: describes the parameter. of_weight: the placements of the whole weight. stored: the result of `find_stored`.
    tensors: the checkpoint's; scales and zero points in it are converted to tiles of the size that leaf.scheme states.
    Raises ValueError, with names, if the checkpoint contradicts the model's rules.
    """
    assert leaf.role in QUANTISED
    name = leaf.name.rpartition(".")[0]
    if [p.in_blocks for p in of_weight] == [True]:
        return [place_mxfp4(leaf, of_weight[0], tensors)]
    plain = [p.source for p in of_weight if p.source not in stored]
    if plain or not of_weight:
        found = ", ".join(f"{source} ({tensors[source].dtype})" for source in plain)
        raise ValueError(f"the rules quantise {name}, but the checkpoint holds {found or 'nothing for it'}")
    placed = []
    for placement in map(_by_rows, of_weight):
        beside = stored[placement.source]
        tile = LinearScheme.parse(leaf.scheme).weight
        if leaf.role == CODES:
            spans = _in_tiles(placement, Rounding("", 1, tile.format.per_byte))
            placed.append(Placement(placement.source, spans[0], leaf.name, spans[1]))
        elif leaf.role == INPUT_SCALE:
            assert beside.input_scale is not None
            placed.append(Placement(beside.input_scale, (), leaf.name, ((0, 1),)))
        elif leaf.role == COLUMNS:
            assert beside.columns is not None
            whole = (0, leaf.shape[1])
            if placement.taken[-1] != whole:
                raise ValueError(f"{name} holds a part of the columns of {placement.source}, which are reordered")
            placed.append(Placement(beside.columns, (whole,), leaf.name, ((0, 1), whole)))
        elif leaf.role == ROW_SCALES:
            assert beside.whole is not None
            num_rows = tensors[placement.source].shape[0]
            tensors[beside.whole] = tensors[beside.whole].float().expand(num_rows, 1)
            spans = _in_tiles(placement, Rounding("", 1, 0))
            placed.append(Placement(beside.whole, spans[0], leaf.name, spans[1]))
        else:
            of_tiles = beside.scales if leaf.role == SCALES else beside.zeros
            assert of_tiles is not None
            shape = tuple(tensors[placement.source].shape)
            read = _scales_for(tile, beside, tensors) if leaf.role == SCALES else tensors[of_tiles]
            tensors[of_tiles] = retile(read, beside.scheme.weight, tile, *shape)
            spans = _in_tiles(placement, tile)
            placed.append(Placement(of_tiles, spans[0], leaf.name, spans[1]))
    if leaf.role == INPUT_SCALE:
        values = {p.source: float(tensors[p.source]) for p in placed}
        if len(set(values.values())) > 1:
            raise ValueError(f"{name} has one scale for its inputs, but the checkpoint holds {values}")
        return placed[:1]
    if leaf.role == COLUMNS:
        first, *others = (p.source for p in placed)
        if different := [source for source in others if not torch.equal(tensors[first], tensors[source])]:
            raise ValueError(f"{name} has one order of its columns, but {first} and {different[0]} differ")
        return placed[:1]
    return placed


def _by_rows(placement: Placement) -> Placement:
    """Return the placement of a matrix of experts in the weight by rows, [E, N, K], in which its codes are kept.

    Placements of linears are returned unchanged.
    """
    if not placement.transposed or len(placement.placed) != 3:
        return placement
    *leading, columns, rows = placement.placed
    return replace(placement, placed=(*leading, rows, columns), transposed=False)


def _scales_for(tile: Rounding, stored: Stored, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the stored scales as tiles of `tile` keep them: in fp32, with the scale of the whole weight, or apart.

    Scales in fp32 have been combined before, for another parameter that has a part of the same weight.
    """
    scales = tensors[stored.scales]
    if tile.format.row_scales:
        return scales
    if stored.whole is None or scales.dtype == torch.float32:
        return scales.float()
    return combined(scales, tensors[stored.whole])


def _in_tiles(placement: Placement, tile: Rounding) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the placement's parts `taken` and `placed`, counted in tiles instead of elements.

    So converted, they apply to tensors with one element for each tile, such as scales. Raises ValueError if a part
    begins within a tile, or if the placement is transposed.
    """
    return _tiles_of(placement.taken, tile, placement), _tiles_of(placement.placed, tile, placement)


def _tiles_of(spans: tuple[Span, ...], tile: Rounding, placement: Placement) -> tuple[Span, ...]:
    *leading, rows, columns = spans
    found = list(leading)
    for (start, end), size in ((rows, tile.rows), (columns, tile.columns)):
        if placement.transposed or start % (size or 1):
            raise ValueError(f"the scales of {placement.source} are of {tile}, which its place in {spans} divides")
        found.append((start // size, -(-end // size)) if size else (0, 1))
    return tuple(found)


def decode_scaled(part: Placement, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Dequantise a part of a weight [N, K] into `target`, on the device and in the dtype of `target`.

    part: says which part of the weight to dequantise (Placement.taken). sources: the weight's codes, and the tensors of
    Stored.decoding.
    """
    scheme = LinearScheme.parse(part.decode)
    rounding, device = scheme.weight, target.device
    codes, scales, *others = (source.to(device) for source in sources)
    if NVFP4.holds(scheme):
        scales = combined(scales, others[0])
    values_NK = values_of(unpack(codes, rounding), rounding)
    shape = tuple(values_NK.shape)
    (first_row, last_row), (first, last) = part.taken
    rows = torch.arange(first_row, last_row, device=device) // (rounding.rows or shape[0])
    column_K = torch.arange(shape[1], device=device)
    if scheme.reordered:
        column_K[others[-1].long()] = column_K.clone()  # where the codes have each column of the weight
    columns = column_K[first:last]
    group_K = columns // (rounding.columns or shape[1])
    values = values_NK[first_row:last_row, columns]
    if rounding.format.has_zeros:
        values -= others[0].reshape(rounding.grid(*shape))[rows[:, None], group_K]
    elif rounding.format.zero is not None:
        values -= rounding.format.zero
    values *= scales.reshape(rounding.grid(*shape)).float()[rows[:, None], group_K]
    target.copy_((values.mT if part.transposed else values).reshape(target.shape))
