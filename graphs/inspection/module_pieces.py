"""Finds which compiled pieces compute which modules of the model.

A piece computes a module if it takes the module's parameters as arguments.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from compiled_engine.graphs.compiler.compiled_range import CompiledRange
from compiled_engine.passes.framework.parameter import Parameter

# Parameter name -> (range name, piece key) of each call of a piece that takes the parameter.
ParameterUses = dict[str, list[tuple[str, str]]]


def parameter_uses(ranges: Iterable[CompiledRange]) -> ParameterUses:
    """Return, by name of each model tensor, the (range name, piece key) of each call of a piece that takes the tensor.

    A call that takes a packed parameter takes all tensors that are packed in it.
    """
    uses: ParameterUses = defaultdict(list)
    for compiled in ranges:
        inputs = compiled.plan.inputs
        for step in compiled.plan.steps:
            taken = [inputs[a["value"]] for a in step.arguments if a.get("value", len(inputs)) < len(inputs)]
            for source in taken:
                if step.piece is not None and isinstance(source, Parameter):
                    for leaf in source.leaves():
                        uses[leaf.name].append((compiled.name, step.piece))
    return uses


def with_pieces(module: dict[str, Any], uses: ParameterUses) -> dict[str, Any]:
    """Return the module tree of record.json with a list "pieces" added to every module.

    An item of the list describes a piece that computes the module, as {"range", "key", "instances"}. A module of the
    tree may represent several equal modules, such as layers. "instances" are the indices of those modules that the
    piece computes, such as "0, 2-27"; "" for a single module.
    """
    return _annotated(module, uses, {module["path"]: None})[0]


def modules_of_pieces(module: dict[str, Any]) -> dict[str, list[str]]:
    """Return the paths of the modules that each piece computes, by piece key.

    A path of several equal modules has their indices in braces: model.layers.{0-4}.mlp.gate_proj. module: the result of
    `with_pieces`.
    """
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for use in module["pieces"] if module["parameters"] else ():
        found[use["key"]][_numbered(module["path"], use["instances"])] = None
    for child in module["children"]:
        for key, paths in modules_of_pieces(child).items():
            found[key] |= dict.fromkeys(paths)
    return {key: list(paths) for key, paths in found.items()}


def _numbered(path: str, instances: str) -> str:
    """Return a path with its index replaced by `instances`: for "0, 2-27", a.0.mlp becomes a.{0, 2-27}.mlp.

    A single index gets no braces. If `instances` is "", the path is returned unchanged.
    """
    if not instances:
        return path
    return re.sub(r"\.\d+(?=\.|$)", f".{instances if instances.isdecimal() else '{' + instances + '}'}", path)


def _annotated(
    module: dict[str, Any], uses: ParameterUses, instances: dict[str, int | None]
) -> tuple[dict[str, Any], dict[tuple[str, str], set[int | None]]]:
    """Return the module with "pieces" added to it and its children, and the pieces that compute it.

    The pieces are a dict: (range, piece key) -> indices of the modules that the piece computes. instances: path ->
    index of each module that `module` represents; the index is None for a single module.
    """
    found: dict[tuple[str, str], set[int | None]] = defaultdict(set)
    for path, number in instances.items():
        for parameter in module["parameters"]:
            for use in uses.get(f"{path}.{parameter['name']}".lstrip("."), ()):
                found[use].add(number)
    children = []
    for child in module["children"]:
        annotated, in_child = _annotated(child, uses, _instances(child, module["path"], instances))
        children.append(annotated)
        for use, numbers in in_child.items():
            found[use] |= numbers if child["count"] == 1 else {None}
    pieces = [
        {"range": name, "key": key, "instances": _ranges(sorted(n for n in numbers if n is not None))}
        for (name, key), numbers in found.items()
    ]
    return module | {"children": children, "pieces": pieces}, found


def _instances(child: dict[str, Any], parent: str, parents: dict[str, int | None]) -> dict[str, int | None]:
    name = child["path"].removeprefix(parent).lstrip(".")
    if child["count"] == 1:
        return {f"{path}.{name}".lstrip("."): number for path, number in parents.items()}
    return {f"{path}.{n}".lstrip("."): n for path in parents for n in range(int(name), int(name) + child["count"])}


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as a text of ranges: "0, 2-27" for 0, 2, 3, ... 27."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
