"""The pass quantise: on whole models and their shares, with every pass behind it verified; and broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from graph_edits import Edit, aten, calls
from pass_cases import BIASED, CPU, LLAMA, PHI3, QWEN3, QWEN3_MOE, RANGES, SMALL, Family
from test_tensor_parallel_pass import config_of, whole_of
from test_tensor_parallel_pass import traced as traced_once
from torch import fx

from compiled_engine.config import EngineConfig, ParallelConfig
from compiled_engine.graphs.compiler.build import apply_passes, structure_passes, trace_rank
from compiled_engine.graphs.compiler.signature import FORWARD, LOGITS, callables_of
from compiled_engine.graphs.compiler.trace import TracedGraph, without_storage
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import Section
from compiled_engine.passes.framework import rounding
from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.graph_pass import PassResult
from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.matching import change, emit, named
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.quantised_linear_op import quantised_gated_rounded, quantised_linear
from compiled_engine.passes.registry import passes_of_quantised
from compiled_engine.quantisation import ELEMENTS, LINEAR, LinearScheme, Quantisation, Rule

pytestmark = pytest.mark.usefixtures("one_thread")

IGNORE = ("lm_head", r"re:.*mlp\.gate$")
TOKEN, STATIC, ALONE = "e4m3 1x*, inputs e4m3 1x*", "e4m3 *x*, inputs e4m3 static", "e4m3 1x*"
BLOCK = "e4m3 16x32, inputs e4m3 1x32"
# Tiles that end neither with the layers' 64, 96 and 128 rows and columns, nor with the parts of two and four ranks.
ODD = "e4m3 24x40, inputs e4m3 1x40"
# Four bits, without and with zero points; groups that end inside the parts of ranks.
GROUPS, ZEROS, ODD_ZEROS = "int4 1x32", "uint4 1x32", "uint4 1x40"
REORDERED = "uint4 1x32, columns reordered"
# A byte a code, signed and with zero points.
SIGNED, BYTE_ZEROS = "int8 1x32", "uint8 1x40, columns reordered"
# Scales of another rank's groups.
HALF = (Section(4, 1),)
# 8-bit integers of weight and inputs.
FLOATS = "e2m1 1x16"
BYTES, STATIC_BYTES = "int8 1x*, inputs int8 1x*", "int8 *x*, inputs int8 static"


def stored(scheme: str, ignore: tuple[str, ...] = IGNORE) -> Quantisation:
    return Quantisation("compressed-tensors", (Rule((LINEAR,), scheme),), ignore)


def online(scheme: str) -> Quantisation:
    return replace(stored(scheme), method="online")


def quantised(family: Family, num_ranks: int, quantisation: Quantisation) -> EngineConfig:
    config = config_of(family, num_ranks, quantisation=quantisation)
    passes = (*config.compile.passes, *sorted(passes_of_quantised()))
    config = replace(config, compile=replace(config.compile, passes=passes))
    return config if num_ranks > 1 else replace(config, parallel=ParallelConfig(1, "in_process"))


@cache
def traced(family: Family, num_ranks: int) -> tuple[TracedGraph, TracedGraph | None]:
    """A rank's model and, of several ranks, the undivided one: rules change neither."""
    config = config_of(family, num_ranks)
    if num_ranks == 1:
        config = replace(config, parallel=ParallelConfig(1, "in_process"))
    return traced_once(config), whole_of(config)


CASES = [
    *((LLAMA, 1, stored(scheme)) for scheme in (TOKEN, STATIC, ALONE, BLOCK, ODD)),
    *((LLAMA, 2, stored(scheme)) for scheme in (TOKEN, STATIC, ODD)),
    (BIASED, 4, stored(ODD)),
    (QWEN3, 1, online(BLOCK)),
    (BIASED, 2, online(TOKEN)),
    (PHI3, 2, stored(BLOCK)),
    (QWEN3_MOE, 1, stored(BLOCK)),
    (LLAMA, 1, stored(GROUPS)),
    (BIASED, 2, stored(ZEROS)),
    (LLAMA, 4, stored(ODD_ZEROS)),
    (PHI3, 2, stored("uint4 1x*")),
    (QWEN3, 2, online(GROUPS)),
    (LLAMA, 1, stored(REORDERED)),
    (LLAMA, 2, stored(SIGNED)),
    (LLAMA, 1, stored(BYTE_ZEROS)),
    (LLAMA, 2, stored(BYTES)),
    (BIASED, 1, stored(STATIC_BYTES)),
    (LLAMA, 4, stored(FLOATS)),
]


@pytest.mark.product(one_in=12)
@pytest.mark.parametrize(("family", "num_ranks", "quantisation"), CASES, ids=lambda value: str(value)[:60])
def test_every_pass_keeps_its_contract_and_its_verifier(
    family: Family, num_ranks: int, quantisation: Quantisation
) -> None:
    config = quantised(family, num_ranks, quantisation)
    graphs, whole = traced(family, num_ranks)
    per_layer = 2 + 2 if family is PHI3 else 4 if family is QWEN3_MOE else 7
    for compile_range in RANGES:
        module, reports = apply_passes(config, graphs, compile_range, whole)
        first = next(report for report in reports if report.name == "quantise")
        assert first.matches == first.contract == first.verified == 2 * per_layer
        values = 2 * (2 if family is QWEN3_MOE else 4)
        products = len(calls(module.graph, quantised_linear)) + len(calls(module.graph, quantised_gated_rounded))
        assert products == values
        last = next(report for report in reports if report.name == "quantise_activations")
        rounds = not compile_range.small and "inputs" in quantisation.rules[0].scheme
        assert last.matches == last.contract == (values if rounds else 0)
        assert (last.verified > 0) == rounds


@pytest.mark.parametrize("ignore", [IGNORE, ()], ids=["plain", "quantised"])
def test_a_head_is_what_the_rules_say_in_every_callable(ignore: tuple[str, ...]) -> None:
    config = quantised(LLAMA, 1, stored(TOKEN, ignore))
    model = without_storage(build_model(local_model(config)), config.device)
    for name, expected in ((FORWARD, 2 * 7), (LOGITS, 0)):
        graphs = trace_rank(config, model, callables_of(config)[name])
        compile_range = SMALL if name == FORWARD else graphs.signature.ranges[-1]
        module, (report, *_) = apply_passes(config, graphs, compile_range)
        assert report.name == "quantise"
        assert report.matches == report.contract == report.verified == expected + (not ignore)
        assert bool(calls(module.graph, aten.mm.default)) == bool(ignore)


def test_a_layer_that_stays_is_told_and_its_like_merge_among_themselves() -> None:
    config = quantised(LLAMA, 1, stored(TOKEN, ("model.layers.0.self_attn.k_proj", *IGNORE)))
    config = replace(config, compile=replace(config.compile, strict=False))
    _, reports = apply_passes(config, traced(LLAMA, 1)[0], SMALL)
    by_name = {report.name: report for report in reports}
    assert by_name["quantise"].matches == 13
    assert any(note.startswith("model.layers.0.self_attn.k_proj: stays") for note in by_name["quantise"].notes)
    assert any("their schemes differ" in reason for reason in by_name["merge_linears"].near_misses)


def test_reordered_columns_that_ranks_divide_are_decoded() -> None:
    """Their groups are spread over all ranks; the other linears stay quantised."""
    graphs, whole = traced(BIASED, 2)
    _, reports = apply_passes(quantised(BIASED, 2, stored(REORDERED)), graphs, SMALL, whole)
    report = next(report for report in reports if report.name == "quantise")
    assert report.matches == report.contract == report.verified == 2 * 5
    stay = [note.split(":")[0] for note in report.notes if "divided among ranks, and reordered" in note]
    assert stay == [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]


def test_a_linear_that_is_not_found_is_an_error() -> None:
    config = quantised(LLAMA, 1, stored(TOKEN))
    graph = traced(LLAMA, 1)[0].for_range(SMALL).graph
    (graph_pass,) = structure_passes(config, graph, SMALL, None)
    scaled = calls(graph, aten.mm.default)[0]
    with graph.inserting_after(scaled):
        new = emit(
            graph, aten.linear.default, *scaled.all_input_nodes[:1], scaled.all_input_nodes[1].all_input_nodes[0]
        )
    scaled.replace_all_uses_with(new)
    graph.erase_node(scaled)
    with pytest.raises(ContractError, match=r"pass quantise matched 13 times .* its contract is 14"):
        run_passes(graph, (graph_pass,), ("quantise",), SMALL, CPU)


def set_scheme(edit: Callable[[LinearScheme], LinearScheme]) -> Edit:
    """Of the first linear, as its op computes; parameters stay as they are."""

    def apply(graph: fx.Graph) -> None:
        node = calls(graph, quantised_linear)[0]
        change(node, scheme=str(edit(LinearScheme.parse(named(node)["scheme"]))))

    return apply


def set_tile(rows: int, columns: int) -> Edit:
    return set_scheme(lambda scheme: scheme._replace(weight=scheme.weight._replace(rows=rows, columns=columns)))


def set_element(element: str) -> Edit:
    return set_scheme(lambda scheme: scheme._replace(weight=scheme.weight._replace(element=element)))


def set_inputs(columns: int) -> Edit:
    return set_scheme(
        lambda s: s._replace(inputs=s.inputs and s.inputs._replace(columns=columns, rows=1, static=False))
    )


def of_another(argument: str) -> Edit:
    """The first linear reads an argument of the next one whose weight is of the same shape."""

    def apply(graph: fx.Graph) -> None:
        first, *others = calls(graph, quantised_linear)
        shape = named(first)["codes_NK"].meta["val"].shape
        other = next(n for n in others if named(n)["codes_NK"].meta["val"].shape == shape)
        change(first, **{argument: named(other)[argument]})

    return apply


def describe(argument: str, which: int = 0, **changes: object) -> Edit:
    """A parameter is described otherwise."""

    def apply(graph: fx.Graph) -> None:
        node = named(calls(graph, quantised_linear)[which])[argument]
        source = parameter_of(node)
        sections = changes.get("sections")
        if sections is not None and source.shard is not None:
            node.meta["source"] = replace(source, shard=replace(source.shard, sections=sections))
        else:
            node.meta["source"] = replace(source, **changes)

    return apply


def inverted(graph: fx.Graph) -> None:
    node = calls(graph, quantised_linear)[0]
    scales = named(node)["scales_RC"]
    with graph.inserting_before(node):
        change(node, scales_RC=emit(graph, aten.reciprocal.default, scales))


def none(argument: str) -> Edit:
    return lambda graph: change(calls(graph, quantised_linear)[0], **{argument: None})


def other_input(graph: fx.Graph) -> None:
    first = calls(graph, quantised_linear)[0]
    change(first, x_TK=next(n for n in graph.nodes if n.op == "call_function" and n.meta["val"].dim() == 2))


def shifted(argument: str, by: int = 1) -> Edit:
    """The first linear reads each value of an argument plus a number."""

    def apply(graph: fx.Graph) -> None:
        node = calls(graph, quantised_linear)[0]
        with graph.inserting_before(node):
            change(node, **{argument: emit(graph, aten.add.Tensor, named(node)[argument], by)})

    return apply


def of_neighbours(argument: str) -> Edit:
    """The first linear reads the scales or zero points of the next group of columns."""

    def apply(graph: fx.Graph) -> None:
        node = calls(graph, quantised_linear)[0]
        with graph.inserting_before(node):
            change(node, **{argument: emit(graph, aten.roll.default, named(node)[argument], [1], [1])})

    return apply


# The second linear of attention, whose input two ranks divide.
O_PROJ = 3


@dataclass(frozen=True)
class Mutation:
    what: str
    scheme: str
    edit: Edit
    num_ranks: int = 1
    is_online: bool = False
    family: Family = LLAMA

    def __str__(self) -> str:
        return self.what


MUTATIONS = (
    Mutation("scales of another linear", TOKEN, of_another("scales_RC")),
    Mutation("codes of another linear", TOKEN, of_another("codes_NK")),
    Mutation("half the rows of a tile", BLOCK, set_tile(8, 32)),
    Mutation("half the columns of a tile", BLOCK, set_tile(16, 16)),
    Mutation("twice the rows of a tile", BLOCK, set_tile(32, 32)),
    Mutation("a tile transposed", BLOCK, set_tile(32, 16)),
    Mutation("scales of smaller tiles than are read", BLOCK, describe("scales_RC", scheme="e4m3 16x16")),
    Mutation("scales divided into twice as many rows", BLOCK, describe("scales_RC", scheme="e4m3 8x32")),
    Mutation("undivided scales", TOKEN, describe("scales_RC", shard=None), 2),
    Mutation("scales of another rank", TOKEN, describe("scales_RC", sections=(Section(64, 1),)), 2),
    Mutation("columns of another rank", BLOCK, describe("scales_RC", O_PROJ, sections=(Section(2, 1),)), 2),
    Mutation("codes of another rank", TOKEN, describe("codes_NK", sections=(Section(64, 1),)), 2),
    Mutation("scales divided by", BLOCK, inverted),
    Mutation("no scale of the inputs", STATIC, none("input_scale_1")),
    Mutation("the scale of another linear's inputs", STATIC, of_another("input_scale_1")),
    Mutation("inputs that are not rounded", TOKEN, set_scheme(lambda scheme: scheme._replace(inputs=None))),
    Mutation("inputs rounded row by row", BLOCK, set_inputs(0)),
    Mutation("inputs rounded in smaller groups", BLOCK, set_inputs(16)),
    Mutation("inputs rounded in groups", TOKEN, set_inputs(32)),
    Mutation("no bias", TOKEN, none("bias_N"), family=BIASED),
    Mutation("another input", TOKEN, other_input),
    Mutation("codes in another scheme", BLOCK, describe("codes_NK", make=(("codes", TOKEN),)), is_online=True),
    Mutation("scales made of another weight", TOKEN, of_another("scales_RC"), is_online=True),
    Mutation("scales of the next group", GROUPS, of_neighbours("scales_RC")),
    Mutation("half a group", GROUPS, set_tile(1, 16)),
    Mutation("zero points of the next group", ZEROS, of_neighbours("zeros_RC")),
    Mutation("zero points off by one", ZEROS, shifted("zeros_RC")),
    Mutation("no zero points", ZEROS, set_element("int4")),
    Mutation("four bits of e2m1, scales of the next group", FLOATS, of_neighbours("scales_RC")),
    Mutation("four bits of e2m1, groups of another rank", FLOATS, describe("scales_RC", O_PROJ, sections=HALF), 2),
    Mutation("8 bits, groups of another rank", SIGNED, describe("scales_RC", O_PROJ, sections=(Section(2, 1),)), 2),
    Mutation("8 bits, half a group", SIGNED, set_tile(1, 16)),
    Mutation("8 bits, scales divided by", SIGNED, inverted),
    Mutation("integers, the scale of another linear's inputs", STATIC_BYTES, of_another("input_scale_1")),
    Mutation("four bits of e2m1, half a group", FLOATS, set_tile(1, 8)),
    Mutation("four bits of e2m1, scales divided by", FLOATS, inverted),
    Mutation("four bits of e2m1 read as integers", FLOATS, set_element("int4")),
    Mutation("integers, no scale of the inputs", STATIC_BYTES, none("input_scale_1")),
    Mutation("integers, inputs that are not rounded", BYTES, set_scheme(lambda scheme: scheme._replace(inputs=None))),
    Mutation("integers, scales of another linear", BYTES, of_another("scales_RC")),
    Mutation("8 bits, scales of the next group", SIGNED, of_neighbours("scales_RC")),
    Mutation("8 bits, zero points off by one", BYTE_ZEROS, shifted("zeros_RC")),
    Mutation("8 bits, columns in the weight's order", BYTE_ZEROS, none("columns_1K")),
    Mutation("zero points of another linear", ZEROS, of_another("zeros_RC")),
    Mutation("zero points of another rank", ZEROS, describe("zeros_RC", sections=(Section(64, 1),)), 2),
    Mutation("packed columns of another rank", ZEROS, describe("codes_NK", O_PROJ, sections=(Section(32, 1),)), 2),
    Mutation("columns in the weight's order", REORDERED, none("columns_1K")),
    Mutation("columns of another linear", REORDERED, of_another("columns_1K")),
    Mutation("columns off by one", REORDERED, of_neighbours("columns_1K")),
    Mutation(
        "integers made with larger groups", GROUPS, describe("scales_RC", make=(("scales", "int4 1x64"),)), 1, True
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_broken_linear_is_caught(mutation: Mutation) -> None:
    make = online if mutation.is_online else stored
    config = quantised(mutation.family, mutation.num_ranks, make(mutation.scheme))
    graph = traced(mutation.family, mutation.num_ranks)[0].for_range(SMALL).graph
    graph_pass = structure_passes(config, graph, SMALL, None)[-1]
    result: PassResult = graph_pass.run(graph)
    assert graph_pass.verify(graph, result, SMALL, torch.device("cpu")) == result.matches > 0
    mutation.edit(graph)
    with pytest.raises(VerificationError, match="quantise"):
        graph_pass.verify(graph, result, SMALL, torch.device("cpu"))


@pytest.mark.parametrize("code", [1, 7, 8, 15])
def test_a_wrong_value_of_a_code_is_caught(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier has no table of the values."""
    config = quantised(LLAMA, 1, stored(FLOATS))
    graph = traced(LLAMA, 1)[0].for_range(SMALL).graph
    graph_pass = structure_passes(config, graph, SMALL, None)[-1]
    result: PassResult = graph_pass.run(graph)
    assert graph_pass.verify(graph, result, SMALL, torch.device("cpu")) == result.matches > 0
    e2m1 = ELEMENTS["e2m1"]
    values = tuple(value + (0.5 if place == code else 0.0) for place, value in enumerate(e2m1.values))
    monkeypatch.setitem(ELEMENTS, "e2m1", e2m1._replace(values=values))
    with pytest.raises(VerificationError, match="quantise"):
        graph_pass.verify(graph, result, SMALL, torch.device("cpu"))


@pytest.mark.parametrize(("make", "scheme"), [(stored, GROUPS), (online, GROUPS), (stored, FLOATS)])
def test_swapped_halves_of_bytes_are_caught(
    make: Callable[[str], Quantisation], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier finds each code by its column, without the engine's own unpacking."""
    config = quantised(LLAMA, 1, make(scheme))
    graph = traced(LLAMA, 1)[0].for_range(SMALL).graph
    graph_pass = structure_passes(config, graph, SMALL, None)[-1]
    result: PassResult = graph_pass.run(graph)
    unpack = rounding.unpack
    monkeypatch.setattr(rounding, "unpack", lambda codes, own: unpack(codes << 4 | codes >> 4, own))
    with pytest.raises(VerificationError, match="quantise"):
        graph_pass.verify(graph, result, SMALL, torch.device("cpu"))
