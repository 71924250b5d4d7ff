"""Writes the files of a cache entry that only the inspector reads.

`record.json` holds a `Record`; `trace/` holds the results of Dynamo and of lowering. Facts that the inspector can read
from the entry's other files, such as a piece's kernels, are not stored here.
"""

from __future__ import annotations

import dis
import json
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import fx, nn

from compiled_engine.graphs.compiler.guards import GuardRecord
from compiled_engine.passes.framework.graph_inputs import source_of
from compiled_engine.process.timeline import Span

RECORD = "record.json"


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter or buffer of a module itself, not of its submodules."""

    name: str  # last part of its path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModuleRecord:
    path: str
    kind: str
    count: int  # number of equal siblings, of which the first is recorded
    parameters: tuple[ParameterRecord, ...]
    children: tuple[ModuleRecord, ...]


@dataclass(frozen=True)
class SymbolRecord:
    """A symbolic size of a traced graph, with its range and the dimensions of inputs that have this size."""

    symbol: str  # in the graphs
    name: str
    low: int
    high: int
    places: tuple[str, ...]  # inputs' dimensions with this size


@dataclass(frozen=True)
class PieceRecord:
    """Records how long the compilation of a piece took, and which worker compiled it."""

    key: str
    seconds: float
    worker: int | None  # None: the engine's own process


@dataclass(frozen=True)
class Record:
    """The facts about a compilation that only the inspector shows, as stored in record.json."""

    phases: tuple[Span, ...]  # start times count from the beginning of the build
    modules: ModuleRecord  # root of the model's module tree
    symbols: tuple[SymbolRecord, ...]
    guards: tuple[GuardRecord, ...]
    pieces: tuple[PieceRecord, ...]

    def write(self, entry: Path) -> None:
        (entry / RECORD).write_text(json.dumps(asdict(self), indent=1))


def write_trace(
    folder: Path, bytecode: tuple[types.CodeType, types.CodeType] | None, dynamo_graph: str, aten_graph: Iterable[str]
) -> None:
    """Write bytecode.txt, dynamo_graph.txt and aten_graph.txt of a callable to the new folder `folder`.

    bytecode: the traced function's code before and after Dynamo; None, for no such file, if Dynamo did not rewrite it.
    """
    folder.mkdir()
    if bytecode is not None:
        (folder / "bytecode.txt").write_text(_decompiled(*bytecode), encoding="utf-8")
    (folder / "dynamo_graph.txt").write_text(dynamo_graph, encoding="utf-8")
    (folder / "aten_graph.txt").write_text("\n".join(aten_graph) + "\n", encoding="utf-8")


def _decompiled(before: types.CodeType, after: types.CodeType) -> str:
    """Return the source of a function before and after Dynamo as one text, without random parts of Dynamo's names."""
    parts = [("The function that was traced", before), ("What Dynamo made of it", after)]
    text = "\n\n".join(f"# {title}.\n{_source(code)}" for title, code in parts) + "\n"
    return re.sub(r"__compiled_fn_\d+(_[0-9a-f]+){5}", "__compiled_fn", text)


def _source(code: types.CodeType) -> str:
    """Return a function's source, decompiled by depyf; if depyf fails, the function's bytecode instructions.

    A failure is not raised, since it must not stop a build.
    """
    import depyf  # slow to import, and not needed in a warm start

    try:
        return depyf.decompile(code).strip()
    except Exception as error:
        return f"# depyf cannot decompile this: {error}\n{dis.Bytecode(code).dis().strip()}"


def phases_since(spans: Iterable[Span], start_s: float) -> tuple[Span, ...]:
    """Return the spans that began at `start_s` or later, ordered by start, with start times relative to `start_s`."""
    later = [replace(span, start_s=span.start_s - start_s) for span in spans if span.start_s >= start_s]
    return tuple(sorted(later, key=lambda span: span.start_s))


def module_tree(model: nn.Module) -> ModuleRecord:
    """Return the tree of a model's modules. A run of equal layers is recorded as its first layer and its length."""
    return _module("", model)


def _module(path: str, module: nn.Module) -> ModuleRecord:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    children: list[ModuleRecord] = []
    for name, child in module.named_children():
        record = _module(f"{path}.{name}" if path else name, child)
        last = children[-1] if children else None
        if last is not None and name.isdecimal() and _shape(last) == _shape(record):
            children[-1] = replace(last, count=last.count + 1)
        else:
            children.append(record)
    parameters = [ParameterRecord(name, tuple(value.shape), _dtype_name(value.dtype)) for name, value in own]
    return ModuleRecord(path, type(module).__name__, 1, tuple(parameters), tuple(children))


def _shape(module: ModuleRecord) -> tuple[object, ...]:
    """Return the values by which two modules are compared: everything except the module's own path and count."""
    return module.kind, module.parameters, tuple((_shape(child), child.count) for child in module.children)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def symbols(graph: fx.Graph, declared: Mapping[tuple[str, int], tuple[str, int, int]]) -> tuple[SymbolRecord, ...]:
    """Return a record of each symbolic size of a traced graph.

    declared: (argument, dimension) -> (name of the size, minimum, maximum), see Signature.open_sizes.
    """
    inputs = {
        source_of(node).name: node.meta["val"]
        for node in graph.find_nodes(op="placeholder")
        if source_of(node).kind == "argument"
    }
    found: dict[str, SymbolRecord] = {}
    for (argument, dim), (name, low, high) in declared.items():
        place = f"{argument}.shape[{dim}]"
        if name in found:
            found[name] = replace(found[name], places=(*found[name].places, place))
        elif argument in inputs:
            found[name] = SymbolRecord(str(inputs[argument].shape[dim]), name, low, high, (place,))
    return tuple(found.values())
