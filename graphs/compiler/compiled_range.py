"""CompiledRange, a callable compiled for one range of token counts; writes and reads its files in a cache entry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import FORWARD
from compiled_engine.graphs.compiler.stage_plan import StagePlan
from compiled_engine.graphs.compiler.stitch import forward_source
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport


@dataclass(frozen=True)
class CompiledRange:
    """A callable of the model compiled for one range of token counts: its plan and the reports of the passes."""

    callable: str
    compile_range: CompileRange
    plan: Plan
    returns: tuple[str, ...]  # names of the results
    passes: tuple[PassReport, ...]
    staged: StagePlan | None = None  # the part of the plan that a pipeline stage runs

    @property
    def name(self) -> str:
        """The folder in the entry with the range's files: 1-64 for the forward, logits/1-2048 for another callable."""
        return f"{folder_of(self.callable)}{self.compile_range.name}"

    @property
    def bound_plan(self) -> Plan:
        """The plan that this process runs: in a pipeline the stage's part of the plan, otherwise the whole plan."""
        return self.staged.plan if self.staged is not None else self.plan


def folder_of(name: str) -> str:
    """Return the folder of a callable's files in an entry: "" for the forward, otherwise the callable's name."""
    return "" if name == FORWARD else f"{name}/"


def write_compiled_range(entry: Path, compiled: CompiledRange, graph_text: Sequence[str]) -> None:
    """Write a compiled range's files to the folder `compiled.name` of an entry.

    These are range.json, plan.json, passes.json, forward.py, graph.txt (the graph after its passes) and each pass's
    diff. graph_text: the lines of graph.txt.
    """
    folder = entry / compiled.name
    (folder / "passes").mkdir(parents=True)
    (folder / "plan.json").write_text(compiled.plan.to_json(), encoding="utf-8")
    (folder / "forward.py").write_text(forward_source(compiled.plan), encoding="utf-8")
    (folder / "graph.txt").write_text("\n".join(graph_text) + "\n", encoding="utf-8")
    for number, report in enumerate(compiled.passes):
        if report.diff:
            (folder / "passes" / f"{number:02}_{report.name}.diff").write_text(report.diff, encoding="utf-8")
    (folder / "passes.json").write_text(
        json.dumps([asdict(report) for report in compiled.passes], indent=1), encoding="utf-8"
    )
    described = {"callable": compiled.callable, "returns": compiled.returns, "range": asdict(compiled.compile_range)}
    (folder / "range.json").write_text(json.dumps(described), encoding="utf-8")


def read_compiled_ranges(entry: Path) -> tuple[CompiledRange, ...]:
    """Return the compiled ranges in an entry: first those of the forward, then those of the other callables by name.

    Of each callable, ranges for small batches come first, ascending; the range that serves every batch is last.
    """
    ranges = [_read(path.parent) for path in entry.rglob("range.json")]
    return tuple(sorted(ranges, key=_place))


def _place(compiled: CompiledRange) -> tuple[str, bool, int]:
    return folder_of(compiled.callable), not compiled.compile_range.small, compiled.compile_range.low


def _read(folder: Path) -> CompiledRange:
    described = json.loads((folder / "range.json").read_text())
    plan = Plan.from_json((folder / "plan.json").read_text())
    reports = tuple(map(PassReport.from_json, json.loads((folder / "passes.json").read_text())))
    compile_range, returns = CompileRange(**described["range"]), tuple(described["returns"])
    return CompiledRange(described["callable"], compile_range, plan, returns, reports)
