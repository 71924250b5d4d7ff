"""Passes that do something else than they should, behind the interface of a right one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_edits import Edit
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult


@dataclass(frozen=True)
class Silent(GraphPass):
    """A pass that has stopped matching, without saying why."""

    right: GraphPass

    @property
    def name(self) -> str:
        return self.right.name

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return self.right.applicable(compile_range, device_type)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return self.right.contract(graph, compile_range)

    def run(self, graph: fx.Graph) -> PassResult:
        return PassResult(0)


@dataclass(frozen=True)
class Broken(Silent):
    """A pass whose rewritten graph is then edited. reported: whether it reports its replacements."""

    edit: Edit
    reported: bool = True

    def run(self, graph: fx.Graph) -> PassResult:
        result = self.right.run(graph)
        self.edit(graph)
        return result if self.reported else replace(result, replacements=())
