"""Convert quantization_config of config.json to quantisation rules: compressed-tensors, DeepSeek's fp8 and modelopt.

For GPTQ and AWQ see gptq_config.py. `as_compressed_tensors` converts rules to the format of compressed-tensors."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.gptq_config import read_awq, read_gptq
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import PACKED
from compiled_engine.models.checkpoint.weight_format import INSTEAD
from compiled_engine.models.checkpoint.weight_formats import (
    ALGORITHMS,
    FORMATS,
    PRESETS,
    STATIC,
    TENSOR,
    TOKEN,
    block_of,
    format_of,
)
from compiled_engine.quantisation import HEAD, LINEAR, ROUTER, LinearScheme, Quantisation, Rounding, Rule
from compiled_engine.quantisation_names import MXFP4

SECTION = "quantization_config"
# Fields of that section that list module names.
MODULE_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
# Files beside config.json in which older writers stored these settings -> quant_method if the file does not state it.
SETTINGS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# Fields of these files that affect how the checkpoint is read; each tuple has the names of one field.
_DECIDING: tuple[tuple[str, ...], ...] = (("bits", "w_bit"), ("group_size", "q_group_size"), ("sym",), ("desc_act",))
_DECIDING += (("zero_point",), ("version",), ("checkpoint_format",), ("quant_algo",))
# The rule for GPT-OSS: its experts are in MXFP4. Its quantization_config has no further settings.
_EXPERTS = Rule((r"re:.*\.experts\.\d+\.",), "mxfp4 1x32")
# Formats of compressed-tensors by name; _MIXED means that each group states its own format.
_READERS = {each.name: each.scheme_of for each in FORMATS}
_MIXED = "mixed-precision"


def read_quantisation(fields: JsonFields, folder: Path) -> Quantisation | None:
    """Return a checkpoint's quantisation rules; None if the checkpoint is not quantised.

    fields: the fields of config.json. folder: the checkpoint's. Raises ValueError for formats that are not supported,
    with the field, its value and the allowed values.
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
        "gptq": read_gptq,
        "awq": read_awq,
    }
    return readers[config.one_of("quant_method", readers, instead=INSTEAD)](config)


def find_settings(fields: JsonFields, folder: Path) -> JsonFields | None:
    """Return a checkpoint's quantisation settings; None if there are none.

    These are quantization_config of config.json or, if it is missing, the settings in a file of an older writer, such
    as hf_quant_config.json (SETTINGS). fields: the fields of config.json. folder: the checkpoint's. Raises ValueError,
    with the file, the field and the values, if both exist and contradict each other.
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
        config.require(name, not config.values.get(name), f"empty{INSTEAD}")
    stated = _format(config, (*_READERS, _MIXED))
    rules, formats = [], set()
    for name, value in config.section("config_groups").values.items():
        if name in PRESETS and isinstance(value, list):
            rules.append(Rule(tuple(map(str, value)), str(PRESETS[name])))
            formats.add(format_of(PRESETS[name]))
            continue
        group = config.section("config_groups").section(name)
        form = _format(group, tuple(_READERS)) if "format" in group or stated == _MIXED else stated
        formats.add(form)
        group.require("output_activations", not group.values.get("output_activations"), "null")
        rules.append(Rule(tuple(group.texts("targets")), str(_READERS[form](group))))
    some = "an object of at least one group, or empty together with kv_cache_scheme"
    config.require("config_groups", bool(rules or config.values.get("kv_cache_scheme")), some)
    layout = PACKED if PACKED in formats else ""
    return Quantisation("compressed-tensors", tuple(rules), tuple(_list(config, "ignore")), layout=layout)


def _format(fields: JsonFields, allowed: tuple[str, ...]) -> str:
    return fields.one_of("format", allowed, FORMATS[0].name, instead=INSTEAD)


def _fp8(config: JsonFields) -> Quantisation:
    config.require_values(INSTEAD, fmt="e4m3", scale_fmt="float")
    static = config.one_of("activation_scheme", ("static", "dynamic"), "dynamic")
    scale_name = "weight_scale"
    if config.values.get("weight_block_size") is None:
        scheme = LinearScheme(TENSOR, STATIC if static == "static" else TOKEN)
    else:
        config.require("activation_scheme", static == "dynamic", "dynamic, as weight_block_size is given")
        rows, columns = block_of(config, "weight_block_size")
        scheme = LinearScheme(Rounding("e4m3", rows, columns), Rounding("e4m3", 1, columns))
        scale_name = "weight_scale_inv"
    named = [*_list(config, "modules_to_not_convert"), *_list(config, "ignored_layers")]
    # A name covers all modules below it, and may lack leading parts.
    ignore = [rf"re:(.*\.)?{re.escape(name)}(\..*)?$" for name in named] or [ROUTER]
    return Quantisation("fp8", (Rule((LINEAR,), str(scheme)),), (HEAD, *ignore), scale_name)


def _modelopt(config: JsonFields) -> Quantisation:
    scheme = ALGORITHMS[config.one_of("quant_algo", ALGORITHMS, instead=INSTEAD)]
    if scheme.weight.columns:
        config.require_values(INSTEAD, group_size=scheme.weight.columns)
    named = [*_list(config, "exclude_modules"), *_list(config, "ignore")]
    ignore = tuple(f"re:{fnmatch.translate(name)}" for name in named) or (HEAD, ROUTER)
    return Quantisation("modelopt", (Rule((LINEAR,), str(scheme)),), ignore)


def _list(config: JsonFields, name: str) -> list[str]:
    """Return the list of strings in the field `name`; [] if the field is empty, missing or null."""
    return config.texts(name) if config.values.get(name) else []


# The inverse: quantization_config as llm-compressor writes it. Fields that rules do not set have its defaults.


def as_compressed_tensors(quantisation: Quantisation) -> dict[str, Any]:
    """Return the section quantization_config for these rules, in the format of compressed-tensors.

    `read_quantisation` reads the same rules from the section.
    """
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


def _group(rule: Rule) -> dict[str, Any]:
    scheme = LinearScheme.parse(rule.scheme)
    weights = _arguments(scheme.weight, of_inputs=False)
    return {
        "format": format_of(scheme),
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
