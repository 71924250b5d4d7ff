"""The pass quantise_activations: where inputs are rounded, that linears share codes, and that breaks are caught."""

from __future__ import annotations

from collections import Counter

import pytest
from graph_edits import Edit, calls, ours, set_argument, take_from_next
from pass_cases import CPU, DYNAMIC, GEMMA2, LLAMA, SMALL, Family
from test_quantise import BLOCK, STATIC, TOKEN, quantised, stored, traced
from torch import fx

from compiled_engine.graphs.compiler.build import fusion_passes, structure_passes
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup, in_group
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.matching import change, named
from compiled_engine.passes.framework.verifier import VerificationError, copy_of, verify_rewrites
from compiled_engine.passes.linear.quantised_linear_op import quantised_gated_rounded, quantised_linear
from compiled_engine.passes.linear.round_inputs import residual_rms_norm_rounded, round_inputs
from compiled_engine.passes.parallel.all_reduce_residual_rms_norm import AllReduceResidualRMSNorm
from compiled_engine.passes.quantised.quantise_activations import QuantiseActivations
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = QuantiseActivations.name
OF_RANKS = ours.all_reduce_residual_rms_norm_rounded.default


def rewritten(
    family: Family,
    scheme: str,
    *,
    num_ranks: int = 1,
    without: tuple[str, ...] = (),
    compile_range: CompileRange = DYNAMIC,
    ignore: tuple[str, ...] = ("lm_head",),
) -> tuple[fx.Graph, dict[str, PassReport], QuantiseActivations]:
    """The graph of a range after all passes but `without`, with their reports, and the pass, bound to the rules."""
    config = quantised(family, num_ranks, stored(scheme, ignore))
    traced_graph = traced(family, num_ranks)[0]
    graph = traced_graph.for_range(compile_range).graph
    structure = structure_passes(config, graph, compile_range, None)
    others, enabled = fusion_passes(config, traced_graph.signature)
    of_ranks = (AllReduceResidualRMSNorm.name,) if num_ranks > 1 else ()
    names = (*(each.name for each in structure), *(name for name in (*enabled, *of_ranks) if name not in without))
    with in_group(FakeGroup(num_ranks)):
        reports = run_passes(graph, (*structure, *others), names, compile_range, CPU)
    bound = next(each for each in others if isinstance(each, QuantiseActivations))
    return graph, {report.name: report for report in reports}, bound


def places(report: PassReport) -> Counter[str]:
    """How many values are rounded in each place."""
    return Counter(note.split(", ")[1] for note in report.notes)


IN_SUM, IN_NORM, GATED, ALONE = "in the norm of a sum", "in the norm", "by the linear of gate and up", "alone"


@pytest.mark.parametrize("scheme", [TOKEN, STATIC, BLOCK])
@pytest.mark.parametrize("family", [LLAMA, GEMMA2], ids=str)
def test_inputs_are_rounded_where_they_are_computed(family: Family, scheme: str) -> None:
    graph, reports, _ = rewritten(family, scheme)
    assert reports[NAME].matches == reports[NAME].contract == 8
    # The first norm has no sum before it, and what attention gives is rounded by a kernel of its own.
    assert places(reports[NAME]) == {IN_NORM: 1, IN_SUM: 3, GATED: 2, ALONE: 2}
    counts = {op: len(calls(graph, op)) for op in (quantised_linear, quantised_gated_rounded, round_inputs)}
    assert counts == {quantised_linear: 6, quantised_gated_rounded: 2, round_inputs: 3}
    assert len(calls(graph, residual_rms_norm_rounded)) == 3
    # The last norm, of what is returned, stays.
    assert len(calls(graph, ours.residual_rms_norm.default)) == 1
    assert all(named(node)["input_scales_CT"] is not None for node in calls(graph, quantised_linear))


def test_linears_of_one_input_share_its_codes() -> None:
    graph, reports, _ = rewritten(LLAMA, TOKEN, without=("merge_linears", "silu_mul", "gated_linear"))
    assert reports[NAME].matches == reports[NAME].contract == 8
    assert places(reports[NAME]) == {IN_NORM: 1, IN_SUM: 3, ALONE: 4}
    linears = calls(graph, quantised_linear)
    assert len(linears) == 14
    assert len({named(node)["x_TK"] for node in linears}) == 8


def test_an_activation_without_its_linear_is_rounded_by_its_kernel() -> None:
    _, reports, _ = rewritten(LLAMA, TOKEN, without=("gated_linear",))
    assert places(reports[NAME]) == {IN_NORM: 1, IN_SUM: 3, "in silu * up": 2, ALONE: 2}


def test_a_norm_with_another_reader_stays() -> None:
    """k is not quantised: its linear reads the norm."""
    ignore = ("lm_head", "re:.*k_proj")
    graph, reports, _ = rewritten(LLAMA, TOKEN, ignore=ignore)
    notes = [note for note in reports[NAME].notes if "others read the value" in note]
    assert len(notes) == 2
    assert reports[NAME].matches == reports[NAME].contract == 8
    assert len(calls(graph, ours.residual_rms_norm.default)) == 2


def test_two_ranks_round_in_the_norm_of_their_sum() -> None:
    graph, reports, _ = rewritten(LLAMA, TOKEN, num_ranks=2)
    assert len(calls(graph, OF_RANKS)) == 3
    assert reports[NAME].matches == reports[NAME].contract == 8


def test_small_ranges_and_models_without_codes_stay() -> None:
    _, reports, _ = rewritten(LLAMA, TOKEN, compile_range=SMALL)
    assert reports[NAME].reason == "1-8 tokens is a small-batch range"
    assert NAME not in resolve(EngineOptions(device="cpu", mode="compiled")).compile.passes
    with pytest.raises(ValueError, match="passes has 'quantise_activations', but no linear is quantised"):
        resolve(EngineOptions(device="cpu", mode="compiled", passes=(NAME,)))


def of_an_earlier(argument: str) -> Edit:
    """The last linear reads an argument of an earlier one of its size."""

    def edit(graph: fx.Graph) -> None:
        *others, last = calls(graph, quantised_linear)
        shape = named(last)[argument].meta["val"].shape
        earlier = next(node for node in others if named(node)[argument].meta["val"].shape[1:] == shape[1:])
        change(last, **{argument: named(earlier)[argument]})

    return edit


BREAKS: dict[str, tuple[str, Family, Edit]] = {
    "another eps of a sum": (TOKEN, LLAMA, set_argument(residual_rms_norm_rounded, "eps", lambda eps: 0.1)),
    "another eps": (TOKEN, LLAMA, set_argument(round_inputs, "eps", lambda eps: 0.1)),
    "another norm's weight": (TOKEN, LLAMA, take_from_next(residual_rms_norm_rounded, "weight_D")),
    "no offset": (TOKEN, GEMMA2, set_argument(residual_rms_norm_rounded, "offset", lambda offset: 0.0)),
    "no norm inside": (TOKEN, GEMMA2, set_argument(residual_rms_norm_rounded, "inner_weight_D", lambda node: None)),
    "silu for gelu": (TOKEN, GEMMA2, set_argument(quantised_gated_rounded, "activation", lambda name: "silu")),
    "weights of another linear": (TOKEN, LLAMA, take_from_next(quantised_gated_rounded, "codes_NK")),
    "scales of another linear": (TOKEN, LLAMA, take_from_next(quantised_gated_rounded, "scales_RC")),
    "no static scale": (STATIC, LLAMA, set_argument(round_inputs, "static_1", lambda node: None)),
    "scales of other inputs": (TOKEN, LLAMA, of_an_earlier("input_scales_CT")),
    "codes of other inputs": (TOKEN, LLAMA, of_an_earlier("x_TK")),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_caught(what: str) -> None:
    scheme, family, edit = BREAKS[what]
    graph, _, graph_pass = rewritten(family, scheme, without=(NAME,))
    before = copy_of(graph)
    result = graph_pass.run(graph)
    assert verify_rewrites(NAME, before, graph, result, DYNAMIC, CPU) >= 8
    edit(graph)
    graph.eliminate_dead_code()
    with pytest.raises(VerificationError, match=NAME):
        verify_rewrites(NAME, before, graph, result, DYNAMIC, CPU)
