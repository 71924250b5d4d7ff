"""The ordered list of passes, and the manager that runs it over a whole model's graph."""

from __future__ import annotations

import hashlib
import inspect
import sys
import time
from dataclasses import dataclass

from torch import fx

from compiled_engine.passes.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.merge_linears import MergeLinears
from compiled_engine.passes.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.silu_mul import SiluMul

PASSES: tuple[GraphPass, ...] = (MergeLinears(), ResidualRMSNorm(), SiluMul())
PASS_NAMES = tuple(graph_pass.name for graph_pass in PASSES)


class ContractError(RuntimeError):
    """An enabled pass matched less often than it must."""


@dataclass(frozen=True)
class PassReport:
    """What one pass did to one graph. `contract` is how often it had to match."""

    name: str
    matches: int
    contract: int
    near_misses: tuple[str, ...]
    seconds: float


def run_passes(
    graph: fx.Graph,
    names: tuple[str, ...],
    compile_range: CompileRange,
    device_type: str,
    num_layers: int,
    strict: bool = False,
) -> tuple[PassReport, ...]:
    """Run the passes called `names`, in the order of PASSES, where they apply; rewrites `graph` in place.

    Raises ContractError in strict mode when a pass matched less often than its contract.
    """
    reports = []
    for graph_pass in PASSES:
        if graph_pass.name not in names or not graph_pass.applicable(compile_range, device_type):
            continue
        start = time.perf_counter()
        result = graph_pass.run(graph)
        graph.lint()
        contract = graph_pass.matches_per_layer * num_layers
        seconds = time.perf_counter() - start
        reports.append(PassReport(graph_pass.name, result.matches, contract, result.near_misses, seconds))
        if strict and result.matches < contract:
            raise ContractError(
                f"pass {graph_pass.name} matched {result.matches} times, its contract is {contract}; "
                f"near misses: {'; '.join(result.near_misses) or 'none'}"
            )
    return tuple(reports)


def pass_uuid(name: str) -> str:
    """Digest of the source of the file that defines a pass: part of the cache key."""
    graph_pass = next(p for p in PASSES if p.name == name)
    source = inspect.getsource(sys.modules[type(graph_pass).__module__])
    return hashlib.sha256(source.encode()).hexdigest()[:16]
