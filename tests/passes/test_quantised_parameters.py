"""What quantise and quantise_experts put in a weight's place: parameters, their tiles and parts, and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, DYNAMIC, SMALL, count, graph_of, random_tensors
from test_quantise import online, stored
from torch import fx

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.matching import aten, named
from compiled_engine.passes.framework.parameter import CODES, INPUT_SCALE, SCALES, WEIGHT, ZEROS, Parameter
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.quantised.quantise import Quantise, is_looked_up, scheme_of
from compiled_engine.passes.quantised.quantise_experts import QuantiseExperts
from compiled_engine.quantisation import LINEAR, Quantisation, Rule

E4M3 = "float8_e4m3fn"
Q, K, TABLE = "layer.q.weight", "layer.k.weight", "embed.weight"


def graph(shards: dict[str, Shard] | None = None, bias: bool = False) -> fx.Graph:
    """q and k of an embedding, which is the head as well."""

    def function(ids: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.nn.functional.embedding(ids, w[TABLE])
        linear = torch.nn.functional.linear
        return linear(x, w[Q], w.get("layer.q.bias")), linear(x, w[K]), linear(x, w[TABLE])

    weights = random_tensors(**{TABLE: (16, 48), Q: (24, 48), K: (8, 48)})
    weights |= random_tensors(**{"layer.q.bias": (24,)}) if bias else {}
    found = graph_of(function, {"ids": torch.arange(4)}, weights).graph
    for node in filter(is_parameter, found.nodes):
        source = parameter_of(node)
        node.meta["source"] = replace(source, shard=(shards or {}).get(source.name))
    return found


def parameters(graph: fx.Graph) -> dict[str, Parameter]:
    return {parameter_of(node).name: parameter_of(node) for node in filter(is_parameter, graph.nodes)}


IGNORE = ("re:embed",)


@pytest.mark.parametrize("bias", [False, True])
def test_codes_and_scales_take_the_place_of_a_weight_of_a_checkpoint(bias: bool) -> None:
    scheme = "e4m3 4x16, inputs e4m3 static"
    given = graph(bias=bias)
    graph_pass = Quantise(stored(scheme, IGNORE))
    assert graph_pass.contract(given, DYNAMIC) == 2
    result = graph_pass.run(given)
    assert (result.matches, len(result.replacements), result.near_misses) == (2, 2, ())
    found = parameters(given)
    for name, rows in ((Q, 24), (K, 8)):
        assert name not in found
        assert found[f"{name}.codes"] == Parameter(f"{name}.codes", (rows, 48), E4M3, CODES, scheme=scheme)
        grid = (rows // 4, 3)
        assert found[f"{name}.scales"] == Parameter(f"{name}.scales", grid, "float32", SCALES, scheme=scheme)
        own = f"{name}.input_scale"
        assert found[own] == Parameter(own, (1,), "float32", INPUT_SCALE, scheme=scheme)
    assert TABLE in found
    for call, name in zip(given.find_nodes(op="call_function", target=quantised_linear), (Q, K), strict=True):
        arguments = named(call)
        read = {key: parameter_of(arguments[key]).name for key in ("codes_NK", "scales_RC", "input_scale_1")}
        assert read == {
            "codes_NK": f"{name}.codes",
            "scales_RC": f"{name}.scales",
            "input_scale_1": f"{name}.input_scale",
        }
        assert (arguments["scheme"], arguments["zeros_RC"]) == (scheme, None)
        assert (arguments["bias_N"] is not None) == (bias and name == Q)
        assert arguments["x_TK"].target is aten.embedding.default
        for key in read:
            assert arguments[key].meta["val"].shape == parameter_of(arguments[key]).shape
            assert arguments[key].meta["val"].dtype == parameter_of(arguments[key]).torch_dtype
    nbytes = 24 * 48 + 4 * 6 * 3
    assert result.notes[0] == f"layer.q: {scheme}; compressed-tensors; {nbytes:,} bytes; plain torch"
    assert result.notes[2] == "embed: stays float32: re:embed is to be ignored"


def test_codes_are_made_of_a_weight_that_is_quantised_while_it_is_loaded() -> None:
    given = graph({Q: Shard((48, 48), 0, (Section(48, 2),))})
    before = parameters(given)[Q]
    result = Quantise(online("e4m3 1x*, inputs e4m3 1x*"), num_ranks=2).run(given)
    scheme = "e4m3 1x*, inputs e4m3 1x*"
    found = parameters(given)
    for role, shape, dtype in ((CODES, (24, 48), E4M3), (SCALES, (24, 1), "float32")):
        name = f"{Q}.{role}"
        assert found[name] == Parameter(name, shape, dtype, WEIGHT, (before,), ((role, scheme),))
    assert f"{Q}.input_scale" not in found
    assert "; made while it is loaded; " in result.notes[0]


def test_parts_of_ranks_have_tiles_that_end_with_them() -> None:
    """Rows of q are divided in two sections, columns of k in two parts."""
    of_q = Shard((48, 48), 0, (Section(24, 2), Section(24, 2)))
    of_k = Shard((8, 96), 1, (Section(96, 2),))
    given = graph({Q: of_q, K: of_k})
    Quantise(stored("e4m3 8x32, inputs e4m3 1x32", IGNORE), num_ranks=2).run(given)
    found = parameters(given)
    # 12 rows of a section end after tiles of 4; columns of a part of k after tiles of 16.
    assert found[f"{Q}.codes"].scheme == "e4m3 4x32, inputs e4m3 1x32"
    assert found[f"{Q}.codes"].shard == of_q
    assert found[f"{Q}.scales"].shape == (6, 2)
    assert found[f"{Q}.scales"].shard == Shard((12, 2), 0, (Section(6, 2), Section(6, 2)))
    assert found[f"{K}.codes"].scheme == "e4m3 8x16, inputs e4m3 1x16"
    assert found[f"{K}.codes"].shard == of_k
    assert found[f"{K}.scales"].shape == (1, 3)
    assert found[f"{K}.scales"].shard == Shard((1, 6), 1, (Section(6, 2),))


def test_rules_name_matrices_of_parameters() -> None:
    given = graph(bias=True)
    nodes = {parameter_of(node).name: node for node in filter(is_parameter, given.nodes)}
    every = stored("e4m3 1x*", ())
    assert {name for name, node in nodes.items() if scheme_of(every, node) is not None} == {TABLE, Q, K}
    assert {name for name, node in nodes.items() if scheme_of(stored("e4m3 1x*", IGNORE), node) is not None} == {Q, K}
    assert [name for name, node in nodes.items() if is_looked_up(node)] == [TABLE]
    assert scheme_of(every, given.output_node()) is None
    nodes[Q].meta["source"] = replace(parameter_of(nodes[Q]), name="layer.q.matrix")
    assert scheme_of(every, nodes[Q]) is None
    # An embedding is looked up, so its contract is not that of a linear, though a head reads it too.
    assert Quantise(every).contract(graph(), DYNAMIC) == 2
    assert Quantise(Quantisation("fp8", (Rule(("layer.q",), "e4m3 1x*"),), ())).contract(graph(), SMALL) == 1
    notes = Quantise(Quantisation("fp8", (Rule(("layer.q",), "e4m3 1x*"),), ())).run(graph()).notes
    assert "layer.k: stays float32: no rule names it" in notes


EXPERTS = "model.layers.0.mlp.experts"


def experts(shards: dict[str, Shard] | None = None, others: tuple[str, ...] = ()) -> fx.Graph:
    """Two experts of 64 columns, with 48 rows of gate and of up."""
    names = (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", *others)
    weights = random_tensors(**dict(zip(names, ((2, 96, 64), (2, 64, 48)), strict=False)))
    weights |= random_tensors(**dict.fromkeys(others, (2, 96, 64)))

    def function(x: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = torch.bmm(x.expand(2, -1, -1), w[names[0]].transpose(1, 2)).chunk(2, -1)
        others_sum = [torch.bmm(x.expand(2, -1, -1), w[name].transpose(1, 2)).sum() for name in others]
        return torch.bmm(gate * up, w[names[1]].transpose(1, 2)), *others_sum

    found = graph_of(function, random_tensors(x=(4, 64)), weights).graph
    for node in filter(is_parameter, found.nodes):
        source = parameter_of(node)
        node.meta["source"] = replace(source, shard=(shards or {}).get(source.name))
    return found


def rules(*targets: tuple[str, str], ignore: tuple[str, ...] = (), method: str = "fp8") -> Quantisation:
    return Quantisation(method, tuple(Rule((target,), scheme) for target, scheme in targets), ignore)


BLOCKS = "e4m3 32x32, inputs e4m3 1x32"


def test_matrices_of_experts_become_codes_and_scales() -> None:
    given = experts()
    graph_pass = QuantiseExperts(rules((LINEAR, BLOCKS)), CPU)
    assert graph_pass.contract(given, SMALL) == 2
    result = graph_pass.run(given)
    assert (result.matches, len(result.replacements)) == (2, 2)
    found = parameters(given)
    # 48 rows of a gate end after tiles of 16; inputs are not rounded.
    for name, shape, scheme, grid, nbytes in (
        (f"{EXPERTS}.gate_up_proj", (2, 96, 64), "e4m3 16x32", (2, 6, 2), "12,384"),
        (f"{EXPERTS}.down_proj", (2, 64, 48), "e4m3 32x32", (2, 2, 2), "6,176"),
    ):
        assert name not in found
        assert found[f"{name}.codes"] == Parameter(f"{name}.codes", shape, E4M3, CODES, scheme=scheme)
        assert found[f"{name}.scales"] == Parameter(f"{name}.scales", grid, "float32", SCALES, scheme=scheme)
        assert f"{name}: {scheme}, inputs stay float32; fp8; {nbytes} bytes" in result.notes
    for call in given.find_nodes(op="call_function", target=experts_weight):
        arguments = named(call)
        assert arguments["dtype"] == "float32"
        assert arguments["scheme"] == parameter_of(arguments["codes_ENK"]).scheme
        assert call.meta["val"].shape == parameter_of(arguments["codes_ENK"]).shape
    given.lint()


def test_codes_of_four_bits_are_put_in_order() -> None:
    """In units of columns that end with tiles and with rows; each tile has a zero point."""
    given = experts()
    result = QuantiseExperts(rules((LINEAR, "uint4 1x32")), CPU).run(given)
    assert result.matches == 2
    found = parameters(given)
    for name, in_bytes, unit, grid in (
        (f"{EXPERTS}.gate_up_proj", (2, 96, 32), 32, (2, 96, 2)),
        (f"{EXPERTS}.down_proj", (2, 64, 24), 16, (2, 64, 2)),
    ):
        codes = Parameter(f"{name}.codes", in_bytes, "uint8", CODES, scheme="uint4 1x32")
        in_order = replace(codes, name=f"{codes.name}.halves({unit})", members=(codes,), make=(("halves", unit),))
        assert found[in_order.name] == in_order
        assert found[f"{name}.scales"] == Parameter(f"{name}.scales", grid, "float32", SCALES, scheme="uint4 1x32")
        assert found[f"{name}.zeros"] == Parameter(f"{name}.zeros", grid, "uint8", ZEROS, scheme="uint4 1x32")
    for call in given.find_nodes(op="call_function", target=experts_weight):
        assert call.meta["val"].shape in ((2, 96, 64), (2, 64, 48))
    given.lint()


def test_matrices_stored_by_columns_have_codes_by_rows() -> None:
    """A rank's 48 of 96 columns are no whole groups of 32, so groups are halved."""
    name = f"{EXPERTS}.down_proj"
    given = graph_of(
        lambda x, **w: (torch.bmm(x, w[name]),), random_tensors(x=(2, 4, 48)), random_tensors(**{name: (2, 48, 64)})
    ).graph
    (node,) = filter(is_parameter, given.nodes)
    node.meta["source"] = replace(parameter_of(node), shard=Shard((2, 96, 64), 1, (Section(96, 2),)))
    result = QuantiseExperts(rules((LINEAR, "mxfp4 1x32")), CPU, 2).run(given)
    assert result.matches == 1
    found = parameters(given)
    (codes,) = found[f"{name}.codes.halves(16)"].members
    assert (codes.shape, codes.scheme) == ((2, 64, 24), "mxfp4 1x16")
    assert codes.shard == Shard((2, 64, 48), 2, (Section(48, 2),))
    scales = found[f"{name}.scales"]
    assert (scales.shape, scales.dtype) == ((2, 64, 3), "uint8")
    assert scales.shard == Shard((2, 64, 6), 2, (Section(6, 2),))
    (call,) = given.find_nodes(op="call_function", target=experts_weight)
    (transposed,) = call.users
    assert transposed.meta["val"].shape == (2, 48, 64)
    given.lint()


def test_matrices_of_experts_that_are_quantised_while_they_are_loaded() -> None:
    given = experts()
    before = parameters(given)[f"{EXPERTS}.down_proj"]
    result = QuantiseExperts(rules((LINEAR, "e4m3 1x*, inputs e4m3 1x*"), method="online"), CPU).run(given)
    for role, shape, dtype in ((CODES, (2, 64, 48), E4M3), (SCALES, (2, 64, 1), "float32")):
        name = f"{EXPERTS}.down_proj.{role}"
        assert parameters(given)[name] == Parameter(name, shape, dtype, WEIGHT, (before,), ((role, "e4m3 1x*"),))
    assert f"{EXPERTS}.down_proj: e4m3 1x*, inputs stay float32; made while it is loaded; 6,656 bytes" in result.notes


def test_parts_of_experts_have_tiles_that_end_with_them() -> None:
    of_rows = Shard((2, 192, 64), 1, (Section(96, 2), Section(96, 2)))
    of_columns = Shard((2, 64, 96), 2, (Section(96, 2),))
    given = experts({f"{EXPERTS}.gate_up_proj": of_rows, f"{EXPERTS}.down_proj": of_columns})
    QuantiseExperts(rules((LINEAR, "e4m3 32x64, inputs e4m3 1x64")), CPU, 2).run(given)
    found = parameters(given)
    assert f"{EXPERTS}.down_proj" in found  # 48 columns end after tiles of 16, which kernels do not take
    scales = found[f"{EXPERTS}.gate_up_proj.scales"]
    assert (scales.scheme, scales.shape) == ("e4m3 16x64", (2, 6, 1))
    assert scales.shard == Shard((2, 12, 1), 1, (Section(6, 2), Section(6, 2)))
    assert found[f"{EXPERTS}.gate_up_proj.codes"].shard == of_rows


@pytest.mark.parametrize(
    ("quantisation", "matches", "note"),
    [
        (rules((rf"re:{EXPERTS}.1", BLOCKS)), 0, "stays in 16 bits: the rules differ among its matrices"),
        (rules((LINEAR, BLOCKS), ignore=("re:.*up_proj",)), 1, "stays in 16 bits: the rules differ among its matrices"),
        (rules(("other", BLOCKS)), 0, "stays in 16 bits: no rule names it"),
        (rules((LINEAR, BLOCKS), ignore=("re:.*gate_proj", "re:.*up_proj")), 1, "gate_proj is to be ignored"),
        (rules((LINEAR, "e4m3 1x16")), 0, "stays in 16 bits: tiles of 16 columns are no power of two"),
        (
            rules((LINEAR, "uint4 1x32, columns reordered")),
            0,
            "stays in 16 bits: the columns of each expert are reordered",
        ),
    ],
)
def test_matrices_of_experts_that_stay_and_why(quantisation: Any, matches: int, note: str) -> None:
    given = experts(others=(f"{EXPERTS}.others",))
    graph_pass = QuantiseExperts(quantisation, CPU)
    assert graph_pass.contract(given, SMALL) == matches
    result = graph_pass.run(given)
    assert result.matches == matches
    assert f"{EXPERTS}.gate_up_proj" in parameters(given)
    (found,) = [each for each in result.notes if "gate_up_proj" in each]
    assert note in found
    assert len(result.notes) == 2  # nothing is said of other parameters
    module = fx.GraphModule({}, given)
    assert count(module, experts_weight) == matches
