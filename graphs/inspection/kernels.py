"""Finds the kernels that a compiled piece launches, in Inductor's output code or in the piece's generated Python."""

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
# Function that makes a kernel in Inductor's output code -> language of the kernel's source.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "c++", "cpp": "c++"}


@dataclass(frozen=True)
class Kernel:
    """A kernel that a piece launches. launches: how often the piece launches it in one run."""

    name: str
    kind: str  # triton and c++: generated from `source`; library: a call of BLAS or similar; op: of an opaque op
    launches: int
    source: str = ""  # known for generated kernels and the engine's own ops


def kernels_of(output_code: str) -> tuple[Kernel, ...]:
    """Return the kernels that a piece's code launches, in the order of their first launch.

    Launches in all branches are counted, although a run may skip some.
    """
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
    """Return the source files of the passes that define Triton kernels of the op `name`, joined to one text.

    The names of such files begin with the op's name. Returns "" if there are none, or if the op's namespace is not
    compiled_engine.
    """
    namespace, _, op = name.partition("::")
    found = sorted(_PASSES.rglob(f"{op}*.py")) if namespace == "compiled_engine" else []
    files = [path.read_text(encoding="utf-8") for path in found]
    return "\n\n".join(text for text in files if "@triton.jit" in text)


def without_kernel_sources(output_code: str) -> str:
    """Return the output code with each kernel's source replaced by "...".

    The rest allocates memory, launches the kernels and frees the memory.
    """
    lines = output_code.splitlines()
    constants = [call.args[1] for call in _sources(ast.parse(output_code)).values()]
    for constant in sorted(constants, key=lambda node: -node.lineno):
        assert constant.end_lineno is not None
        start, end = lines[constant.lineno - 1], lines[constant.end_lineno - 1]
        joined = start[: constant.col_offset] + "..." + end[constant.end_col_offset :]
        lines[constant.lineno - 1 : constant.end_lineno] = [joined]
    return "\n".join(lines) + "\n"


def _sources(tree: ast.Module) -> dict[str, ast.Call]:
    """Return the calls that compile kernels, by kernel name.

    Example of such a call: async_compile.triton(name, source, ...).
    """
    made = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        path = _path(node.value.func) if isinstance(node.value, ast.Call) else []
        if path[:1] == ["async_compile"] and path[-1] in _LANGUAGES:
            made[node.targets[0].id] = node.value
    return made  # type: ignore[return-value]


def _launched(function: ast.expr, sources: dict[str, ast.Call]) -> tuple[str, str] | None:
    """Return (name, kind) of the kernel that a call of `function` in a piece's code launches; None if there is none.

    sources: the result of `_sources`.
    """
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
    """Return the parts of a dotted name: ["torch", "ops", "aten"] for torch.ops.aten; [] for other expressions."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        head = _path(expression.value)
        return [*head, expression.attr] if head else []
    return []


# Kernel launches of a decode step, counted by torch's profiler.


def kernels_per_decode_step(generate: Callable[[int], None], device: torch.device) -> int | None:
    """Measure how many kernels a decode step of one request launches. Returns the number; None on a CPU.

    generate: generates the given number of tokens for a short prompt, one step per token.
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
