"""Convert quantization_config of config.json to rules: compressed-tensors, DeepSeek's fp8 and modelopt.

GPTQ and AWQ are in gptq_config.py. Rules can also be written in the format of compressed-tensors."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.gptq_config import read_awq, read_gptq
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.nvfp4 import NVFP4
from compiled_engine.models.checkpoint.packed_weights import INTEGERS, PACKED
from compiled_engine.quantisation import HEAD, LINEAR, MXFP4, ROUTER, LinearScheme, Quantisation, Rounding, Rule

SECTION = "quantization_config"
# Fields of that section that list module names.
MODULE_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
# Files beside config.json with the same settings, which older writers used -> their quant_method, unless they state it.
SETTINGS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# Fields of these files that decide what is read, with their other names.
_DECIDING: tuple[tuple[str, ...], ...] = (("bits", "w_bit"), ("group_size", "q_group_size"), ("sym",), ("desc_act",))
_DECIDING += (("zero_point",), ("version",), ("checkpoint_format",), ("quant_algo",))
_INSTEAD = (
    ": a checkpoint in FP8, or with integers of compressed-tensors, GPTQ or AWQ, or one in bfloat16 with "
    "quantization='fp8'"
)
_TOKEN = _CHANNELS = Rounding("e4m3", 1, 0)
_STATIC = Rounding("e4m3", 0, 0, static=True)
_TENSOR = Rounding("e4m3", 0, 0)
_NVFP4 = LinearScheme(Rounding("e2m1", 1, 16), None)
_INT8 = LinearScheme(Rounding("int8", 1, 0), Rounding("int8", 1, 0))
# GPT-OSS's: its experts, without fields of its own.
_EXPERTS = Rule((r"re:.*\.experts\.\d+\.",), "mxfp4 1x32")
_BLOCKS = LinearScheme(Rounding("e4m3", 128, 128), Rounding("e4m3", 1, 128))
# Types of the 8-bit numbers in formats of compressed-tensors, with the default format and type first.
_TYPES = {"float-quantized": ("float",), "naive-quantized": ("float", "int"), "int-quantized": ("int",)}
_ELEMENTS = {"float": "e4m3", "int": "int8"}
# All formats, and that of a checkpoint whose groups state their own.
_FORMATS, _MIXED = (*_TYPES, PACKED, NVFP4), "mixed-precision"
# Orders of columns for calibration -> whether the columns of a group are then not neighbours.
_ORDERS = {"none": False, "false": False, "weight": False, "static": False}
_ORDERS |= {"true": True, "group": True, "dynamic": True}
# Preset schemes of compressed-tensors, named in config_groups.
_PRESETS = {
    "FP8": LinearScheme(_TENSOR, _STATIC),
    "FP8_DYNAMIC": LinearScheme(_CHANNELS, _TOKEN),
    "FP8_BLOCK": _BLOCKS,
    "W4A16": LinearScheme(Rounding("int4", 1, 128), None),
    "W4A16_ASYM": LinearScheme(Rounding("uint4", 1, 128), None),
    "NVFP4": _NVFP4,
    "NVFP4A16": _NVFP4,
    "W8A8": _INT8,
    "INT8": _INT8,
    "W8A16": LinearScheme(Rounding("int8", 1, 128), None),
}
_MODELOPT = {
    "FP8": LinearScheme(_TENSOR, _STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(_CHANNELS, _TOKEN),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def read_quantisation(fields: JsonFields, folder: Path) -> Quantisation | None:
    """Return a checkpoint's rules; None if it is not quantised.

    fields: config.json. Raises ValueError, naming the field, the value and what is allowed, for other formats.
    """
    config = find_settings(fields, folder)
    if config is not None and any(config.values.get(name) for name in ("load_in_4bit", "load_in_8bit")):
        config = config.replaced(quant_method="bitsandbytes")  # which older writers left out
    if config is None:
        return None
    readers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "modelopt": _modelopt,
        MXFP4: lambda config: Quantisation(MXFP4, (_EXPERTS,), ()),
        "gptq": lambda config: read_gptq(config, _INSTEAD),
        "awq": lambda config: read_awq(config, _INSTEAD),
    }
    return readers[config.one_of("quant_method", readers, instead=_INSTEAD)](config)


def find_settings(fields: JsonFields, folder: Path) -> JsonFields | None:
    """Return quantization_config of config.json, or else the settings of a file of SETTINGS; None without either.

    fields: config.json. Raises ValueError, naming file, field and values, if both exist and contradict each other.
    """
    config = fields.section(SECTION)
    for name, method in SETTINGS.items():
        if not (folder / name).is_file():
            continue
        beside = JsonFields.from_file(folder / name)
        if "quantization" in beside:
            beside = beside.section("quantization")
        if SECTION not in fields:
            return beside.replaced(quant_method=beside.values.get("quant_method") or method)
        for names in _DECIDING:
            found, stated = ([each.values[name] for name in names if name in each] for each in (beside, config))
            if found and stated and str(found[0]).lower() != str(stated[0]).lower():
                raise ValueError(
                    f"{beside.source}: {names[0]} is {found[0]!r}, but {SECTION} of config.json says {stated[0]!r}"
                )
    return config if SECTION in fields else None


def _compressed_tensors(config: JsonFields) -> Quantisation:
    for name in ("sparsity_config", "transform_config"):
        config.require(name, not config.values.get(name), f"empty{_INSTEAD}")
    stated = _format(config, (*_FORMATS, _MIXED))
    rules, formats = [], set()
    for name, value in config.section("config_groups").values.items():
        if name in _PRESETS and isinstance(value, list):
            rules.append(Rule(tuple(map(str, value)), str(_PRESETS[name])))
            formats.add(_format_of(_PRESETS[name]))
            continue
        group = config.section("config_groups").section(name)
        form = _format(group, _FORMATS) if "format" in group or stated == _MIXED else stated
        formats.add(form)
        group.require("output_activations", not group.values.get("output_activations"), "null")
        readers = {PACKED: _integers, NVFP4: _nvfp4}
        scheme = readers[form](group) if form in readers else _in_8_bits(group, _TYPES[form])
        rules.append(Rule(tuple(group.texts("targets")), str(scheme)))
    some = "an object of at least one group, or empty together with kv_cache_scheme"
    config.require("config_groups", bool(rules or config.values.get("kv_cache_scheme")), some)
    layout = PACKED if PACKED in formats else ""
    return Quantisation("compressed-tensors", tuple(rules), tuple(_list(config, "ignore")), layout=layout)


def _format(fields: JsonFields, allowed: tuple[str, ...]) -> str:
    return fields.one_of("format", allowed, _FORMATS[0], instead=_INSTEAD)


def _integers(group: JsonFields) -> LinearScheme:
    """Return the scheme of a group of packed weights; their inputs are not rounded."""
    group.require("input_activations", not group.values.get("input_activations"), f"null{_INSTEAD}")
    weights = group.section("weights")
    weights.require_values(_INSTEAD, type="int", dynamic=False)
    bits = weights.values.get("num_bits", 8)
    weights.require("num_bits", bits in (4, 8), f"4 or 8{_INSTEAD}")
    strategy = weights.one_of("strategy", ("group", "channel"), "group", instead=_INSTEAD)
    columns = weights.integer("group_size") if strategy == "group" else 0
    weights.require("group_size", bits == 8 or columns % 2 == 0, "an even number")
    order = str(weights.values.get("actorder")).lower()
    weights.require("actorder", order in _ORDERS, "null, weight, static, group or dynamic")
    reordered = bool(columns) and _ORDERS[order]
    element = INTEGERS[bits, weights.boolean("symmetric", True)]
    return LinearScheme(Rounding(element, 1, columns), None, reordered)


def _nvfp4(group: JsonFields) -> LinearScheme:
    """Return the scheme of a group of weights in NVFP4; their inputs are not rounded, whatever the group says."""
    weights = group.section("weights")
    weights.require_values(_INSTEAD, num_bits=4, type="float", strategy="tensor_group", symmetric=True, dynamic=False)
    weights.require_values(_INSTEAD, group_size=_NVFP4.weight.columns)
    return _NVFP4


def _in_8_bits(group: JsonFields, types: tuple[str, ...]) -> LinearScheme:
    """Return the scheme of a group of weights with a byte for each number, of one of these types."""
    weights = group.section("weights")
    stated = weights.one_of("type", types, types[0], instead=_INSTEAD)
    weights.require_values(_INSTEAD, num_bits=8, symmetric=True)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), "tensor", instead=_INSTEAD)
    tiles = {"tensor": (0, 0), "channel": (1, 0)}
    rows, columns = tiles[strategy] if strategy in tiles else _block(weights, "block_structure")
    return LinearScheme(Rounding(_ELEMENTS[stated], rows, columns), _inputs(group, stated))


def _inputs(group: JsonFields, stated: str) -> Rounding | None:
    """Return the rounding of inputs; None if they are not rounded. stated: the type of weights, which inputs share."""
    if group.values.get("input_activations") is None:
        return None
    fields, element = group.section("input_activations"), _ELEMENTS[stated]
    fields.require_values(_INSTEAD, num_bits=8, type=stated, symmetric=True)
    strategy, dynamic = fields.text("strategy", "tensor"), fields.values.get("dynamic", False)
    if (strategy, dynamic) == ("token", True):
        return Rounding(element, 1, 0)
    if (strategy, dynamic) == ("tensor", False):
        return Rounding(element, 0, 0, static=True)
    if (strategy, dynamic) == ("group", True):
        return Rounding(element, 1, fields.integer("group_size"))
    raise fields.error("strategy", f"token or group if dynamic is true, tensor if it is false (it is {dynamic!r})")


def _block(fields: JsonFields, name: str) -> tuple[int, int]:
    """Return the two sizes of a block, written [128, 128] or "128x128"."""
    value: Any = fields.values.get(name)
    sizes = [int(size) for size in value.split("x") if size.isdecimal()] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.error(name, "two whole numbers of at least 1, such as [128, 128]")
    return sizes[0], sizes[1]


def _fp8(config: JsonFields) -> Quantisation:
    config.require_values(_INSTEAD, fmt="e4m3", scale_fmt="float")
    static = config.one_of("activation_scheme", ("static", "dynamic"), "dynamic")
    scale_name = "weight_scale"
    if config.values.get("weight_block_size") is None:
        scheme = LinearScheme(_TENSOR, _STATIC if static == "static" else _TOKEN)
    else:
        config.require("activation_scheme", static == "dynamic", "dynamic, as weight_block_size is given")
        rows, columns = _block(config, "weight_block_size")
        scheme = LinearScheme(Rounding("e4m3", rows, columns), Rounding("e4m3", 1, columns))
        scale_name = "weight_scale_inv"
    named = [*_list(config, "modules_to_not_convert"), *_list(config, "ignored_layers")]
    # A name covers all modules below it, and may lack leading parts.
    ignore = [rf"re:(.*\.)?{re.escape(name)}(\..*)?$" for name in named] or [ROUTER]
    return Quantisation("fp8", (Rule((LINEAR,), str(scheme)),), (HEAD, *ignore), scale_name)


def _modelopt(config: JsonFields) -> Quantisation:
    algorithm = config.one_of("quant_algo", _MODELOPT, instead=_INSTEAD)
    if _MODELOPT[algorithm] == _NVFP4:
        config.require_values(_INSTEAD, group_size=_NVFP4.weight.columns)
    named = [*_list(config, "exclude_modules"), *_list(config, "ignore")]
    ignore = tuple(f"re:{fnmatch.translate(name)}" for name in named) or (HEAD, ROUTER)
    return Quantisation("modelopt", (Rule((LINEAR,), str(_MODELOPT[algorithm])),), ignore)


def _list(config: JsonFields, name: str) -> list[str]:
    """Return a list of strings; the field may be empty, missing or null."""
    return config.texts(name) if config.values.get(name) else []


# The inverse: the section as llm-compressor writes it, with the library's defaults for fields without rules.


def as_compressed_tensors(quantisation: Quantisation) -> dict[str, Any]:
    """Return the section quantization_config for these rules. `read_quantisation` reads the same rules from it."""
    groups = {f"group_{i}": _group(rule) for i, rule in enumerate(quantisation.rules)}
    formats = {group["format"] for group in groups.values()}
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "global_compression_ratio": None,
        "ignore": list(quantisation.ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def _format_of(scheme: LinearScheme) -> str:
    """Return the format of compressed-tensors that holds such weights."""
    if scheme == _NVFP4:
        return NVFP4
    if not scheme.weight.is_integer:
        return _FORMATS[0]
    return PACKED if scheme.inputs is None else "int-quantized"


def _group(rule: Rule) -> dict[str, Any]:
    scheme = LinearScheme.parse(rule.scheme)
    weights = _arguments(scheme.weight, of_inputs=False)
    return {
        "format": _format_of(scheme),
        "input_activations": None if scheme.inputs is None else _arguments(scheme.inputs, of_inputs=True),
        "output_activations": None,
        "targets": list(rule.targets),
        "weights": weights | ({"actorder": "group"} if scheme.reordered else {}),
    }


def _arguments(rounding: Rounding, *, of_inputs: bool) -> dict[str, Any]:
    rows, columns = rounding.rows, rounding.columns
    if rows and columns:
        strategy = "group" if of_inputs or rounding.is_integer else "block"
    else:
        strategy = "tensor" if not rows else "token" if of_inputs else "channel"
    return {
        "actorder": None,
        "block_structure": [rows, columns] if strategy == "block" else None,
        "dynamic": of_inputs and not rounding.static,
        "group_size": columns if strategy == "group" else None,
        "num_bits": rounding.format.bits,
        "observer": None if of_inputs and not rounding.static else "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": not rounding.format.has_zeros,
        "type": "int" if rounding.is_integer else "float",
    }
