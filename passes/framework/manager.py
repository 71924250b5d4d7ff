"""Runs the passes over a graph in order, and reports for each pass what it changed or why it did not run."""

from __future__ import annotations

import hashlib
import inspect
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.framework.graph_text import graph_diff, graph_text
from compiled_engine.passes.framework.profile import DeviceProfile
from compiled_engine.passes.framework.verifier import copy_of, verify_rewrites


class ContractError(RuntimeError):
    """Raised if an enabled pass matched less often than its contract requires."""


@dataclass(frozen=True)
class PassReport:
    """The outcome of a pass on a graph: whether it ran, its matches and their least number, its time and its diff."""

    name: str
    enabled: bool
    applied: bool  # False: not run, for `reason`
    reason: str = ""
    matches: int = 0
    contract: int = 0  # required matches
    near_misses: tuple[str, ...] = ()
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    diff: str = ""  # of the graph's text
    verified: int = 0  # rewrites whose results were compared and equal
    notes: tuple[str, ...] = ()

    @staticmethod
    def from_json(data: dict[str, Any]) -> PassReport:
        return PassReport(**data | {name: tuple(data[name]) for name in ("near_misses", "notes")})


def run_passes(
    graph: fx.Graph,
    passes: Sequence[GraphPass],
    enabled: Collection[str],
    compile_range: CompileRange,
    device: torch.device,
    *,
    profile: DeviceProfile | None = None,
    strict: bool = False,
    verify: bool = False,
) -> tuple[PassReport, ...]:
    """Run the enabled passes in the order of `passes`, rewriting `graph` in place.

    Returns a report for each of `passes`, including those that did not run. A pass does not run if it is disabled, if a
    pass that it requires is disabled, if it does not apply to the range and device, or if `profile`, the device's
    measurements, shows that it is slower. Raises ContractError if a pass matches less often than it must (see
    GraphPass.contract): always for a required pass, and with `strict` for any pass. With `verify`, raises
    VerificationError if a rewrite computes a different result.
    """
    reports = []
    text = graph_text(graph)
    reasons = [_why_not(graph_pass, enabled, compile_range, device, profile) for graph_pass in passes]
    contracts = [
        graph_pass.contract(graph, compile_range) if reason is None else 0
        for graph_pass, reason in zip(passes, reasons, strict=True)
    ]
    for graph_pass, reason, contract in zip(passes, reasons, contracts, strict=True):
        if reason is not None:
            reports.append(PassReport(graph_pass.name, graph_pass.name in enabled, False, reason))
            continue
        report, text = _run(graph_pass, graph, text, contract, compile_range, device, verify)
        reports.append(report)
        if strict or graph_pass.required:
            require_contracts(compile_range, (report,))
    return tuple(reports)


def require_contracts(compile_range: CompileRange, reports: Sequence[PassReport]) -> None:
    """Raise ContractError for the first report of a pass with fewer matches than its contract, the required number."""
    for report in reports:
        if report.matches < report.contract:
            raise ContractError(
                f"pass {report.name} matched {report.matches} times over {compile_range.name} tokens, its contract is "
                f"{report.contract}; candidates that did not match: {'; '.join(report.near_misses) or 'none'}"
            )


def _why_not(
    graph_pass: GraphPass,
    enabled: Collection[str],
    compile_range: CompileRange,
    device: torch.device,
    profile: DeviceProfile | None,
) -> str | None:
    if graph_pass.name not in enabled:
        return "disabled"
    missing = [name for name in graph_pass.requires if name not in enabled]
    if missing:
        return f"needs {', '.join(missing)}, which is disabled"
    reason = graph_pass.applicable(compile_range, device.type)
    return reason or (profile.why_not(graph_pass.name, compile_range) if profile else None)


def _run(
    graph_pass: GraphPass,
    graph: fx.Graph,
    text: list[str],
    contract: int,
    compile_range: CompileRange,
    device: torch.device,
    verify: bool,
) -> tuple[PassReport, list[str]]:
    """Run a pass on the graph, in place. Returns its report and the rewritten graph's text, see `graph_text`.

    text: the graph's text before the pass. contract: the least number of matches, for the report.
    """
    before = copy_of(graph) if verify else None
    start = time.perf_counter()
    result = graph_pass.run(graph)
    graph.lint()
    seconds = time.perf_counter() - start
    verified = 0
    if before is not None:
        own = graph_pass.verify(graph, result, compile_range, device)
        if own is None:
            own = verify_rewrites(graph_pass.name, before, graph, result, compile_range, device)
        verified = own
    after = graph_text(graph)
    report = PassReport(
        name=graph_pass.name,
        enabled=True,
        applied=True,
        matches=result.matches,
        contract=contract,
        near_misses=result.near_misses,
        seconds=seconds,
        nodes_before=len(text),
        nodes_after=len(after),
        diff=graph_diff(text, after),
        verified=verified,
        notes=result.notes,
    )
    return report, after


def pass_uuid(graph_pass: GraphPass) -> str:
    """Return the text that stands for the pass in the cache key: its `uuid`, or else a digest of its module's source.

    Raises ValueError for a pass with neither, such as one written in a notebook.
    """
    if graph_pass.uuid is not None:
        return graph_pass.uuid
    try:
        source = inspect.getsource(sys.modules[type(graph_pass).__module__])
    except (OSError, TypeError) as error:
        raise ValueError(
            f"pass {graph_pass.name} has no source file to digest for the cache key: give it a `uuid` that changes "
            "when the pass does"
        ) from error
    return hashlib.sha256(source.encode()).hexdigest()[:16]
