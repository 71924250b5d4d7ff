"""Convert the quantization_config of GPTQ and AWQ checkpoints to quantisation rules."""

from __future__ import annotations

import re
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import AWQ, GPTQ, GPTQ_V2, INTEGERS, NAMES
from compiled_engine.models.checkpoint.weight_format import INSTEAD
from compiled_engine.quantisation import HEAD, LINEAR, ROUTER, LinearScheme, Quantisation, Rounding, Rule

# Fields that GPTQModel lets `dynamic` change for modules.
_CHANGED = ("bits", "group_size", "sym", "desc_act")
# Fields about calibration, which do not affect how the checkpoint is read.
_OF_CALIBRATION = ("damp_percent", "static_groups", "true_sequential", "mse")


def read_gptq(config: JsonFields) -> Quantisation:
    """Return the quantisation rules of a GPTQ checkpoint. config: its quantization_config.

    Raises ValueError for unsupported bit widths, layouts and other settings.
    """
    config.require("is_marlin_format", not config.values.get("is_marlin_format"), f"false{INSTEAD}")
    name = "checkpoint_format" if "checkpoint_format" in config else "format"
    layout = config.one_of(name, (GPTQ, GPTQ_V2), GPTQ, instead=INSTEAD)
    config.require_values(INSTEAD, pack_dtype="int32")
    rules = [Rule((LINEAR,), str(_scheme_of_gptq(config)))]
    kept = [ROUTER] if config.boolean("lm_head", False) else [HEAD, ROUTER]
    dynamic = config.section("dynamic")
    for pattern in dynamic.values:
        target = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        if pattern.startswith("-:"):
            kept.append(target)
            continue
        section = dynamic.section(pattern)
        for field in section.values:
            section.require(field, field in (*_CHANGED, *_OF_CALIBRATION), f"absent{INSTEAD}")
        fields = config.replaced(**{field: section.values[field] for field in _CHANGED if field in section.values})
        rules.append(Rule((target,), str(_scheme_of_gptq(fields))))
    return Quantisation("gptq", tuple(rules), tuple(kept), NAMES[layout].scales, layout)


def read_awq(config: JsonFields) -> Quantisation:
    """Return the quantisation rules of an AWQ checkpoint. config: its quantization_config.

    Raises ValueError for unsupported bit widths, layouts and other settings.
    """
    config = config.replaced(version=str(config.values.get("version") or "gemm").lower())
    config.one_of("version", ("gemm",), instead=INSTEAD)
    config.require_values(INSTEAD, backend="autoawq", zero_point=True)
    _bits(config, "bits" if "bits" in config else "w_bit", (4,))
    columns = _group_size(config, "group_size" if "group_size" in config else "q_group_size")
    scheme = LinearScheme(Rounding("uint4", 1, columns), None)
    named = config.texts("modules_to_not_convert") if config.values.get("modules_to_not_convert") else []
    # A name covers all modules below it, and may lack leading parts.
    kept = [rf"re:(.*\.)?{re.escape(each)}(\..*)?$" for each in named] or [ROUTER]
    return Quantisation("awq", (Rule((LINEAR,), str(scheme)),), (HEAD, *kept), NAMES[AWQ].scales, AWQ)


def _scheme_of_gptq(fields: JsonFields) -> LinearScheme:
    element = INTEGERS[_bits(fields, "bits", (4, 8)), fields.boolean("sym", True)]
    columns = _group_size(fields, "group_size")
    reordered = fields.boolean("desc_act", False) and columns > 0
    return LinearScheme(Rounding(element, 1, columns), None, reordered)


def _bits(fields: JsonFields, name: str, allowed: tuple[int, ...]) -> int:
    bits: Any = fields.values.get(name)
    fields.require(name, type(bits) is int and bits in allowed, f"{' or '.join(map(str, allowed))}{INSTEAD}")
    return int(bits)


def _group_size(fields: JsonFields, name: str) -> int:
    """Return the number of columns that share a scale, from the field `name`; 0 if all columns do (field -1)."""
    if fields.values.get(name) == -1:
        return 0
    size = fields.integer(name)
    fields.require(name, size % 2 == 0, "an even number, or -1 for whole rows")
    return size
