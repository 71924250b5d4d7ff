"""The result of one compile range, its plan and pass reports, as files of a cache entry."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.stage_plan import StagePlan
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.passes.manager import PassReport


@dataclass(frozen=True)
class CompiledRange:
    """The model compiled for one range of token counts. staged: the part of the plan that a stage runs."""

    compile_range: CompileRange
    plan: Plan
    passes: tuple[PassReport, ...]
    staged: StagePlan | None = None

    @property
    def bound_plan(self) -> Plan:
        """The plan to run: the stage's part, or the whole."""
        return self.staged.plan if self.staged is not None else self.plan


def write_compiled_range(entry: Path, compiled: CompiledRange, forward_source: str, graph_text: list[str]) -> None:
    """<range>/plan.json, passes.json, forward.py, the graph after its passes, and the diff that each pass made."""
    folder = entry / compiled.compile_range.name
    (folder / "passes").mkdir(parents=True)
    (folder / "plan.json").write_text(compiled.plan.to_json(), encoding="utf-8")
    (folder / "forward.py").write_text(forward_source, encoding="utf-8")
    (folder / "graph.txt").write_text("\n".join(graph_text) + "\n", encoding="utf-8")
    for number, report in enumerate(compiled.passes):
        if report.diff:
            (folder / "passes" / f"{number:02}_{report.name}.diff").write_text(report.diff, encoding="utf-8")
    (folder / "passes.json").write_text(
        json.dumps([asdict(report) for report in compiled.passes], indent=1), encoding="utf-8"
    )
    (folder / "range.json").write_text(json.dumps(asdict(compiled.compile_range)), encoding="utf-8")


def read_compiled_ranges(entry: Path) -> tuple[CompiledRange, ...]:
    """The compile ranges of an entry, those for small batches first."""
    ranges = [_read(path.parent) for path in entry.glob("*/range.json")]
    return tuple(sorted(ranges, key=lambda r: (not r.compile_range.small, r.compile_range.low)))


def _read(folder: Path) -> CompiledRange:
    compile_range = CompileRange(**json.loads((folder / "range.json").read_text()))
    plan = Plan.from_json((folder / "plan.json").read_text())
    reports = json.loads((folder / "passes.json").read_text())
    return CompiledRange(compile_range, plan, tuple(PassReport.from_json(report) for report in reports))
