"""Verifies tensor_parallel: runs the sharded graph as each rank does, and compares it with the undivided model's graph.

The undivided graph runs once on random inputs, and its values are recorded. Each call of the sharded graph then runs
once per rank, on the rank's slices of the recorded arguments, and must return the rank's slice of the recorded result.
An all-reduce must return the whole recorded value. Since every call starts from recorded values, errors do not
accumulate. The slices follow from the shapes in both graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compiled_engine.parallel.group import FakeGroup, in_group
from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_inputs import is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, PassResult
from compiled_engine.passes.framework.matching import arg, aten, is_call, named
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.framework.verifier import (
    MOST_TOKENS,
    Values,
    VerificationError,
    difference,
    mutated,
    run_call,
    run_whole,
)
from compiled_engine.passes.linear.linears import ExpertsLinear, Linear, experts_linear_of, product_of

# Calls between a linear with a sharded input, or the mean of a divided row, and the all-reduce.
_OF_SUMS = (aten.bmm.default, aten.mul.Tensor, aten.add.Tensor, aten.mean.dim)


@torch.no_grad()
def verify_ranks(
    whole: fx.Graph,
    divided: fx.Graph,
    result: PassResult,
    shards: Mapping[str, Shard],
    num_ranks: int,
    compile_range: CompileRange,
    device: torch.device,
) -> int:
    """Check every call of the sharded graph `divided` on every rank, and return the number of all-reduces compared.

    whole: the undivided model's graph. result: the result of the pass. shards: parameter name -> its shard. The calls
    run with the fewest tokens of the range, and with the most tokens but at most MOST_TOKENS. Raises VerificationError,
    which names the first differing value, the number of tokens and the error.
    """
    originals = {node.name: node for node in whole.nodes}
    sums = {replacement.after: originals[replacement.before] for replacement in result.replacements}
    products = packed_products(divided, shards)
    packed = _packed_values(divided, originals, products, shards)
    computed = partial_values(sums) | {product.operand for product in products.values()}
    for num_tokens in sorted({compile_range.low, min(compile_range.high, MOST_TOKENS)}):
        inputs = RandomInputs(whole, num_tokens, device, 1.0)
        recorded, _ = run_whole(whole, inputs)
        ranks = [
            _Rank(
                *(rank, num_ranks, num_tokens, shards, recorded, originals),
                {s.name: o for s, o in sums.items()},
                computed,
                packed,
            )
            for rank in range(num_ranks)
        ]
        for node in divided.nodes:
            if node in sums:
                part = node.all_input_nodes[0]
                found = torch.stack([rank.compute(part).float() for rank in ranks]).sum(0)
                _compare(node, num_tokens, recorded[sums[node]], found)
            elif _is_comparable(node) and node not in computed:
                for rank in ranks:
                    _compare(node, num_tokens, rank.slice(node), rank.compute(node))
    return len(sums)


class _Rank:
    """A rank in the verification: slices the undivided graph's values, and runs calls of the sharded graph on them.

    recorded: the undivided graph's values. originals: the undivided graph's nodes by name. sums: name of an all-reduce
    in the sharded graph -> the undivided graph's node with the same result. computed: nodes of the sharded graph whose
    values are not slices of recorded values, so that the rank computes them. packed: see `_packed_values`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_tokens: int,
        shards: Mapping[str, Shard],
        recorded: Values,
        originals: Mapping[str, fx.Node],
        sums: Mapping[str, fx.Node],
        computed: set[fx.Node],
        packed: Mapping[fx.Node, Shard],
    ):
        self._rank, self._num_ranks, self._num_tokens, self._shards = rank, num_ranks, num_tokens, shards
        self._recorded, self._originals, self._sums = recorded, originals, sums
        self._computed, self._packed = computed, packed

    def slice(self, node: fx.Node) -> Any:
        """Return a node's value on this rank: this rank's slice of the recorded value of the undivided graph.

        If the value is only a summand of a sum over ranks, the rank computes the value instead. Raises
        VerificationError for a node without a counterpart in the undivided graph.
        """
        if node in self._computed:
            return self.compute(node)
        original = self._sums.get(node.name) or self._originals.get(node.name)
        if original is None:
            raise VerificationError(
                f"pass tensor_parallel, {self._num_tokens} tokens: {node.name} has no counterpart in the undivided "
                "graph, and is no part of a sum over ranks"
            )
        value = self._recorded[original]
        if is_parameter(node) and (shard := self._shards.get(source_of(node).name)) is not None:
            return shard.of(value, self._rank, self._num_ranks)
        if node in self._packed:
            shard = self._packed[node]
            return self._packed_part(value, shard, _divided_dim(node, value, _total(shard)))
        local = node.meta.get("val")
        if (packed := _split_shard(node, self._packed)) is not None:
            each = zip(value, _sections_of_items(packed, node), strict=True)
            return [self._packed_part(item, replace(packed, sections=s), named(node)["dim"]) for item, s in each]
        return self._part(value, local)

    def _packed_part(self, value: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
        return replace(shard, whole=tuple(value.shape), dim=dim).of(value, self._rank, self._num_ranks)

    def _part(self, value: Any, local: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._part(item, like) for item, like in zip(value, local, strict=True)]
        if not isinstance(value, torch.Tensor):
            return value
        is_contiguous = value.is_contiguous()
        if local.dim() and (rows := _rows_of_a_token(local.shape[0])) > 1:
            # [tokens * heads, ...], as in norms of heads.
            heads = value.unflatten(0, (self._num_tokens, -1))
            parts = heads.shape[1] // rows
            value = heads.narrow(1, self._rank * parts // self._num_ranks * rows, rows).flatten(0, 1)
        for dim, size in enumerate(local.shape):
            if isinstance(size, int) and value.shape[dim] != size:
                parts = value.shape[dim] // size
                value = value.narrow(dim, self._rank * parts // self._num_ranks * size, size)
        return value.contiguous() if is_contiguous else value

    def compute(self, node: fx.Node) -> Any:
        with in_group(FakeGroup(self._num_ranks, self._rank)):
            return run_call(node, {argument: self.slice(argument) for argument in node.all_input_nodes})


def _rows_of_a_token(size: int | torch.SymInt) -> int:
    """Return n if a size is n times the symbolic token count, such as 4 for 4 T; 1 for any other size."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    if expression is None or len(expression.free_symbols) != 1:
        return 1
    (symbol,) = expression.free_symbols
    factor = expression / symbol
    return int(factor) if factor.is_Integer else 1


def partial_values(sums: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose value on a rank is only a summand of a sum over ranks.

    These are the linears with a sharded input, means of divided rows, and all nodes between them and their all-reduces.
    sums: the all-reduces, which are not returned themselves.
    """
    found: set[fx.Node] = set()
    for node in sums:
        before = node.all_input_nodes[:1]
        while before:
            found.add(before[0])
            if is_call(before[0], aten.add.Tensor) and experts_linear_of(before[0]) is not None:
                found.update(before[0].all_input_nodes)  # the product, and the bias, which one rank has
                break
            is_end = product_of(before[0]) is not None
            inner = before[0].all_input_nodes
            before = [] if is_end else [n for n in inner if is_call(n, *_OF_SUMS)]
    return found


def packed_products(graph: fx.Graph, shards: Mapping[str, Shard]) -> dict[fx.Node, Linear | ExpertsLinear]:
    """Return the linears whose outputs are several sections side by side, each sharded among the ranks, by node.

    An example is a linear of queries, keys and values.
    """
    found = {}
    for node in graph.nodes:
        product = product_of(node)
        shard = None if product is None else shards.get(source_of(product.weight).name)
        if product is not None and shard is not None and len(shard.sections) > 1 and not shard.divides_input:
            found[node] = product
    return found


def _divided_dim(node: fx.Node, whole: torch.Tensor, total: int) -> int:
    """Return the dimension of `total` elements that a rank has a part of. The number of tokens may be as large."""
    local = node.meta["val"].shape
    sizes = enumerate(zip(whole.shape, local, strict=True))
    return next(dim for dim, (size, part) in sizes if size == total and isinstance(part, int) and part != size)


def _packed_values(
    graph: fx.Graph,
    originals: Mapping[str, fx.Node],
    products: Mapping[fx.Node, Linear | ExpertsLinear],
    shards: Mapping[str, Shard],
) -> dict[fx.Node, Shard]:
    """Return the nodes whose values are several sections side by side, each sharded among the ranks, with their shards.

    These are the results of `products`, the linears with such outputs, other parameters with several sections, and
    values of the same size that are computed from them. An example is the convolution of a delta net's queries, keys
    and values. Buffers of that size (multipliers of Falcon-H1), items of splits, and concatenations of divided values
    may have several sections, too.

    originals: the undivided graph's nodes by name.
    """
    found = {node: shards[source_of(product.weight).name] for node, product in products.items()}
    of_products = {product.weight for product in products.values()}
    for node in graph.find_nodes(op="placeholder"):
        shard = shards.get(source_of(node).name)
        if shard is not None and len(shard.sections) > 1 and node not in of_products:
            found[node] = shard
    lengths = {(_local_total(shard.sections), _total(shard)): shard for shard in found.values()}
    for node in graph.find_nodes(op="placeholder"):
        divided = zip(_lengths(node), _lengths(originals.get(node.name, node)), strict=True)
        shard = next((lengths[pair] for pair in divided if pair[0] != pair[1] and pair in lengths), None)
        if shard is not None and source_of(node).name not in shards:  # a buffer
            found[node] = shard
    for node in graph.nodes:
        split = _split_shard(arg(node, 0), found) if is_call(node, operator.getitem) else None
        if split is not None:
            sections = _sections_of_items(split, arg(node, 0))[arg(node, 1)]
            found |= {node: replace(split, sections=sections)} if len(sections) > 1 else {}
        if (joined := _joined_shard(node, originals, found)) is not None:
            found[node] = joined
        shard = next((found[given] for given in node.all_input_nodes if given in found), None)
        if shard is not None and node not in found and _lengths(node).count(_local_total(shard.sections)) == 1:
            found[node] = shard
    return found


def _joined_shard(node: fx.Node, originals: Mapping[str, fx.Node], packed: Mapping[fx.Node, Shard]) -> Shard | None:
    """Return the shard of a concatenation along a divided dimension; None for other calls.

    Each part is a section, or has the sections of its shard in `packed`.
    """
    original = originals.get(node.name)
    if original is None or not is_call(node, aten.cat.default):
        return None
    dim: int = named(node)["dim"]
    sections: list[Section] = []
    for part, whole in zip(arg(node, 0), arg(original, 0), strict=True):
        size, local = whole.meta["val"].shape[dim], part.meta["val"].shape[dim]
        if not isinstance(size, int) or size == local:
            return None
        sections += packed[part].sections if part in packed else (Section(size, size // local),)
    return Shard((sum(section.length for section in sections),), 0, tuple(sections))


def _lengths(node: fx.Node) -> list[int]:
    """Return the sizes of a node's value that do not depend on the number of tokens; [] unless it is a tensor."""
    value = node.meta.get("val")
    return [size for size in value.shape if isinstance(size, int)] if isinstance(value, torch.Tensor) else []


def _split_shard(node: fx.Node, packed: Mapping[fx.Node, Shard]) -> Shard | None:
    """Return the shard of the operand of a split in `packed`; None for other calls."""
    return packed.get(arg(node, 0)) if is_call(node, aten.split_with_sizes.default) else None


def _sections_of_items(shard: Shard, split: fx.Node) -> list[tuple[Section, ...]]:
    """Return the sections of each item of a split, whose operand has the sections of `shard`."""
    left, found = list(shard.sections), []
    for size in named(split)["split_sizes"]:
        sections: list[Section] = []
        while left and _local_total(sections) < size:
            sections.append(left.pop(0))
        found.append(tuple(sections))
    return found


def _local_total(sections: Iterable[Section]) -> int:
    """Return the length of sections on a rank."""
    return sum(length // parts for length, parts in sections)


def _total(shard: Shard) -> int:
    """Return the sum of the lengths of a shard's sections: the size of the undivided dimension."""
    return sum(section.length for section in shard.sections)


def _is_comparable(node: fx.Node) -> bool:
    """Return whether a node is a call whose results can be compared.

    The call must return tensors and write to none, and no other call may write to its results.
    """
    is_call = node.op == "call_function" and not mutated(node)
    is_call = is_call and all(isinstance(value, torch.Tensor) for value in _each(node.meta.get("val")))
    return is_call and not any(mutated(user) and node in mutated(user).values() for user in node.users)


def _each(value: Any) -> Sequence[Any]:
    """Return the items of a list or tuple, such as the results of a split; any other value as a tuple of one."""
    return value if isinstance(value, list | tuple) else (value,)


def _compare(node: fx.Node, num_tokens: int, expected: Any, found: Any) -> None:
    for right, value in zip(_each(expected), _each(found), strict=True):
        problem = difference(right, right.float(), value.to(right.dtype))
        if problem is not None:
            raise VerificationError(f"pass tensor_parallel, {num_tokens} tokens: {node.name} {problem}")
