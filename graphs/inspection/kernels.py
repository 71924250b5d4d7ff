"""Kernels launched by a piece, read from Inductor's output code or from the generated Python."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from compiled_engine import passes
from compiled_engine.graphs.compiler.direct_piece import op_named
from compiled_engine.passes.framework.op_library import declaration_of

_PASSES = Path(passes.__file__ or "").parent
# How Inductor's output code makes a kernel from its source -> what the source is written in.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "c++", "cpp": "c++"}


@dataclass(frozen=True)
class Kernel:
    """A kernel that one run of a piece launches `launches` times.

    `kind`: triton and c++ are generated from `source`; library is a call of BLAS or the like, op a call of an op that
    Inductor takes as it is, whose `source` is known if it is ours.
    """

    name: str
    kind: str
    launches: int
    source: str = ""


def kernels_of(output_code: str) -> tuple[Kernel, ...]:
    """The kernels of a piece in the order of their first launch; those in branches not taken count as well."""
    tree = ast.parse(output_code)
    sources = _sources(tree)
    launches: Counter[tuple[str, str]] = Counter()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (
            function.name in ("call", "piece") or function.name.startswith("partition_")
        ):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            calls.sort(key=lambda node: (node.lineno, node.col_offset))
            launches.update(found for call in calls if (found := _launched(call.func, sources)) is not None)
    return tuple(
        Kernel(name, kind, count, ast.literal_eval(sources[name].args[1]) if name in sources else _own_source(name))
        for (name, kind), count in launches.items()
    )


def _own_source(name: str) -> str:
    """The files with the kernels of an op of ours, compiled_engine::<op>; the cache key has their digests."""
    namespace, _, op = name.partition("::")
    found = sorted(_PASSES.rglob(f"{op}*.py")) if namespace == "compiled_engine" else []
    files = [path.read_text(encoding="utf-8") for path in found]
    return "\n\n".join(text for text in files if "@triton.jit" in text)


def without_kernel_sources(output_code: str) -> str:
    """The output code with every kernel's source cut out: what allocates, launches and frees."""
    lines = output_code.splitlines()
    constants = [call.args[1] for call in _sources(ast.parse(output_code)).values()]
    for constant in sorted(constants, key=lambda node: -node.lineno):
        assert constant.end_lineno is not None
        start, end = lines[constant.lineno - 1], lines[constant.end_lineno - 1]
        joined = start[: constant.col_offset] + "..." + end[constant.end_col_offset :]
        lines[constant.lineno - 1 : constant.end_lineno] = [joined]
    return "\n".join(lines) + "\n"


def _sources(tree: ast.Module) -> dict[str, ast.Call]:
    """Kernel name -> the call that makes it: async_compile.triton(name, source, ...) and the like."""
    made = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        path = _path(node.value.func) if isinstance(node.value, ast.Call) else []
        if path[:1] == ["async_compile"] and path[-1] in _LANGUAGES:
            made[node.targets[0].id] = node.value
    return made  # type: ignore[return-value]


def _launched(function: ast.expr, sources: dict[str, ast.Call]) -> tuple[str, str] | None:
    """(name, kind) of the kernel that a call launches."""
    path = _path(function)
    if path and path[0] in sources and path[1:] in ([], ["run"]):
        return path[0], _LANGUAGES[_path(sources[path[0]].func)[-1]]
    if len(path) == 1 and path[0].startswith("op__"):  # a piece that runs without Inductor
        _, namespace, name, _ = path[0].split("__")
        if namespace == "aten":
            return (name, "library") if declaration_of(op_named(path[0])).launches else None
        return f"{namespace}::{name}", "op"
    if path[:1] == ["extern_kernels"]:
        return ".".join(path[1:]), "library"
    if path[:2] == ["torch", "ops"] and path[2] != "inductor":
        return f"{path[2]}::{path[3]}", "op"
    return None


def _path(expression: ast.expr) -> list[str]:
    """["torch", "ops", "aten"] for torch.ops.aten; empty for anything else than dotted names."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        head = _path(expression.value)
        return [*head, expression.attr] if head else []
    return []


# The number of kernels that a decode step launches on the device, counted by torch's profiler.


def kernels_per_decode_step(generate: Callable[[int], None], device: torch.device) -> int | None:
    """Kernels of one decode step of one request; None without a GPU.

    generate: produces the given number of tokens for a short prompt, one step per token.
    """
    if device.type != "cuda":
        return None
    return _kernels(lambda: generate(4)) - _kernels(lambda: generate(3))


def _kernels(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
