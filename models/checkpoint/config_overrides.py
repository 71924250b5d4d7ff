"""Apply the option hf_overrides: values of the user that replace values of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.schema import read_mapping

# Section with the rotary embedding's scaling, as named by transformers 4 and 5.
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
# Fields that are kept when the section is replaced; transformers 4 stores them outside of the section.
ROPE_BASE = ("rope_theta", "partial_rotary_factor")


def with_overrides(fields: JsonFields, overrides: Mapping[str, Any]) -> JsonFields:
    """Return the fields of a config.json with the overrides applied.

    Nested configurations, such as text_config, are merged value by value. All other values are replaced as a whole,
    quantisation settings included. For the settings of the rotary embedding see `_with_one_rope`.
    """
    if not overrides:
        return fields
    return JsonFields(f"{fields.source} with hf_overrides", _overridden(fields.values, overrides))


def _overridden(stated: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = {**stated, **given}
    for name, value in given.items():
        part = stated.get(name)
        if (
            name.endswith("_config")
            and isinstance(value, Mapping)
            and isinstance(part, Mapping)
            and "quant" not in name
        ):
            result[name] = _overridden(part, value)
    return _with_one_rope(result, stated, given)


def _with_one_rope(result: dict[str, Any], stated: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `result` with at most one section of settings of the rotary embedding, if the user gives such a section.

    The section is named rope_scaling or rope_parameters (ROPE_SECTIONS). If the user gives one, the checkpoint's is
    dropped, since under the other name it could take precedence. The new section keeps the dropped one's rope_theta and
    partial_rotary_factor (ROPE_BASE), unless the user gives these two as well. If the user gives only these two, they
    replace those in the checkpoint's section.

    result: the merged values; may be changed. stated: the checkpoint's values. given: the user's values.
    """
    parts = {name: part for name in ROPE_SECTIONS if isinstance(part := stated.get(name), Mapping)}
    base = {key: part[key] for part in parts.values() for key in ROPE_BASE if key in part}
    base |= {key: given[key] for key in ROPE_BASE if key in base and key in given}
    if name := next((name for name in ROPE_SECTIONS if name in given), None):
        part = {"rope_type": "default"} if given[name] is None else given[name]
        for other in ROPE_SECTIONS:
            result.pop(other, None)
        result[name] = base | dict(part) if isinstance(part, Mapping) else part
    else:
        result |= {name: {**part, **{key: base[key] for key in base if key in part}} for name, part in parts.items()}
    return result


def read_overrides(value: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return the option hf_overrides as a mapping. value: a mapping or a JSON text.

    Raises TypeError or ValueError if `value` is neither, or has values that JSON cannot represent.
    """
    overrides = read_mapping("hf_overrides", value, "a dict of values of config.json")
    try:
        json.dumps(overrides)
    except (TypeError, ValueError) as error:
        raise TypeError(f"hf_overrides is {value!r}; allowed: values that JSON has ({error})") from error
    return overrides
