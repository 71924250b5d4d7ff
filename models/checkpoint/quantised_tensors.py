"""Quantised weights in a checkpoint: check values and scales, and place them where the weight belongs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.models.foreign.placement import Placement, Span
from compiled_engine.passes.framework.parameter import CODES, INPUT_SCALE, QUANTISED, Parameter
from compiled_engine.passes.framework.rounding import retile
from compiled_engine.quantisation import ELEMENTS, LinearScheme, Quantisation, Rounding

INPUT_SCALE_NAME = "input_scale"
# Scales of the attention, not of weights; kv_scales.py reads those of keys and values for an FP8 cache.
KV_SCALES = re.compile(r".*(\.[qkv]_scale|\.[kv]_proj\.output_scale)$")


@dataclass(frozen=True)
class Stored:
    """Names of the tensors that belong to a quantised weight, and its scheme according to the checkpoint."""

    scales: str
    input_scale: str | None
    scheme: LinearScheme


def find_stored(
    tensors: Mapping[str, torch.Tensor], quantisation: Quantisation | None
) -> tuple[dict[str, Stored], dict[str, list[str]]]:
    """Return the tensors that belong to each quantised tensor, by its name, and problems: kind -> names."""
    found: dict[str, Stored] = {}
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "quantised against the rules": []}
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
        found[name] = Stored(scales, input_scale, scheme)
        grids: dict[str, tuple[int, ...]] = {scales: scheme.weight.grid(*tensor.shape)}
        for beside, grid in (grids | ({input_scale: (1,)} if input_scale else {})).items():
            if beside not in tensors:
                problems["missing"].append(beside)
            elif tensors[beside].numel() != math.prod(grid) or (min(grid) > 1 and tuple(tensors[beside].shape) != grid):
                shape = list(tensors[beside].shape)
                problems["of another shape"].append(f"{beside} ({shape} instead of {list(grid)})")
    return found, problems


def encoded(placement: Placement, stored: Mapping[str, Stored]) -> Placement:
    """Return the placement, with values to be decoded if its source is quantised."""
    if placement.source not in stored:
        return placement
    beside = stored[placement.source]
    return replace(placement, decode=str(beside.scheme.weight), beside=(beside.scales,))


def place_quantised(
    leaf: Parameter, of_weight: Sequence[Placement], stored: Mapping[str, Stored], tensors: dict[str, torch.Tensor]
) -> list[Placement]:
    """Return the placements for one `leaf` of a quantised weight: its 8-bit values, scales or input scale.

    of_weight: placements of the whole weight. Scales in `tensors` are replaced by scales for the leaf's tiles. Raises
    ValueError, with names, if the checkpoint contradicts the model's rules.
    """
    assert leaf.role in QUANTISED
    name = leaf.name.rpartition(".")[0]
    plain = [p.source for p in of_weight if p.source not in stored]
    if plain or not of_weight:
        found = ", ".join(f"{source} ({tensors[source].dtype})" for source in plain)
        raise ValueError(f"the rules quantise {name}, but the checkpoint holds {found or 'nothing for it'}")
    placed = []
    for placement in of_weight:
        beside = stored[placement.source]
        if leaf.role == CODES:
            placed.append(replace(placement, target=leaf.name, decode="", beside=()))
        elif leaf.role == INPUT_SCALE:
            assert beside.input_scale is not None
            placed.append(Placement(beside.input_scale, (), leaf.name, ((0, 1),)))
        else:
            tile = LinearScheme.parse(leaf.scheme).weight
            shape = tuple(tensors[placement.source].shape)
            tensors[beside.scales] = retile(tensors[beside.scales].float(), beside.scheme.weight, tile, *shape)
            spans = [_in_tiles(part, tile, placement) for part in (placement.taken, placement.placed)]
            placed.append(Placement(beside.scales, spans[0], leaf.name, spans[1]))
    if leaf.role == INPUT_SCALE:
        values = {p.source: float(tensors[p.source]) for p in placed}
        if len(set(values.values())) > 1:
            raise ValueError(f"{name} has one scale for its inputs, but the checkpoint holds {values}")
        return placed[:1]
    return placed


def _in_tiles(spans: tuple[Span, ...], tile: Rounding, placement: Placement) -> tuple[Span, ...]:
    *leading, rows, columns = spans
    found = list(leading)
    for (start, end), size in ((rows, tile.rows), (columns, tile.columns)):
        if placement.transposed or start % (size or 1):
            raise ValueError(f"the scales of {placement.source} are of {tile}, which its place in {spans} divides")
        found.append((start // size, -(-end // size)) if size else (0, 1))
    return tuple(found)


def decode_scaled(part: Placement, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Dequantise a part of values [N, K] into a tensor, on its device and in its dtype."""
    codes, scales = sources
    rounding = Rounding.parse(part.decode)
    scales_RC = scales.reshape(rounding.grid(*codes.shape)).to(target.device, torch.float32)
    (first_row, last_row), (first, last) = part.taken
    rows = torch.arange(first_row, last_row, device=target.device) // (rounding.rows or codes.shape[0])
    columns = torch.arange(first, last, device=target.device) // (rounding.columns or codes.shape[1])
    values = codes[first_row:last_row, first:last].to(target.device).float() * scales_RC[rows[:, None], columns]
    target.copy_((values.mT if part.transposed else values).reshape(target.shape))
