"""The pass quantise_experts: on whole models and their shares, with every pass behind it verified; and broken on
purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from graph_edits import Edit, aten, calls
from pass_cases import CPU, GPT_OSS, QWEN3_MOE, RANGES, SMALL, Family, graph_for
from pass_cases import traced as traced_alone
from test_quantise import online, stored
from test_tensor_parallel_pass import config_of, whole_of
from test_tensor_parallel_pass import traced as traced_once
from torch import fx

from compiled_engine.config import EngineConfig, ExpertsConfig, ParallelConfig
from compiled_engine.graphs.compiler.build import apply_passes, structure_passes
from compiled_engine.graphs.compiler.trace import TracedGraph
from compiled_engine.parallel.shards import Section
from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import change, emit, named
from compiled_engine.passes.framework.parameter import STEPS, made
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.passes.registry import passes_of_quantised
from compiled_engine.quantisation import Quantisation

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, TENSOR, BLOCK = "e4m3 1x*, inputs e4m3 1x*", "e4m3 *x*, inputs e4m3 1x*", "e4m3 128x128, inputs e4m3 1x128"
# Tiles that end inside the rows of a projection, and rows of a gate with those of its up.
SMALL_TILES = "e4m3 64x32, inputs e4m3 1x32"
# Four bits, in groups that end with no share, and in whole rows.
GROUPS, ZEROS, WHOLE_ROWS = "int4 1x128", "uint4 1x32", "int4 1x*"
INTEGERS = "int8 1x128"
# Kept with scales of groups, of 16 columns or fewer, and scales of rows.
NVFP4 = "e2m1 1x16"
# Each of two and of four ranks has a part of a block, as has the last one of all.
WIDTH = 320 + 64


def quantised(num_ranks: int, quantisation: Quantisation | None, width: int = WIDTH) -> EngineConfig:
    config = config_of(QWEN3_MOE, num_ranks, experts=ExpertsConfig(4, 2, width), quantisation=quantisation)
    passes = (*config.compile.passes, *sorted(passes_of_quantised()))
    config = replace(config, compile=replace(config.compile, passes=passes))
    return config if num_ranks > 1 else replace(config, parallel=ParallelConfig(1, "in_process"))


@cache
def traced(num_ranks: int, width: int = WIDTH) -> TracedGraph:
    return traced_once(quantised(num_ranks, None, width))


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("scheme", [ROWS, TENSOR, BLOCK, SMALL_TILES, GROUPS, ZEROS, WHOLE_ROWS, INTEGERS, NVFP4])
@pytest.mark.parametrize("make", [stored, online])
@pytest.mark.parametrize("compile_range", RANGES, ids=lambda each: each.name)
def test_every_pass_keeps_its_contract_and_its_verifier(
    compile_range: CompileRange, num_ranks: int, scheme: str, make: Callable[[str], Quantisation]
) -> None:
    if make is online:  # other formats are not made
        scheme = {TENSOR: ROWS, ZEROS: "int4 1x32", INTEGERS: GROUPS, NVFP4: GROUPS}.get(scheme, scheme)
    quantisation = make(scheme)
    graphs, whole = traced(num_ranks), whole_of(quantised(num_ranks, None))
    _, reports = apply_passes(quantised(num_ranks, quantisation), graphs, compile_range, whole)
    (report,) = (report for report in reports if report.name == "quantise_experts")
    assert report.matches == report.contract == report.verified == 2 * 2
    assert not any("stays" in note for note in report.notes)
    (experts,) = (report for report in reports if report.name == "experts")
    assert experts.matches == experts.contract == 2


@pytest.mark.parametrize(("num_ranks", "ends"), [(2, (64, 64)), (4, (32, 32))])
def test_tiles_end_with_the_share_of_a_rank(num_ranks: int, ends: tuple[int, int]) -> None:
    """Rows of a gate are 384 / ranks, as are columns of a down projection; all other rows and columns are whole."""
    graph = traced(num_ranks).for_range(SMALL).graph
    graph_pass = structure_passes(quantised(num_ranks, stored(BLOCK)), graph, SMALL, None)[-1]
    graph_pass.run(graph)
    rows, columns = ends
    found = [named(node)["scheme"] for node in calls(graph, experts_weight)]
    assert sorted(set(found)) == sorted({f"e4m3 {rows}x128", f"e4m3 64x{columns}"})


def test_a_share_without_tiles_that_kernels_take_stays_and_is_told() -> None:
    """A rank's 80 columns end with tiles of 16; rows of gates are divided as any."""
    graph = traced(4, 320).for_range(SMALL).graph
    graph_pass = structure_passes(quantised(4, stored(BLOCK), 320), graph, SMALL, None)[-1]
    contract, result = graph_pass.contract(graph, SMALL), graph_pass.run(graph)
    assert result.matches == contract == 2
    told = "stays in 16 bits: tiles of 16 columns are no power of two from 32 to 256"
    assert sum(note.endswith(f"down_proj: {told}") for note in result.notes) == 2


def matrices(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [n for n in calls(graph, experts_weight) if name in parameter_of(named(n)["codes_ENK"]).name]


def set_scheme(scheme: str, name: str = "gate_up_proj") -> Edit:
    return lambda graph: change(matrices(graph, name)[0], scheme=scheme)


def of_another(argument: str) -> Edit:
    """A matrix reads an argument of the next layer's."""

    def apply(graph: fx.Graph) -> None:
        first, second = matrices(graph, "gate_up_proj")
        change(first, **{argument: named(second)[argument]})

    return apply


def describe(argument: str, name: str = "gate_up_proj", **changes: object) -> Edit:
    """A parameter is described otherwise."""

    def apply(graph: fx.Graph) -> None:
        node = named(matrices(graph, name)[0])[argument]
        source = parameter_of(node)
        if "sections" in changes:
            assert source.shard is not None
            node.meta["source"] = replace(source, shard=replace(source.shard, **changes))
        else:
            node.meta["source"] = replace(source, **changes)

    return apply


def computed(argument: str, *call: object) -> Edit:
    """A matrix reads what this call makes of an argument, which comes before the call's others."""
    target, *others = call

    def apply(graph: fx.Graph) -> None:
        node = matrices(graph, "gate_up_proj")[0]
        with graph.inserting_before(node):
            change(node, **{argument: emit(graph, target, named(node)[argument], *others)})

    return apply


def read_by_another(graph: fx.Graph) -> None:
    """The products of two layers exchange their matrices."""
    first, second = matrices(graph, "gate_up_proj")
    (user,) = first.users
    user.replace_input_with(first, second)


def without_row_scales(graph: fx.Graph) -> None:
    change(matrices(graph, "down_proj")[0], row_scales_ER1=None)


@dataclass(frozen=True)
class Mutation:
    what: str
    scheme: str
    edit: Edit
    num_ranks: int = 1
    is_online: bool = False
    family: Family = QWEN3_MOE

    def __str__(self) -> str:
        return f"{self.what} of GPT-OSS" if self.family is GPT_OSS else self.what

    def started(self) -> tuple[fx.Graph, GraphPass]:
        """Return the graph and the pass."""
        config = quantised(self.num_ranks, (online if self.is_online else stored)(self.scheme))
        if self.family is QWEN3_MOE:
            graph = traced(self.num_ranks).for_range(SMALL).graph
        else:
            model, _ = traced_alone(self.family, torch.float32)
            config = replace(config, model=replace(model, quantisation=config.model.quantisation))
            graph = graph_for(self.family, torch.float32, SMALL)
        return graph, structure_passes(config, graph, SMALL, None)[-1]


# The code is that of transformers: matrices are stored by columns, and rows of gate and up alternate.
OF_GPT_OSS = (
    Mutation("scales of another layer", BLOCK, of_another("scales_ERC")),
    Mutation("scales of the neighbouring expert", ROWS, computed("scales_ERC", aten.roll.default, [1], [0])),
    Mutation("half the columns of a tile", SMALL_TILES, set_scheme("e4m3 64x16")),
    Mutation("zero points off by one", ZEROS, computed("zeros_ERC", aten.add.Tensor, 1)),
    Mutation("scales of rows left out", NVFP4, without_row_scales),
    Mutation("read by another product", ROWS, read_by_another),
    Mutation("codes by columns", ROWS, describe("codes_ENK", make=(("codes", "e4m3 1x*"),)), is_online=True),
    Mutation("scales by columns", ROWS, describe("scales_ERC", make=(("scales", "e4m3 1x*"),)), is_online=True),
)
MUTATIONS = (
    *(replace(each, family=GPT_OSS) for each in OF_GPT_OSS),
    Mutation("scales of another layer", ROWS, of_another("scales_ERC")),
    Mutation("codes of another layer", ROWS, of_another("codes_ENK")),
    Mutation("scales of the neighbouring expert", BLOCK, computed("scales_ERC", aten.roll.default, [1], [0])),
    Mutation("scales of the neighbouring tile", BLOCK, computed("scales_ERC", aten.roll.default, [1], [1])),
    Mutation("scales divided by", BLOCK, computed("scales_ERC", aten.reciprocal.default)),
    Mutation("half the rows of a tile", SMALL_TILES, set_scheme("e4m3 32x32")),
    Mutation("half the columns of a tile", SMALL_TILES, set_scheme("e4m3 64x16")),
    Mutation("twice the rows of a tile", SMALL_TILES, set_scheme("e4m3 128x32")),
    Mutation("a tile transposed", SMALL_TILES, set_scheme("e4m3 32x64")),
    Mutation("scales of rows taken for scales of tiles", ROWS, set_scheme("e4m3 128x128")),
    Mutation("scales of smaller tiles than are read", SMALL_TILES, describe("scales_ERC", scheme="e4m3 32x32")),
    Mutation("undivided scales", BLOCK, describe("scales_ERC", shard=None), 2),
    Mutation("scales of another rank", ROWS, describe("scales_ERC", sections=(Section(2 * WIDTH, 2),)), 2),
    Mutation("codes of another rank", ROWS, describe("codes_ENK", sections=(Section(WIDTH, 1), Section(0, 1))), 2),
    Mutation("gate and up divided together", ROWS, describe("codes_ENK", sections=(Section(2 * WIDTH, 2),)), 2),
    Mutation(
        "columns of another rank", BLOCK, describe("scales_ERC", "down_proj", sections=(Section(WIDTH // 128, 1),)), 2
    ),
    Mutation("zero points of another layer", ZEROS, of_another("zeros_ERC")),
    Mutation("zero points off by one", ZEROS, computed("zeros_ERC", aten.add.Tensor, 1)),
    Mutation("scales of the neighbouring group", ZEROS, computed("scales_ERC", aten.roll.default, [1], [2])),
    Mutation("no order of the codes", ZEROS, describe("codes_ENK", make=())),
    Mutation("an order of other units", ZEROS, describe("codes_ENK", make=(("halves", 16),))),
    Mutation("zero points taken for 8", ZEROS, set_scheme("int4 1x32")),
    Mutation("twice the columns of a group", ZEROS, set_scheme("uint4 1x64")),
    Mutation("scales of another width", ZEROS, describe("scales_ERC", scheme="uint4 1x16")),
    Mutation("scales of rows left out", NVFP4, without_row_scales),
    Mutation("scales of rows of another layer", NVFP4, of_another("row_scales_ER1")),
    Mutation("undivided scales of rows", NVFP4, describe("row_scales_ER1", shard=None), 2),
    Mutation("twice the columns of a group of NVFP4", NVFP4, set_scheme("nvfp4 1x32")),
    Mutation("codes in another scheme", BLOCK, describe("codes_ENK", make=(("codes", "e4m3 1x*"),)), is_online=True),
    Mutation("scales made of another weight", ROWS, of_another("scales_ERC"), is_online=True),
    Mutation("decoded to another dtype", ROWS, lambda graph: change(matrices(graph, "down")[0], dtype="float16")),
    Mutation("read by another product", ROWS, read_by_another),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_broken_matrix_is_caught(mutation: Mutation) -> None:
    graph, graph_pass = mutation.started()
    result: PassResult = graph_pass.run(graph)
    assert graph_pass.verify(graph, result, SMALL, torch.device("cpu")) == result.matches == 4
    mutation.edit(graph)
    with pytest.raises(VerificationError, match="quantise_experts"):
        graph_pass.verify(graph, result, SMALL, CPU)


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("codes_ENK", lambda codes: codes >> 4 | codes << 4),
        ("scales_ERC", lambda scales: scales.roll(1, 2)),
        ("row_scales_ER1", lambda scales: scales.roll(1, 0)),
        ("row_scales_ER1", lambda scales: scales.roll(WIDTH, 1)),
        ("row_scales_ER1", torch.reciprocal),
    ],
    ids=["nibbles", "neighbouring group", "neighbouring expert", "gate and up", "divided by"],
)
def test_wrong_values_of_nvfp4_are_caught(
    argument: str, changed: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that the loader would take exchanges nibbles or scales."""
    monkeypatch.setitem(STEPS, "changed", lambda tensor, _: changed(tensor))
    graph = traced(1).for_range(SMALL).graph
    graph_pass = structure_passes(quantised(1, stored(NVFP4)), graph, SMALL, None)[-1]
    result: PassResult = graph_pass.run(graph)
    node = named(matrices(graph, "gate_up_proj")[0])[argument]
    node.meta["source"] = made(parameter_of(node), "changed", 0, node.meta["val"])
    with pytest.raises(VerificationError, match="is off by"):
        graph_pass.verify(graph, result, SMALL, CPU)
