"""A piece's JSON as text, one node a line."""

from __future__ import annotations

import json
from typing import Any


def piece_text(piece_json: str) -> list[str]:
    """`v12 = aten::mul.Tensor(v3, v11)` for each node, inputs with their types; before them the ranges of the sizes."""
    piece = json.loads(piece_json)
    lines = [f"{name}: {low} to {high}" for name, (low, high) in piece["symbols"].items()]
    for number, (kind, *rest) in enumerate(piece["nodes"]):
        if kind == "input":
            lines.append(f"v{number}: {_type(rest[0])} = input")
        elif kind == "output":
            lines.append(f"return {_value(rest[0])}")
        else:
            arguments = [_value(item) for item in rest[0]]
            arguments += [f"{name}={_value(item)}" for name, item in rest[1]["dict"].items()]
            lines.append(f"v{number} = {kind}({', '.join(arguments)})")
    return lines


def _type(description: dict[str, Any]) -> str:
    if "size" in description:
        return f"size {description['size']}"
    shape = ", ".join(str(size) for size in description["shape"])
    return f"{description['dtype'].removeprefix('torch.')}[{shape}]"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return f"v{inner}" if kind == "node" else str(inner)
    return repr(value)
