"""Renders a graph as text, one node per line, for diffs and the inspector."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import Source, source_of

CONTEXT_LINES = 2


def graph_text(graph: fx.Graph) -> list[str]:
    """Return one line per node: `name: dtype[shape] = op(arguments)`, or for an input `... = input source`."""
    return [_line(node) for node in graph.nodes]


def graph_diff(before: list[str], after: list[str]) -> str:
    """Return a diff of two graph texts, or "" if they have the same lines.

    A change shows its removed lines (-), then its added lines (+), between two unchanged lines on either side. The
    lines of a graph are unique and unchanged lines keep their order, so the diff takes linear time.
    """
    went, came = set(before) - set(after), set(after) - set(before)
    lines: list[str] = []
    added: list[str] = []  # since the last line that stayed
    i = 0
    for line in after:
        if line in came:
            added.append("+ " + line)
            continue
        while i < len(before) and before[i] != line:
            if before[i] in went:
                lines.append("- " + before[i])
            i += 1
        lines += [*added, "  " + line]
        added = []
        i += 1
    lines += ["- " + line for line in before[i:] if line in went] + added
    return "\n".join(_with_context(lines)) if went or came else ""


def _with_context(lines: list[str]) -> list[str]:
    near = {
        j for i, line in enumerate(lines) if line[0] != " " for j in range(i - CONTEXT_LINES, i + CONTEXT_LINES + 1)
    }
    shown: list[str] = []
    for i, line in enumerate(lines):
        if i in near:
            shown.append(line)
        elif not shown or shown[-1] != "...":
            shown.append("...")
    return shown


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    if node.op == "placeholder":
        source = source_of(node)
        origin = source.name
        if isinstance(source, Source) and source.kind == "size":
            origin += f".shape[{source.dim}]"
        return f"{node.name}: {_type(node.meta['val'])} = input {origin}"
    target = (
        str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node._pretty_print_target(node.target)
    )
    arguments = [_value(item) for item in node.args] + [f"{k}={_value(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}: {_type(node.meta.get('val'))} = {target}({', '.join(arguments)})"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return value.name if isinstance(value, fx.Node) else repr(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(_type(item) for item in value)})"
    return "None" if value is None else "int"
