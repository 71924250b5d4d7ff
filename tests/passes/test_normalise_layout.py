"""Foreign code without its batch dimension computes what it computed, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pass_cases import graph_of, random_tensors, rewrite, run, targets
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.layout.normalise_layout import NormaliseLayout

aten = torch.ops.aten
T, H, D = 5, 3, 4


def repeated_heads(x: torch.Tensor) -> torch.Tensor:
    """As where keys are repeated for the queries of a group: a new dimension in the middle."""
    heads = x[None].transpose(1, 2)  # [1, H, T, d]
    return heads[:, :, None].expand(1, H, 2, T, D).reshape(1, 2 * H, T, D).transpose(1, 2)[0]


def repeated_between(x: torch.Tensor) -> torch.Tensor:
    return x[None].unsqueeze(2).expand(1, T, 6, H, D) * 2


def repeated_at_both_ends(x: torch.Tensor) -> torch.Tensor:
    return x[None, ..., None].expand(2, T, H, D, 3).sum(0)


class Shapes(fx.Interpreter):
    """Runs a graph and requires of each value the shape and the dtype that the graph states."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        stated = n.meta.get("val")
        if isinstance(stated, torch.Tensor):
            assert (value.shape, value.dtype) == (stated.shape, stated.dtype), n
        return value


@pytest.mark.parametrize("function", [repeated_heads, repeated_between, repeated_at_both_ends])
def test_values_that_are_repeated(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = random_tensors(x=(T, H, D))
    module = graph_of(lambda x: (function(x),), inputs, {})
    rewrite(NormaliseLayout(), module)
    torch.testing.assert_close(run(module, inputs)[0], function(inputs["x"]), rtol=0, atol=0)


def stored(x: torch.Tensor) -> torch.Tensor:
    """Return a value that is stored in the order of its dimensions."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def ends(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] - 2 * parts[-1]


# Of a batch of one, [1, T, H, d] and [1, H, T, d]; what is returned has no batch.
Op = Callable[[torch.Tensor], torch.Tensor]
KNOWN: dict[str, Op] = {
    "a part of the tokens": lambda v: v[:, 1:3][0],
    "a part of the last dimension": lambda v: v[..., 1:3][0],
    "every second element": lambda v: v[..., ::2][0],
    "equal parts": lambda v: torch.cat(torch.split(v, 2, dim=-1)[::-1], -1)[0],
    "halves of the last dimension": lambda v: ends(v.chunk(2, dim=-1))[0],
    "unequal parts": lambda v: torch.cat(torch.split(v, [1, 2], dim=1)[::-1], 1)[0] if v.shape[1] == 3 else v[0],
    "a mean that keeps its dimension": lambda v: (v - v.mean(-1, keepdim=True))[0],
    "a mean that drops its dimension": lambda v: (v.mean(-1) * 2)[0],
    "a sum over one in the middle": lambda v: (v.sum(2) * v[:, :, 0])[0],
    "a sum over two dimensions": lambda v: v.sum((1, 3))[0],
    "a sum over two that are kept": lambda v: (v / v.sum((1, 3), keepdim=True))[0],
    "the largest of each row": lambda v: (v - v.amax(-1, keepdim=True))[0],
    "the largest of each column": lambda v: v.amax(1)[0],
    "softmax of rows": lambda v: v.softmax(-1)[0],
    "softmax of columns": lambda v: v.softmax(1)[0],
    "sums so far": lambda v: v.cumsum(1)[0] + v.cumsum(-1)[0],
    "an element of each row": lambda v: v.select(-1, 2)[0],
    "an element of each column": lambda v: v.select(1, 1)[0],
    "one of the middle": lambda v: (v.select(2, 1) + 1)[0],
    "all of the middle": lambda v: ends(v.unbind(2))[0],
    "all of the last": lambda v: ends(v.unbind(-1))[0],
    "joined in the last dimension": lambda v: torch.cat((v, v * 2), -1)[0],
    "joined in another": lambda v: torch.cat((v, v * 2), 1)[0],
    "joined with what was turned": lambda v: torch.cat((v, stored(v.transpose(1, 2)).transpose(1, 2)), 2)[0],
    "joined with what was computed turned": lambda v: torch.cat((v, v.transpose(1, 2).cumsum(1).transpose(1, 2)), 1)[0],
    "stacked behind": lambda v: torch.stack((v, v * 2), -1)[0],
    "stacked in front": lambda v: torch.stack((v, v * 2), 1)[0],
    "stacked in the middle": lambda v: torch.stack((v, v * 2), 3)[0],
    "stacked and flat": lambda v: torch.stack((-v[..., 1::2], v[..., ::2]), -1).flatten(-2)[0],
    "stacked with what was turned": lambda v: torch.stack((v, stored(v.transpose(1, 2)).transpose(1, 2)), 2)[0],
    "copied": lambda v: (v.clone() + 1)[0],
    "turned, copied and flat": lambda v: v.transpose(1, 2).contiguous().reshape(1, v.shape[2], -1)[0],
    "in another dtype": lambda v: v.double()[0],
    "a norm": lambda v: torch.nn.functional.layer_norm(v, (4,))[0],
    "a norm over two dimensions": lambda v: torch.nn.functional.layer_norm(v, tuple(v.shape[2:]))[0],
    "times a vector": lambda v: (v * v[0, 0, 0])[0],
    "times a matrix": lambda v: (v * v[0, 0])[0],
    "times one for each token": lambda v: (v * v[..., :1, :1])[0],
    "times one for each head": lambda v: (v * v[:, :1, :, :1])[0],
    "plus what was turned": lambda v: (v + v.transpose(1, 2).exp().transpose(1, 2))[0],
    "plus what is stored turned": lambda v: (v - stored(v.transpose(1, 2)).transpose(1, 2) * 2)[0],
    "what is stored turned, plus it": lambda v: (stored(v.transpose(1, 3)).transpose(1, 3) - v * 2)[0],
    "plus what is computed turned": lambda v: (v.transpose(1, 2).softmax(1) + v.transpose(1, 2))[0],
    "an outer product": lambda v: (v[:, :, 0, 0][:, :, None] * v[:, 0, 0][:, None])[0],
    "an outer product the other way round": lambda v: (v[:, 0, 0][:, None] * v[:, :, 0, 0][:, :, None])[0],
    "one less than it": lambda v: (1 - v)[0],
    "the larger of two": lambda v: torch.where(v > 0, v, v * 0.5)[0],
    "with a batch of more": lambda v: v.unsqueeze(0).unsqueeze(-1).squeeze(-1).squeeze(0)[0],
    "turned around": lambda v: v.permute(0, 3, 2, 1)[0].exp(),
    "turned by negative dimensions": lambda v: v.permute(0, -1, 1, 2).transpose(-1, -2)[0].exp(),
    "joined heads": lambda v: v.reshape(1, v.shape[1], -1)[0],
    "divided heads": lambda v: v.reshape(1, v.shape[1], v.shape[2], 2, 2)[0],
    "an alias": lambda v: aten.alias.default(v)[0] + 1,
}


@pytest.mark.product(one_in=1000, each=("name",))
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_batch_of_one_is_gone(name: str, turned: bool) -> None:
    """Whether heads come before tokens or not, and however the value is stored."""

    def function(x: torch.Tensor) -> torch.Tensor:
        batch = x[None] * 2
        return KNOWN[name](batch.transpose(1, 2) if turned else batch)

    inputs = random_tensors(x=(T, H, D))
    module = graph_of(lambda x: (function(x),), inputs, {})
    expected = NormaliseLayout().contract(module.graph, CompileRange(1, 8))
    result = rewrite(NormaliseLayout(), module)
    assert result.near_misses == ()
    assert result.matches == expected > 0
    ones = "one for each" in name or "two that are kept" in name  # in front without the batch, too
    assert ones or NormaliseLayout().contract(module.graph, CompileRange(1, 8)) == 0
    (got,) = Shapes(module).run(inputs["x"])
    torch.testing.assert_close(got, function(inputs["x"]), rtol=1e-6, atol=1e-6)


def test_copies_of_turned_heads_have_tokens_first() -> None:
    """Otherwise the distance of heads would be the number of tokens, for each of which kernels are compiled anew."""
    inputs = random_tensors(x=(T, H, D))
    module = graph_of(lambda x: (x[None].transpose(1, 2).contiguous().transpose(1, 2)[0] + 1,), inputs, {})
    rewrite(NormaliseLayout(), module)
    (clone,) = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.meta["val"].shape == (T, H, D)


@pytest.mark.parametrize("shape", [(1, 1, D), (D,)])
def test_parameters_with_leading_dimensions_of_one_bring_no_batch(shape: tuple[int, ...]) -> None:
    """As the factors of Falcon-H1's projection, [1, 1, D], and Kimi Linear's biases, which become [1, 1, D]."""
    inputs, table = random_tensors(x=(T, D)), random_tensors(factors=shape)

    def function(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return (x[None] * factors.view(1, 1, -1)).transpose(1, 2).squeeze(0).transpose(0, 1).exp()

    module = graph_of(lambda x, factors: (function(x, factors),), inputs, table)
    assert rewrite(NormaliseLayout(), module).near_misses == ()
    shapes = {node.target: node.meta["val"].shape for node in module.graph.nodes if node.op == "call_function"}
    assert tuple(shapes[aten.mul.Tensor]) == (T, D)
    (product,) = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert product.args[1].meta["val"].shape == (D,)
    assert aten.permute.default not in shapes
    (got,) = Shapes(module).run(*inputs.values(), *table.values())
    torch.testing.assert_close(got, function(**inputs, **table))


UNKNOWN: dict[str, tuple[Op, str]] = {
    "an op of which nothing is known": (lambda v: v.flip(1)[0], "aten.flip"),
    "a sum over the batch": (lambda v: v.sum(0), "aten.sum.dim_IntList"),
    "joined batches": (lambda v: torch.cat((v, v * 2), 0).sum(0), "aten.cat"),
    "softmax over the batch": (lambda v: v.softmax(0)[0], "aten._softmax"),
    "a part of the batch": (lambda v: v[:, :].narrow(0, 0, 1)[0], ""),
    "tokens of turned heads joined": (lambda v: v.transpose(1, 2).transpose(2, 3).reshape(1, -1, 3)[0], ""),
    "a norm over the batch": (lambda v: torch.nn.functional.layer_norm(v, tuple(v.shape))[0], "aten.native_layer_norm"),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_gets_values_as_they_were(name: str, turned: bool) -> None:
    op, missed = UNKNOWN[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        batch = x[None] * 2
        return op(batch.transpose(1, 2) if turned else batch)

    inputs = random_tensors(x=(T, H, D))
    module = graph_of(lambda x: (function(x),), inputs, {})
    result = rewrite(NormaliseLayout(), module)
    if missed:
        assert [miss.partition(".default")[0].partition(": ")[0] for miss in result.near_misses] == [f"1 x {missed}"]
    (got,) = Shapes(module).run(inputs["x"])
    torch.testing.assert_close(got, function(inputs["x"]), rtol=1e-6, atol=1e-6)


def test_a_conversion_names_only_what_it_changes() -> None:
    """As `type_as` of code that runs on any device."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return aten._to_copy.default(x[None], dtype=torch.float64, layout=torch.strided, device=torch.device("cpu"))[0]

    inputs = random_tensors(x=(T, D))
    module = graph_of(lambda x: (function(x),), inputs, {})
    rewrite(NormaliseLayout(), module)
    (conversion,) = module.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert conversion.kwargs == {"dtype": torch.float64}
    torch.testing.assert_close(run(module, inputs)[0], inputs["x"].double(), rtol=0, atol=0)


def test_tokens_are_looked_up_in_a_table() -> None:
    def function(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.embedding(ids[None], table) * 2)[0]

    ids, table = {"ids": torch.tensor([3, 0, 1])}, random_tensors(table=(4, 6))
    module = graph_of(lambda ids, table: (function(ids, table),), ids, table)
    result = rewrite(NormaliseLayout(), module)
    assert (result.near_misses, targets(module)) == ((), [aten.embedding.default, aten.mul.Tensor])
    torch.testing.assert_close(run(module, ids | table)[0], function(**ids, **table), rtol=0, atol=0)


def test_a_view_is_made_once_and_a_batch_that_is_returned_is_kept() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = x[None].transpose(1, 2)
        return turned.flip(1), turned.flip(2), x[None] * 2

    inputs = random_tensors(x=(T, H, D))
    module = graph_of(function, inputs, {})
    result = rewrite(NormaliseLayout(), module)
    assert result.near_misses == ("2 x aten.flip.default: gets values as they were",)
    views = [target for target in targets(module) if target in (aten.permute.default, aten.unsqueeze.default)]
    assert views.count(aten.permute.default) == 1
    for got, expected in zip(Shapes(module).run(inputs["x"]), function(inputs["x"]), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
