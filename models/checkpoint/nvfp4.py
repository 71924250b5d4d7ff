"""Check a checkpoint's NVFP4 weights, and bring their tensors into one layout.

A linear with N outputs and K inputs has codes in e2m1; a byte holds two codes, the first one in its low half. Each 16
columns of a row have a scale in e4m3, and the whole weight has a scale in fp32. Names and shapes of the tensors, by
Quantisation.method:

- compressed-tensors: weight_packed [N, K / 2], weight_scale [N, K / 16], and weight_global_scale [1], by which the
  other scales are divided.
- modelopt: weight [N, K / 2], weight_scale [N, K / 16], and weight_scale_2 [], by which the other scales are
  multiplied.

Scales of the inputs are not read, since only the weights are kept in four bits. Sources: NVFP4PackedCompressor of
compressed-tensors, and its converter of modelopt's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import PACKED, PackedWeight
from compiled_engine.models.checkpoint.weight_format import INSTEAD, WeightFormat
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

SCHEME = LinearScheme(Rounding("e2m1", 1, 16), None)


# Last part of the name of a whole weight's scale, in the engine's layout.
WHOLE = "weight_whole_scale"


class _Names(NamedTuple):
    """The last parts of the names of an NVFP4 weight's tensors.

    divides: whether the whole weight's scale divides the other scales, instead of multiplying them.
    """

    codes: str
    scales: str
    whole: str  # the scale of the whole weight
    inputs: str
    divides: bool


_NAMES = {
    "compressed-tensors": _Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True),
    "modelopt": _Names("weight", "weight_scale", "weight_scale_2", "input_scale", False),
}


def read_nvfp4(
    tensors: Mapping[str, torch.Tensor], quantisation: Quantisation | None, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]:
    """Return the checkpoint's tensors with NVFP4 weights in the engine's layout, and the codes by the weight's name.

    In the returned tensors, a placeholder `weight` [N, K] on the meta device replaces the codes; it has the weight's
    shape and the codes' dtype. `weight_scale` stays e4m3 [N, K / 16]. WHOLE is the scale of the whole weight, by which
    the others are multiplied, fp64 [1]; `combined` makes one scale of both. If `quantisation` has no NVFP4 weights, the
    tensors are returned unchanged. path: of the checkpoint, for errors. Raises ValueError, with names and values, if
    tensors contradict each other or the rules.
    """
    found, packed = dict(tensors), dict[str, PackedWeight]()
    if quantisation is None or quantisation.method not in _NAMES:
        return found, packed
    names, problems = _NAMES[quantisation.method], list[str]()
    for name, codes in tensors.items():
        module, _, kind = name.rpartition(".")
        is_packed = kind == names.codes and (codes.dtype == torch.uint8 or f"{module}.{names.whole}" in tensors)
        scheme = quantisation.scheme_of(module) if is_packed else None
        if is_packed and scheme is None:
            problems.append(f"{name} is packed, but {quantisation.why_not(module)}")
        if scheme != SCHEME:
            continue
        if codes.dtype != torch.uint8:
            problems.append(f"{name} must be torch.uint8, got {codes.dtype}")
            continue
        if kind != "weight" and f"{module}.weight" in tensors:
            problems.append(f"{name} is a second copy of {module}.weight")
            continue
        parts = {part: found.pop(f"{module}.{part}", None) for part in names[:4]}
        try:
            scales, whole = _scales(module, parts, names, scheme.weight)
        except ValueError as error:
            problems.append(str(error))
            continue
        shape = codes.shape[0], 2 * codes.shape[1]
        found[f"{module}.weight"] = torch.empty(shape, dtype=torch.uint8, device="meta")
        found |= {f"{module}.weight_scale": scales, f"{module}.{WHOLE}": whole}
        packed[f"{module}.weight"] = PackedWeight(codes, PACKED, scheme.weight, shape[1], None)
    if problems:
        raise ValueError(f"the tensors in {path} do not fit quantization_config: {name_some(problems, most=3)}")
    return found, packed


def combined(scales: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return scales in e4m3 times the scale of the whole weight, fp64 [1], in fp32: rounded once in effect."""
    return (scales.double() * whole.to(scales.device)).float()


def _scales(
    module: str, parts: Mapping[str, torch.Tensor | None], names: _Names, rounding: Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a module's scales [N, K / 16] and the scale of the whole weight, see `read_nvfp4`.

    parts: the module's tensors by the last part of their names; None for those that are missing. Raises ValueError for
    missing or wrong tensors.
    """
    codes, scales, whole = (parts[name] for name in names[:3])
    assert codes is not None
    if codes.dim() != 2:
        raise ValueError(f"{module}.{names.codes} must have two dimensions, got {list(codes.shape)}")
    grid = rounding.grid(codes.shape[0], 2 * codes.shape[1])
    for name, tensor, dtype in ((names.scales, scales, torch.float8_e4m3fn), (names.whole, whole, torch.float32)):
        if tensor is None:
            raise ValueError(f"{module}.{name} is missing")
        if tensor.dtype != dtype:
            raise ValueError(f"{module}.{name} must be {dtype}, got {tensor.dtype}")
    assert scales is not None
    assert whole is not None
    if tuple(scales.shape) != grid:
        raise ValueError(f"{module}.{names.scales} must be {list(grid)}, got {list(scales.shape)}")
    if whole.numel() != 1 or not 0 < float(whole) < float("inf"):
        raise ValueError(f"{module}.{names.whole} must be one number above 0, got {whole.tolist()}")
    factor = 1 / whole.reshape(1).double() if names.divides else whole.reshape(1).double()
    if factor.float().isinf():
        raise ValueError(f"{module}.{names.whole} must have a reciprocal that float32 holds, got {whole.tolist()}")
    return scales, factor


def _scheme_of(group: JsonFields) -> LinearScheme:
    """Return the scheme of a group of `config_groups` with NVFP4 weights.

    Inputs are not quantised, whatever the group states for them. Raises ValueError for weights in another format.
    """
    weights = group.section("weights")
    weights.require_values(INSTEAD, num_bits=4, type="float", strategy="tensor_group", symmetric=True, dynamic=False)
    weights.require_values(INSTEAD, group_size=SCHEME.weight.columns)
    return SCHEME


NVFP4 = WeightFormat(
    "nvfp4-pack-quantized",
    _scheme_of,
    holds=lambda scheme: scheme == SCHEME,
    presets={"NVFP4": SCHEME, "NVFP4A16": SCHEME},
    algorithms={"NVFP4": SCHEME, "W4A16_NVFP4": SCHEME},
    read=read_nvfp4,
)
