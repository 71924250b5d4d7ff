"""The pass manager on passes that record what they are asked: order, contracts, refusals, verification, reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, graph_of, random_tensors
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.manager import (
    ContractError,
    PassReport,
    pass_uuid,
    require_contracts,
    run_passes,
)
from compiled_engine.passes.framework.matching import aten, emit
from compiled_engine.passes.framework.profile import DeviceProfile
from compiled_engine.passes.framework.verifier import VerificationError

RANGE = CompileRange(2, 6)


@dataclass
class Recording(GraphPass):
    """Takes the first negation out, and says what it is asked for in `log`."""

    name: str = "recording"
    log: list[Any] = field(default_factory=list)
    requires: tuple[str, ...] = ()
    required: bool = False
    reason: str | None = None
    must: int = 1
    result: PassResult = field(default_factory=lambda: PassResult(1))
    verified: Callable[[], int | None] = lambda: None
    edit: Callable[[fx.Graph], object] = lambda graph: None

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        self.log.append((self.name, "applicable", compile_range, device_type))
        return self.reason

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        negations = len(graph.find_nodes(op="call_function", target=aten.neg.default))
        self.log.append((self.name, "contract", compile_range, negations))
        return self.must

    def run(self, graph: fx.Graph) -> PassResult:
        self.log.append((self.name, "run"))
        node = graph.find_nodes(op="call_function", target=aten.neg.default)[0]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        self.edit(graph)
        return self.result

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        self.log.append((self.name, "verify", result is self.result, compile_range, device))
        return self.verified()


def graph() -> fx.Graph:
    """Three negations, and their exponential."""
    return graph_of(lambda x: (x.neg().neg().neg().exp(),), random_tensors(x=(4, 8)), {}).graph


def steps(log: list[Any]) -> list[tuple[str, str]]:
    return [(name, what) for name, what, *_ in log]


def test_contracts_are_counted_before_any_pass_runs_and_passes_run_in_order() -> None:
    log: list[Any] = []
    passes = [Recording(name, log) for name in ("one", "two")]
    reports = run_passes(graph(), passes, {"two", "one"}, RANGE, CPU)
    assert steps(log) == [
        *(("one", "applicable"), ("two", "applicable")),
        *(("one", "contract"), ("two", "contract")),
        *(("one", "run"), ("two", "run")),
    ]
    assert log[0][2:] == (RANGE, "cpu")
    assert [entry[2:] for entry in log[2:4]] == [(RANGE, 3), (RANGE, 3)]
    assert [report.name for report in reports] == ["one", "two"]
    assert [(report.nodes_before, report.nodes_after) for report in reports] == [(6, 5), (5, 4)]
    assert all("- neg" in report.diff and report.applied and report.enabled for report in reports)
    assert all(0 < report.seconds < 5 for report in reports)


def test_a_report_has_what_the_pass_says() -> None:
    result = PassResult(2, ("a: b",), (), ("a note",))
    (report,) = run_passes(graph(), [Recording(result=result, must=2)], {"recording"}, RANGE, CPU)
    assert (report.matches, report.contract, report.near_misses, report.notes) == (2, 2, ("a: b",), ("a note",))
    assert (report.verified, report.reason) == (0, "")
    assert PassReport.from_json(json.loads(json.dumps(asdict(report)))) == report


def test_a_pass_that_does_not_run_changes_and_counts_nothing() -> None:
    cases: list[tuple[dict[str, Any], set[str], str]] = [
        ({}, set(), "disabled"),
        ({"requires": ("a", "b", "c")}, {"recording", "b"}, "needs a, c, which is disabled"),
        ({"requires": ("a",), "reason": "not here"}, {"recording", "a"}, "not here"),
    ]
    for changes, enabled, reason in cases:
        given, log = graph(), []
        before = len(given.nodes)
        (report,) = run_passes(given, [Recording(log=log, **changes)], enabled, RANGE, CPU, strict=True, verify=True)
        assert (report.reason, report.enabled, report.applied) == (reason, "recording" in enabled, False)
        numbers = report.matches, report.contract, report.verified, report.nodes_before, report.nodes_after
        assert numbers == (0, 0, 0, 0, 0)
        assert (report.seconds, report.diff, report.near_misses, report.notes) == (0.0, "", (), ())
        assert len(given.nodes) == before
        assert {what for _, what, *_ in log} <= {"applicable"}


def test_a_profile_takes_out_what_applies_and_does_not_pay() -> None:
    profile = DeviceProfile("a test", {"recording": {4: -9.0}}, 1.0, {})
    for reason in (None, "not here"):
        (report,) = run_passes(graph(), [Recording(reason=reason)], {"recording"}, RANGE, CPU, profile=profile)
        assert report.reason == reason or (reason is None and "it is slower on a test" in report.reason)
    (report,) = run_passes(graph(), [Recording()], {"recording"}, CompileRange(5, 6), CPU, profile=profile)
    assert report.applied


@pytest.mark.parametrize(
    ("strict", "required", "matches", "fails"),
    [
        (False, False, 0, False),
        (True, False, 0, True),
        (False, True, 0, True),
        (True, True, 1, True),
        (True, True, 2, False),
        (True, True, 3, False),
    ],
)
def test_who_must_match_as_often_as_the_contract_says(strict: bool, required: bool, matches: int, fails: bool) -> None:
    log: list[Any] = []
    first = Recording("first", log, must=2, required=required, result=PassResult(matches, ("x: no", "y: no")))
    passes = [first, Recording("second", log)]
    if not fails:
        assert len(run_passes(graph(), passes, {"first", "second"}, RANGE, CPU, strict=strict)) == 2
        return
    problem = f"pass first matched {matches} times over 2-6 tokens, its contract is 2; .*: x: no; y: no$"
    with pytest.raises(ContractError, match=problem):
        run_passes(graph(), passes, {"first", "second"}, RANGE, CPU, strict=strict)
    assert ("second", "run") not in steps(log)


def test_every_report_is_held_to_its_contract() -> None:
    right = PassReport("right", True, True, matches=2, contract=2)
    require_contracts(RANGE, ())
    require_contracts(RANGE, (right, replace(right, matches=3)))
    with pytest.raises(ContractError, match=r"pass right matched 1 times .* did not match: none$"):
        require_contracts(RANGE, (right, replace(right, matches=1)))


def test_a_verifier_of_its_own_takes_the_place_of_the_comparison() -> None:
    """The rewrite is wrong, and only the comparison sees it."""
    for own in (0, 7):
        log: list[Any] = []
        passes = [Recording(log=log, verified=lambda own=own: own)]  # type: ignore[misc]
        (report,) = run_passes(graph(), passes, {"recording"}, RANGE, CPU, verify=True)
        assert report.verified == own
        assert log[-1] == ("recording", "verify", True, RANGE, CPU)
    log = []
    with pytest.raises(VerificationError, match="pass recording"):
        run_passes(graph(), [Recording(log=log)], {"recording"}, RANGE, CPU, verify=True)
    log = []
    (report,) = run_passes(graph(), [Recording(log=log)], {"recording"}, RANGE, CPU)
    assert report.verified == 0
    assert "verify" not in {what for _, what, *_ in log}


def test_a_right_rewrite_is_verified_with_the_graph_before_it() -> None:
    @dataclass(frozen=True)
    class Merging(GraphPass):
        name: str = "merging"

        def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
            return 1

        def run(self, graph: fx.Graph) -> PassResult:
            first, second, _ = graph.find_nodes(op="call_function", target=aten.neg.default)
            with graph.inserting_before(second):
                new = emit(graph, aten.alias.default, first.args[0])
            second.replace_all_uses_with(new)
            graph.eliminate_dead_code()
            return PassResult(1, (), (Replacement(second.name, new),))

    (report,) = run_passes(graph(), [Merging()], {"merging"}, RANGE, CPU, verify=True)
    assert report.verified == 1


def test_a_graph_that_a_pass_leaves_broken_is_an_error() -> None:
    def out_of_order(graph: fx.Graph) -> None:
        first = graph.find_nodes(op="call_function", target=aten.neg.default)[0]
        graph.output_node().append(first)

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(graph(), [Recording(edit=out_of_order)], {"recording"}, RANGE, CPU)


def test_a_pass_without_a_file_needs_a_uuid() -> None:
    class Nowhere(Recording):
        pass

    Nowhere.__module__ = "builtins"
    with pytest.raises(ValueError, match=r"pass recording has no source file to digest .*: give it a `uuid`"):
        pass_uuid(Nowhere())
    own = Nowhere()
    own.uuid = "v2"
    assert pass_uuid(own) == "v2"


def test_compile_ranges_include_both_ends() -> None:
    assert [tokens for tokens in range(9) if tokens in RANGE] == [2, 3, 4, 5, 6]
    assert RANGE.name == "2-6"
    assert not RANGE.small
