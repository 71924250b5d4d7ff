"""Graphs of a few linears divided among ranks: where sums are put, and which divided graphs are not the whole one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, Tensors, graph_of, random_tensors
from torch import fx

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_pass import CompileRange, PassResult
from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.matching import aten
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel, all_reduce, vocabulary_part

pytestmark = pytest.mark.usefixtures("one_thread")

RANGE = CompileRange(4, 4)
linear = torch.nn.functional.linear


@dataclass(frozen=True)
class Model:
    """A function of arguments and parameters, whose undivided shapes and shards these are."""

    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    shards: dict[str, Shard]
    arguments: tuple[str, ...] = ("x",)

    def graph(self, num_ranks: int) -> fx.Graph:
        """Of rank 0 of so many."""
        inputs: Tensors = random_tensors(x=(4, 6)) | {"input_ids_T": torch.arange(4)}
        weights = random_tensors(**self.shapes)
        if num_ranks > 1:
            weights = {n: self.shards[n].of(w, 0, num_ranks) if n in self.shards else w for n, w in weights.items()}
        return graph_of(self.function, {name: inputs[name] for name in self.arguments}, weights).graph

    def divided(self, num_ranks: int, shards: dict[str, Shard] | None = None) -> tuple[TensorParallel, fx.Graph]:
        return TensorParallel(shards or self.shards, num_ranks, self.graph(1)), self.graph(num_ranks)


def rows(length: int, k: int, parts: int = 2) -> Shard:
    return Shard((length, k), 0, (Section(length, parts),))


def columns(length: int, k: int, parts: int = 2) -> Shard:
    return Shard((length, k), 1, (Section(k, parts),))


def mlp(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = linear(x, p["up.weight"], p.get("up.bias")).exp()
    return (linear(hidden, p["down.weight"], p.get("down.bias")) + x,)


def packed_mlp(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = linear(x, p["gate_up.weight"]).chunk(2, -1)
    return (linear(torch.nn.functional.silu(gate) * up, p["down.weight"]),)


def joined(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = torch.cat((linear(x, p["q.weight"]), linear(x, p["k.weight"])), -1).exp()
    first, second = both.chunk(2, -1)
    return (linear(first * second, p["down.weight"]),)


def looked_up(input_ids_T: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.nn.functional.embedding(input_ids_T, p["embed.weight"]) * 2,)


def experts(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three experts; each token has all, with weights."""
    hidden = torch.bmm(x.expand(3, -1, -1), p["up"].transpose(1, 2)).exp()
    of_each = torch.bmm(hidden, p["down"].transpose(1, 2)) * x.sum(1)[:, None]
    return (of_each.sum(0) + x,)


MLP = Model(
    mlp,
    {"up.weight": (8, 6), "up.bias": (8,), "down.weight": (6, 8), "down.bias": (6,)},
    {
        "up.weight": rows(8, 6),
        "up.bias": Shard((8,), 0, (Section(8, 2),)),
        "down.weight": columns(6, 8),
        "down.bias": Shard((6,), first_only=True),
    },
)
PACKED = Model(
    packed_mlp,
    {"gate_up.weight": (16, 6), "down.weight": (6, 8)},
    {"gate_up.weight": Shard((16, 6), 0, (Section(8, 2), Section(8, 2))), "down.weight": columns(6, 8)},
)
JOINED = Model(
    joined,
    {"q.weight": (8, 6), "k.weight": (8, 6), "down.weight": (6, 8)},
    {"q.weight": rows(8, 6), "k.weight": rows(8, 6), "down.weight": columns(6, 8)},
)
LOOKED_UP = Model(looked_up, {"embed.weight": (8, 6)}, {"embed.weight": rows(8, 6)}, ("input_ids_T",))
EXPERTS = Model(
    experts,
    {"up": (3, 8, 6), "down": (3, 6, 8)},
    {"up": Shard((3, 8, 6), 1, (Section(8, 2),)), "down": Shard((3, 6, 8), 2, (Section(8, 2),))},
)
SHARED = replace(MLP, shards=MLP.shards | {"up.weight": rows(8, 6, 4), "up.bias": Shard((8,), 0, (Section(8, 4),))})
SHARED = replace(SHARED, shards=SHARED.shards | {"down.weight": columns(6, 8, 4)})


@pytest.mark.parametrize(
    ("model", "num_ranks", "before_sum"),
    [
        (MLP, 2, aten.addmm.default),
        (SHARED, 4, aten.addmm.default),
        (PACKED, 2, aten.mm.default),
        (JOINED, 2, aten.mm.default),
        (LOOKED_UP, 2, vocabulary_part),
        (EXPERTS, 2, aten.sum.dim_IntList),
    ],
)
def test_a_sum_follows_what_ranks_have_parts_of(model: Model, num_ranks: int, before_sum: Any) -> None:
    graph_pass, graph = model.divided(num_ranks)
    (report,) = run_passes(graph, (graph_pass,), ("tensor_parallel",), RANGE, CPU, verify=True)
    assert report.matches == report.contract == report.verified == 1
    (total,) = graph.find_nodes(op="call_function", target=all_reduce)
    assert total.args[0].target is before_sum  # type: ignore[union-attr]
    assert list(total.args[0].users) == [total]  # type: ignore[union-attr]


def test_a_vocabulary_counts_where_token_ids_are_looked_up_in_it() -> None:
    """A head has one too, and later stages have no ids; undivided parameters need no sum."""
    graph, without_ids = LOOKED_UP.graph(2), MLP.graph(2)
    divided = rows(8, 6)
    for shards, contract in (
        ({"embed.weight": divided}, 1),
        ({"lm_head.weight": divided}, 0),
        ({"embed.weight": Shard((8, 6))}, 0),
        ({"embed.weight": divided, "a.down": columns(6, 8), "b.down": columns(6, 8), "c": Shard((8,))}, 3),
    ):
        assert TensorParallel(shards, 2).contract(graph, RANGE) == contract
        of_ids = any("embed" in name and shard.dim == 0 for name, shard in shards.items())
        assert TensorParallel(shards, 2).contract(without_ids, RANGE) == contract - of_ids
    assert TensorParallel({"embed.weight": Shard((8, 6))}, 2).run(LOOKED_UP.graph(2)).matches == 0


def test_a_sum_that_is_not_found_is_an_error_though_nothing_is_strict() -> None:
    graph_pass, graph = MLP.divided(2)
    product = graph.find_nodes(op="call_function", target=aten.addmm.default)[1]
    product.kwargs = {"alpha": 2}
    with pytest.raises(ContractError, match=r"pass tensor_parallel matched 0 times .* its contract is 1"):
        run_passes(graph, (graph_pass,), ("tensor_parallel",), RANGE, CPU)


def verified(model: Model, edit: Callable[[fx.Graph, PassResult], PassResult], num_ranks: int = 2) -> int:
    graph_pass, graph = model.divided(num_ranks)
    result = graph_pass.run(graph)
    return graph_pass.verify(graph, edit(graph, result), RANGE, CPU)


def no_sum(graph: fx.Graph, result: PassResult) -> PassResult:
    (total,) = graph.find_nodes(op="call_function", target=all_reduce)
    total.replace_all_uses_with(total.args[0])  # type: ignore[arg-type]
    graph.erase_node(total)
    return replace(result, replacements=())


def another_operation(graph: fx.Graph, result: PassResult) -> PassResult:
    graph.find_nodes(op="call_function", target=aten.exp.default)[0].target = aten.sin.default
    return result


def twice(graph: fx.Graph, result: PassResult) -> PassResult:
    """The sum is that of parts which are doubled."""
    (total,) = graph.find_nodes(op="call_function", target=all_reduce)
    with graph.inserting_before(total):
        doubled = graph.call_function(aten.add.Tensor, (total.args[0], total.args[0]))
    doubled.meta["val"] = total.meta["val"]
    total.update_arg(0, doubled)
    return result


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        (MLP, no_sum),
        (EXPERTS, no_sum),
        (LOOKED_UP, no_sum),
        (MLP, another_operation),
        (EXPERTS, another_operation),
        (MLP, twice),
    ],
)
def test_another_graph_is_caught(model: Model, edit: Callable[[fx.Graph, PassResult], PassResult]) -> None:
    assert verified(model, lambda graph, result: result) == 1
    with pytest.raises(VerificationError, match="pass tensor_parallel, 4 tokens: "):
        verified(model, edit)


@pytest.mark.parametrize(
    ("model", "name", "shard"),
    [
        (MLP, "down.bias", Shard((6,))),  # each rank would add it
        (MLP, "up.bias", Shard((8,), 0, (Section(4, 2), Section(4, 2)))),
        (MLP, "up.weight", Shard((8, 6), 0, (Section(4, 2), Section(4, 2)))),
        (MLP, "down.weight", Shard((6, 8), 1, (Section(4, 2), Section(4, 2)))),
        (PACKED, "gate_up.weight", rows(16, 6)),  # seen where the two are split
        (PACKED, "down.weight", Shard((6, 8), 1, (Section(4, 2), Section(4, 2)))),
        (EXPERTS, "down", Shard((3, 6, 8), 2, (Section(4, 2), Section(4, 2)))),
        (SHARED, "up.weight", Shard((8, 6), 0, (Section(4, 2),))),
    ],
)
def test_parameters_in_other_parts_are_caught(model: Model, name: str, shard: Shard) -> None:
    """Of the same shapes, but not those that belong together."""
    num_ranks = 4 if model is SHARED else 2
    graph_pass, graph = model.divided(num_ranks, model.shards | {name: shard})
    result = graph_pass.run(graph)
    with pytest.raises(VerificationError, match="pass tensor_parallel"):
        graph_pass.verify(graph, result, RANGE, CPU)
