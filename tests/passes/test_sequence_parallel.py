"""The passes that sum over ranks on the way to a norm: contracts, breaks that are found, ranks that are threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from changed_passes import Broken
from graph_edits import Edit, copy_argument, set_argument, swap_results, take_from_next
from pass_cases import BIASED, CPU, GEMMA2, RANGES, Family, graph_of, random_tensors, rewrite
from test_tensor_parallel_pass import config_of, traced
from thread_ranks import ThreadGroup, on_ranks
from torch import fx

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.build import structure_passes
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import TracedGraph
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.gloo import rows_of
from compiled_engine.parallel.group import FakeGroup, in_group
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.norm import residual_rms_norm
from compiled_engine.passes.parallel.all_reduce_residual_rms_norm import AllReduceResidualRMSNorm
from compiled_engine.passes.parallel.sequence_parallel import SequenceParallel
from compiled_engine.passes.parallel.sequence_parallel_op import sequence_parallel_norm
from compiled_engine.passes.parallel.tensor_parallel import all_reduce
from compiled_engine.passes.registry import registered_passes
from compiled_engine.resolve.engine import resolve

SMALL, DYNAMIC = RANGES
SUMMED = torch.ops.compiled_engine.all_reduce_residual_rms_norm.default
DIVIDED = torch.ops.compiled_engine.sequence_parallel_norm.default


@cache
def graphs_of_a_rank(family: Family, num_layers: int) -> tuple[EngineConfig, TracedGraph]:
    config = config_of(family, 2, num_layers=num_layers)
    return config, traced(config)


def run_on_a_rank(
    family: Family,
    num_layers: int,
    compile_range: CompileRange,
    passes: tuple[GraphPass, ...] | None = None,
    **options: bool,
) -> tuple[fx.GraphModule, dict[str, PassReport]]:
    """Every pass, on a graph of one of two ranks. The first, which divides it, has a verifier and tests of its own."""
    config, graphs = graphs_of_a_rank(family, num_layers)
    module = graphs.for_range(compile_range)
    first, passes = structure_passes(config, module.graph, compile_range, None), passes or registered_passes()
    names = [graph_pass.name for graph_pass in (*first, *passes)]
    with in_group(FakeGroup(2)):
        run_passes(module.graph, first, names, compile_range, CPU)
        reports = run_passes(module.graph, passes, names, compile_range, CPU, **options)
    return module, {report.name: report for report in reports}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [BIASED, GEMMA2], ids=str)
def test_every_norm_of_a_sum_is_divided(family: Family) -> None:
    """Also where what is summed is normed before it is added. Layers stay alike; small batches are left alone."""
    module, reports = run_on_a_rank(family, 4, DYNAMIC, strict=True)
    report = reports["sequence_parallel"]
    assert report.matches == report.contract == 2 * 4
    assert len(module.graph.find_nodes(op="call_function", target=DIVIDED)) == 8
    assert len(make_plan(module.graph, split(module.graph))[1]) == 3
    _, reports = run_on_a_rank(family, 4, SMALL, strict=True)
    assert not reports["sequence_parallel"].applied
    assert reports["sequence_parallel"].reason == "1-8 tokens are few: whole rows are exchanged at once"


def test_a_sum_that_something_else_reads_stays_whole() -> None:
    """And with it all sums before it, whose rows it needs."""

    @dataclass(frozen=True)
    class Reader(GraphPass):
        name: str = "reader"

        def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
            return 0

        def run(self, graph: fx.Graph) -> PassResult:
            norm = graph.find_nodes(op="call_function", target=SUMMED)[2]
            (total,) = [item for item in norm.users if item.args[1] == 1]
            normed = next(item for item in norm.users if item.args[1] == 0)
            with graph.inserting_after(max(total, normed)):
                read = graph.call_function(torch.ops.aten.mul.Tensor, (normed, total))
            read.meta["val"] = normed.meta["val"]
            normed.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)
            return PassResult(1)

    passes = registered_passes()
    place = [graph_pass.name for graph_pass in passes].index("sequence_parallel")
    _, reports = run_on_a_rank(BIASED, 2, DYNAMIC, (*passes[:place], Reader(), *passes[place:]))
    report = reports["sequence_parallel"]
    assert (report.matches, len(report.near_misses)) == (1, 3)
    assert all("something else reads the sum with the residual" in why for why in report.near_misses)


NORM = torch.ops.compiled_engine.residual_rms_norm.default


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("change", "offset", "wide", "is_one_kernel", "is_divided"),
    [
        ("", 0.0, False, True, True),
        ("", 1.0, False, False, True),
        ("", 0.0, True, False, True),
        ("", 1.0, True, False, True),
        ("a norm inside", 0.0, False, False, True),
        ("the sum is read", 0.0, False, False, False),
        ("nothing is summed", 0.0, False, False, False),
    ],
)
def test_a_norm_goes_into_the_kernel_that_computes_it(
    change: str, offset: float, wide: bool, is_one_kernel: bool, is_divided: bool, swapped: bool
) -> None:
    """An offset, another rounding and a norm inside are not in the kernel of the sum; shares of tokens have them all,
    but for a norm of the residual."""

    def norm_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = x if change == "nothing is summed" else all_reduce(x)
        addends = (residual, summed) if swapped else (summed, residual)
        normed, _ = NORM(*addends, weight, 1e-5, offset, wide, weight if change == "a norm inside" else None)
        return (normed, summed) if change == "the sum is read" else (normed,)

    is_divided = is_divided and not (swapped and change == "a norm inside")
    for graph_pass, target, is_changed in (
        (AllReduceResidualRMSNorm(), SUMMED, is_one_kernel),
        (SequenceParallel(), DIVIDED, is_divided),
    ):
        module = graph_of(norm_of_sum, random_tensors(x=(5, 24), residual=(5, 24)), random_tensors(weight=(24,)))
        assert rewrite(graph_pass, module).matches == is_changed
        calls = [len(module.graph.find_nodes(op="call_function", target=each)) for each in (NORM, target)]
        assert calls == [1 - is_changed, int(is_changed)]


BREAKS: dict[str, tuple[str, Edit]] = {
    f"{broken}: {what}": (broken, edit)
    for broken, target in (("all_reduce_residual_rms_norm", SUMMED), ("sequence_parallel", DIVIDED))
    for what, edit in {
        "wrong eps": set_argument(target, "eps", lambda eps: 100 * eps),
        "the weight of another norm": take_from_next(target, "weight_D"),
        "no residual": copy_argument(target, "x_TD", "residual_TD"),
        "sum and norm swapped": swap_results(target),
    }.items()
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rewrite_is_caught(name: str) -> None:
    broken, edit = BREAKS[name]
    passes = tuple(Broken(p, edit) if p.name == broken else p for p in registered_passes())
    with pytest.raises(VerificationError, match=broken):
        run_on_a_rank(BIASED, 2, DYNAMIC, passes[: [p.name for p in passes].index(broken) + 1], verify=True)


def test_the_unbroken_ones_are_right() -> None:
    for family, num_layers in ((BIASED, 2), (GEMMA2, 4)):
        _, reports = run_on_a_rank(family, num_layers, DYNAMIC, verify=True)
        assert reports["sequence_parallel"].verified == 2 * 2 * num_layers - 1  # the last sum is not read


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(1, 3), (2, 1), (2, 6), (2, 7), (4, 5), (4, 9)])
def test_ranks_together_norm_what_one_does(num_ranks: int, num_tokens: int) -> None:
    """Two norms in a row: the second one's residual is what the first has left, of a rank's rows alone."""
    torch.manual_seed(num_tokens)
    parts_2RTD, residual_TD, weights_2D = (
        torch.randn(2, num_ranks, num_tokens, 8),
        torch.randn(num_tokens, 8),
        torch.randn(2, 8),
    )

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        found, residual = [], residual_TD
        with in_group(group):
            for parts_RTD, weight_D in zip(parts_2RTD, weights_2D, strict=True):
                normed, residual = sequence_parallel_norm(parts_RTD[group.rank], residual, weight_D, 1e-5, 0.5, True)
                found.append(normed)
        others = torch.ones(num_tokens, dtype=torch.bool)
        others[group.rows(num_tokens)] = False
        assert residual[others].isnan().all()
        return found

    expected, total = [], residual_TD
    for parts_RTD, weight_D in zip(parts_2RTD, weights_2D, strict=True):
        normed, total = residual_rms_norm.reference(parts_RTD.sum(0), total, weight_D, 1e-5, 0.5, True)
        expected.append(normed)
    for found in on_ranks(num_ranks, work):
        torch.testing.assert_close(found, expected)


def test_rows_of_ranks_are_all_rows() -> None:
    for size in (1, 2, 3, 8):
        for num_rows in range(20):
            owned: list[int] = []
            for rank in range(size):
                owned += range(num_rows)[rows_of(rank, size, num_rows)]
            assert owned == list(range(num_rows))


def test_it_is_off_unless_it_is_asked_for() -> None:
    options = EngineOptions(device="cpu", mode="compiled", tensor_parallel_size=2)
    given: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"passes": ("sequence_parallel", "rms_norm")}]
    enabled = ["sequence_parallel" in resolve(replace(options, **more)).compile.passes for more in given]
    assert enabled == [False, True, True]
