"""Lists the formats of quantised weights in checkpoints of compressed-tensors and modelopt, and reads their tensors.

To add a format, add a file that declares it and an entry of FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.mxfp4 import check_blocks
from compiled_engine.models.checkpoint.nvfp4 import NVFP4
from compiled_engine.models.checkpoint.packed_weights import INTEGERS, PACKED, PackedWeight, read_packed
from compiled_engine.models.checkpoint.weight_format import INSTEAD, WeightFormat
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding
from compiled_engine.quantisation_names import MXFP4

_ELEMENTS = {"float": "e4m3", "int": "int8"}
# Values of actorder, the order of columns in calibration -> whether the columns of a group are not neighbours.
_ORDERS = {"none": False, "false": False, "weight": False, "static": False}
_ORDERS |= {"true": True, "group": True, "dynamic": True}
TOKEN = CHANNELS = Rounding("e4m3", 1, 0)
TENSOR, STATIC = Rounding("e4m3", 0, 0), Rounding("e4m3", 0, 0, static=True)
_INT8 = LinearScheme(Rounding("int8", 1, 0), Rounding("int8", 1, 0))


def _integers(group: JsonFields) -> LinearScheme:
    """Return the scheme of a group of `config_groups` with packed integer weights, whose inputs are not quantised.

    Raises ValueError for settings that are not supported.
    """
    group.require("input_activations", not group.values.get("input_activations"), f"null{INSTEAD}")
    weights = group.section("weights")
    weights.require_values(INSTEAD, type="int", dynamic=False)
    bits = weights.values.get("num_bits", 8)
    weights.require("num_bits", bits in (4, 8), f"4 or 8{INSTEAD}")
    strategy = weights.one_of("strategy", ("group", "channel"), "group", instead=INSTEAD)
    columns = weights.integer("group_size") if strategy == "group" else 0
    weights.require("group_size", bits == 8 or columns % 2 == 0, "an even number")
    order = str(weights.values.get("actorder")).lower()
    weights.require("actorder", order in _ORDERS, "null, weight, static, group or dynamic")
    reordered = bool(columns) and _ORDERS[order]
    element = INTEGERS[bits, weights.boolean("symmetric", True)]
    return LinearScheme(Rounding(element, 1, columns), None, reordered)


def _in_8_bits(group: JsonFields, types: tuple[str, ...]) -> LinearScheme:
    """Return the scheme of a group of `config_groups` with 8-bit weights.

    types: the allowed types of weights, the default first. Raises ValueError for settings that are not supported.
    """
    weights = group.section("weights")
    stated = weights.one_of("type", types, types[0], instead=INSTEAD)
    weights.require_values(INSTEAD, num_bits=8, symmetric=True)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), "tensor", instead=INSTEAD)
    tiles = {"tensor": (0, 0), "channel": (1, 0)}
    rows, columns = tiles[strategy] if strategy in tiles else block_of(weights, "block_structure")
    return LinearScheme(Rounding(_ELEMENTS[stated], rows, columns), _inputs(group, stated))


def _inputs(group: JsonFields, stated: str) -> Rounding | None:
    """Return how the inputs of a group are quantised; None if they are not.

    stated: the type of the group's weights; the inputs must have the same type. Raises ValueError for settings that are
    not supported.
    """
    if group.values.get("input_activations") is None:
        return None
    fields, element = group.section("input_activations"), _ELEMENTS[stated]
    fields.require_values(INSTEAD, num_bits=8, type=stated, symmetric=True)
    strategy, dynamic = fields.text("strategy", "tensor"), fields.values.get("dynamic", False)
    if (strategy, dynamic) == ("token", True):
        return Rounding(element, 1, 0)
    if (strategy, dynamic) == ("tensor", False):
        return Rounding(element, 0, 0, static=True)
    if (strategy, dynamic) == ("group", True):
        return Rounding(element, 1, fields.integer("group_size"))
    raise fields.error("strategy", f"token or group if dynamic is true, tensor if it is false (it is {dynamic!r})")


def block_of(fields: JsonFields, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tile, from a field such as [128, 128] or "128x128".

    Raises ValueError for any other value.
    """
    value: Any = fields.values.get(name)
    sizes = [int(size) for size in value.split("x") if size.isdecimal()] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.error(name, "two whole numbers of at least 1, such as [128, 128]")
    return sizes[0], sizes[1]


FORMATS = (
    WeightFormat(
        "float-quantized",
        partial(_in_8_bits, types=("float",)),
        holds=lambda scheme: scheme.weight.element == "e4m3",
        presets={
            "FP8": LinearScheme(TENSOR, STATIC),
            "FP8_DYNAMIC": LinearScheme(CHANNELS, TOKEN),
            "FP8_BLOCK": LinearScheme(Rounding("e4m3", 128, 128), Rounding("e4m3", 1, 128)),
        },
        algorithms={
            "FP8": LinearScheme(TENSOR, STATIC),
            "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(CHANNELS, TOKEN),
        },
    ),
    WeightFormat("naive-quantized", partial(_in_8_bits, types=("float", "int")), holds=lambda scheme: False),
    WeightFormat(
        "int-quantized",
        partial(_in_8_bits, types=("int",)),
        holds=lambda scheme: scheme.weight.is_integer and scheme.inputs is not None,
        presets={"W8A8": _INT8, "INT8": _INT8},
    ),
    WeightFormat(
        PACKED,
        _integers,
        holds=lambda scheme: scheme.weight.is_integer and scheme.inputs is None,
        presets={
            "W4A16": LinearScheme(Rounding("int4", 1, 128), None),
            "W4A16_ASYM": LinearScheme(Rounding("uint4", 1, 128), None),
            "W8A16": LinearScheme(Rounding("int8", 1, 128), None),
        },
        read=read_packed,
    ),
    NVFP4,
)
PRESETS = {name: scheme for each in FORMATS for name, scheme in each.presets.items()}
ALGORITHMS = {name: scheme for each in FORMATS for name, scheme in each.algorithms.items()}


def format_of(scheme: LinearScheme) -> str:
    """Return the name of the format in which weights of this scheme are written."""
    return next(each.name for each in FORMATS if each.holds(scheme))


def read_weights(
    tensors: Mapping[str, torch.Tensor], quantisation: Quantisation | None, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]:
    """Return the checkpoint's tensors with quantised weights in the engine's layout, and packed codes by weight name.

    In the returned tensors, a placeholder `weight` [N, K] on the meta device replaces packed codes. quantisation: the
    checkpoint's rules. path: the checkpoint's folder, for errors. Raises ValueError, with names and values, if tensors
    contradict each other or the rules.
    """
    found, packed = dict(tensors), dict[str, PackedWeight]()
    if quantisation is not None and quantisation.method == MXFP4:
        check_blocks(tensors, path)
    for each in FORMATS:
        if each.read is not None:
            found, of_format = each.read(found, quantisation, path)
            packed |= of_format
    return found, packed
