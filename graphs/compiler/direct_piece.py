"""Generates Python for direct pieces: pieces in which Inductor could fuse nothing, and would only call op after op.

The fields `direct` and `lone` of an op's declaration (passes/framework/op_library.py) decide. All ops of a direct piece
are `direct` (kernels of the engine, matrix products of a library, views), except at most one, which is `lone` or
multiplies an embedding by a constant. The generated Python calls the ops one by one, and needs neither a compiler nor
its import.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from compiled_engine.passes.framework.op_library import declaration_of, implementation

_GETITEM = "operator.getitem"


def is_direct(text: str) -> bool:
    """Return whether a piece is direct: Inductor could fuse nothing in it, so Python calls its ops one by one.

    text: the piece's JSON.
    """
    nodes = json.loads(text)["nodes"]
    others = [node for node in nodes if not _needs_no_compiler(node[0])]
    return len(others) <= 1 and all(_is_scaled_embedding(node, nodes) or _is_lone(node[0]) for node in others)


def _is_scaled_embedding(node: list[Any], nodes: list[list[Any]]) -> bool:
    """Return whether the node multiplies an embedding by a constant, as at the beginning of Gemma.

    node, nodes: a node and all nodes of a piece's JSON.
    """
    if node[0] != "aten::mul.Tensor" or not isinstance(node[1][1], int | float):
        return False
    return nodes[node[1][0]["node"]][0] == "aten::embedding.default"


def _is_lone(call: str) -> bool:
    return "::" in call and declaration_of(op_named(_function(call))).lone


def _needs_no_compiler(call: str) -> bool:
    if "::" not in call:
        return call in ("input", "output", _GETITEM)
    return declaration_of(op_named(_function(call))).direct


def direct_source(text: str) -> str:
    """Return the Python source of a function piece(inputs...), which runs a piece and returns a tuple of its results.

    text: the piece's JSON. The function drops each value after its last use.
    """
    nodes = json.loads(text)["nodes"]
    last_use = {value: number for number, node in enumerate(nodes) for value in _read(node)}
    inputs = [f"v{number}" for number, node in enumerate(nodes) if node[0] == "input"]
    lines = [f"def piece({', '.join(inputs)}):"]
    for number, (call, *rest) in enumerate(nodes):
        if call == "input":
            continue
        if call == "output":
            lines.append(f"    return ({', '.join(_source(value) for value in rest[0])},)")
            continue
        arguments = [_source(value) for value in rest[0]]
        keywords = [f"{name}={_source(value)}" for name, value in rest[1]["dict"].items()]
        if call == _GETITEM:
            lines.append(f"    v{number} = {arguments[0]}[{arguments[1]}]")
        else:
            lines.append(f"    v{number} = {_function(call)}({', '.join([*arguments, *keywords])})")
        dead = [f"v{value}" for value in dict.fromkeys(_read(nodes[number])) if last_use[value] == number]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    return "\n".join(lines) + "\n"


def load_direct(source: str, device_type: str) -> Callable[..., Any]:
    """Return the function `piece` that the source from `direct_source` defines, for inputs on a device type.

    Where an op's declaration allows it, the function calls the op's implementation past torch's dispatcher, which would
    take more time on the host than the implementation.
    """
    namespace: dict[str, Any] = {"torch": torch}
    for name in {word for word in source.replace("(", " ").split() if word.startswith("op_")}:
        namespace[name] = implementation(op_named(name), device_type)
    exec(compile(source, "<direct piece>", "exec"), namespace)
    return namespace.pop("piece")


def _function(call: str) -> str:
    """Return the name that an op has in generated Python: op__aten__mm__default for aten::mm.default."""
    namespace, _, name = call.partition("::")
    op, _, overload = name.rpartition(".")
    return f"op__{namespace}__{op}__{overload}"


def op_named(function: str) -> torch._ops.OpOverload:
    """Return the op that a name in generated Python stands for: aten.mm.default for op__aten__mm__default."""
    _, library, op, overload = function.split("__")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, library), op), overload)
    return found


def _read(node: list[Any]) -> list[int]:
    """Return the numbers of the nodes whose values `node`, a node in a piece's JSON, reads."""
    found: list[int] = []
    pending = list(node[1:]) if node[0] != "input" else []
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += [value["dict"][key] for key in value["dict"]] if "dict" in value else []
            found += [value["node"]] if "node" in value else []
    return found


def _source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_source(item) for item in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    ((kind, inner),) = value.items()
    if kind == "node":
        return f"v{inner}"
    return f"torch.device({inner!r})" if kind == "device" else inner
