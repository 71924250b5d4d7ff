"""Inputs of a graph and what a pass does with them: sources, parameters, shards, arguments; and a graph as text."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from pass_cases import graph_of, random_tensors
from torch import fx

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_inputs import (
    Source,
    add_parameter,
    argument,
    describe_shards,
    is_parameter,
    parameter_of,
    shards_in,
    source_of,
)
from compiled_engine.passes.framework.graph_text import graph_diff, graph_text
from compiled_engine.passes.framework.matching import aten
from compiled_engine.passes.framework.parameter import KEPT, Parameter, packed


@pytest.mark.parametrize(
    ("source", "element", "expression"),
    [
        (Source("argument", "kv_caches.3"), 3, "kv_caches[3]"),
        (Source("received", "received.0"), 0, "received[0]"),
        (Source("argument", "positions_T"), None, "positions_T"),
        (Source("argument", "attention_inputs.seq_lens_R"), None, "attention_inputs.seq_lens_R"),
        (Source("size", "kv_caches.12", 2), 12, "kv_caches[12]"),
        (Source("parameter", "layers.3"), None, "layers.3"),
    ],
)
def test_elements_of_lists_are_named_by_their_index(source: Source, element: int | None, expression: str) -> None:
    assert (source.element, source.expression) == (element, expression)


def two_weights() -> fx.Graph:
    arguments, weights = random_tensors(x=(4, 8)), random_tensors(**{"layer.a": (8,), "layer.b": (8,)})
    return graph_of(lambda x, **w: (x * w["layer.a"] + w["layer.b"],), arguments, weights).graph


def test_a_new_parameter_comes_behind_all_inputs() -> None:
    graph = two_weights()
    new = Parameter("layers.0.new weight", (3, 5), "bfloat16", KEPT)
    node = add_parameter(graph, new)
    placeholders = graph.find_nodes(op="placeholder")
    assert placeholders[-1] is node
    assert [source_of(each).name for each in placeholders] == ["x", "layer.a", "layer.b", "layers.0.new weight"]
    assert (node.name, node.meta["val"].shape, node.meta["val"].dtype) == (
        "layers_0_new_weight",
        (3, 5),
        torch.bfloat16,
    )
    assert node.meta["val"].fake_mode is placeholders[1].meta["val"].fake_mode
    assert parameter_of(node) == new
    graph.lint()


def test_arguments_are_found_by_name_and_parameters_are_none() -> None:
    graph = two_weights()
    x, a, _ = graph.find_nodes(op="placeholder")
    assert argument(graph, "x") is x
    for name in ("layer.a", "y"):
        with pytest.raises(LookupError, match=f"the graph has no argument {name}"):
            argument(graph, name)
    x.meta["source"] = Source("size", "x", 0)
    with pytest.raises(LookupError):
        argument(graph, "x")
    assert [is_parameter(node) for node in (x, a, graph.output_node(), "a")] == [False, True, False, False]


def test_shards_are_put_into_the_descriptions_and_come_back() -> None:
    graph = two_weights()
    of_a, of_members = Shard((16,), 0, (Section(16, 2),)), Shard((8,))
    members = tuple(Parameter(name, (4,), "float32") for name in ("layer.c", "layer.d"))
    node = add_parameter(graph, packed("layer.{c,d}", members))
    assert shards_in(graph) == {}
    shards: Mapping[str, Shard] = {"layer.a": of_a, "layer.d": of_members, "other": Shard((1,))}
    describe_shards(graph, shards)
    assert shards_in(graph) == {"layer.a": of_a, "layer.d": of_members}
    assert [leaf.shard for leaf in parameter_of(node).leaves()] == [None, of_members]
    assert [each.shard for each in map(parameter_of, graph.find_nodes(op="placeholder")[1:3])] == [of_a, None]


def test_a_graph_as_text_has_a_line_for_each_node() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.split_with_sizes([3, 5], -1)
        return aten._to_copy.default(first, dtype=torch.bfloat16), aten.cat.default([second, w], 1)

    graph = graph_of(function, random_tensors(x=(4, 8)), random_tensors(w=(4, 2))).graph
    graph.find_nodes(op="placeholder")[0].meta["source"] = Source("size", "x", 1)
    assert graph_text(graph) == [
        "arg0_1: float32[4, 8] = input x.shape[1]",
        "arg1_1: float32[4, 2] = input w",
        "split_with_sizes: (float32[4, 3], float32[4, 5]) = aten.split_with_sizes.default(arg0_1, [3, 5], -1)",
        "getitem: float32[4, 3] = operator.getitem(split_with_sizes, 0)",
        "getitem_1: float32[4, 5] = operator.getitem(split_with_sizes, 1)",
        "_to_copy: bfloat16[4, 3] = aten._to_copy.default(getitem, dtype=torch.bfloat16)",
        "cat: float32[4, 7] = aten.cat.default([getitem_1, arg1_1], 1)",
        "return [_to_copy, cat]",
    ]
    placeholder = graph.find_nodes(op="placeholder")[0]
    placeholder.meta |= {"val": 4, "source": Source("argument", "x", 1)}
    assert graph_text(graph)[0] == "arg0_1: int = input x"
    del graph.find_nodes(op="call_function", target=aten.cat.default)[0].meta["val"]
    assert graph_text(graph)[-2] == "cat: None = aten.cat.default([getitem_1, arg1_1], 1)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("abcdef", "abcdef", ""),
        ("abcdefgh", "abcdXfgh", "...|  c|  d|- e|+ X|  f|  g|..."),
        ("abc", "XabcY", "+ X|  a|  b|  c|+ Y"),
        ("abcdefg", "Xabcdefg", "+ X|  a|  b|..."),
        ("abcdefg", "abcdef", "...|  e|  f|- g"),
        ("aXbY", "ab", "  a|- X|  b|- Y"),
        ("abcdefghij", "Xbcdefghij", "- a|+ X|  b|  c|..."),
        ("abcdefghij", "XbcdefghiY", "- a|+ X|  b|  c|...|  h|  i|- j|+ Y"),
        ("abcdef", "XbcdeY", "- a|+ X|  b|  c|  d|  e|- f|+ Y"),
        ("", "ab", "+ a|+ b"),
    ],
)
def test_a_diff_has_two_lines_of_context(before: str, after: str, expected: str) -> None:
    assert graph_diff(list(before), list(after)) == expected.replace("|", "\n")
