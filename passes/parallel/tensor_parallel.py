"""Inserts the collectives of tensor parallelism into the graph of a model that was traced with one rank's shapes.

Why: for models that do not fit on one device, or need the bandwidth of several. The pass adds an all-reduce after each
linear with a sharded input (attention's output, the MLP's second linear, experts after their sum), and after an
embedding, whose vocabulary is sharded. A norm over a row that ranks divide (Mamba 2's with a single group) averages its
mean of squares. Ranks do not communicate in between. Logits stay sharded, also for sampling. The graph does not contain
the rank's index, so all ranks run the same code.

The pass changes the meaning of the graph, so it runs first and cannot be disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from compiled_engine.parallel.group import current_group
from compiled_engine.parallel.shards import Shard, divides_vocabulary
from compiled_engine.parallel.vocabulary import embedding_part
from compiled_engine.passes.framework.graph_inputs import is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, aten, emit, is_call, only_user
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear.linears import experts_linear_of, product_of


def _all_reduce(x_TD: torch.Tensor) -> torch.Tensor:
    return current_group().all_reduce(x_TD)


def _all_reduce_in_order(x_TD: torch.Tensor) -> torch.Tensor:
    return current_group().all_reduce_in_order(x_TD)


def _embedding(weight_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return embedding_part(weight_VD, ids_T, current_group().rank)


all_reduce = define_op(
    "all_reduce(Tensor x_TD) -> Tensor",
    cpu=_all_reduce,
    cuda=_all_reduce,
    fake=lambda x_TD: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
)
all_reduce_in_order = define_op(
    "all_reduce_in_order(Tensor x_TD) -> Tensor",
    cpu=_all_reduce_in_order,
    cuda=_all_reduce_in_order,
    fake=lambda x_TD: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
)
vocabulary_part = define_op(
    "vocabulary_part(Tensor weight_VD, Tensor ids_T) -> Tensor",
    cpu=_embedding,
    cuda=_embedding,
    fake=lambda weight_VD, ids_T: weight_VD.new_empty((*ids_T.shape, weight_VD.shape[1])),
)


class TensorParallel(GraphPass):
    """Inserts the all-reduces that a sharded model needs, and lets a sharded embedding look up a rank's own rows.

    shards: parameter name -> its shard, see `parallel.shards`; unsharded parameters are missing. whole: the graph of
    the unsharded model; only `verify` needs it.
    """

    name = "tensor_parallel"
    required = True  # a missing all-reduce makes results wrong

    def __init__(self, shards: Mapping[str, Shard], num_ranks: int, whole: fx.Graph | None = None):
        self._shards, self._num_ranks, self._whole = shards, num_ranks, whole

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of weights sharded along their input, of norms of divided rows, and of sharded embeddings.

        Each needs one all-reduce. Embeddings count only in graphs with token ids as an input, which later pipeline
        stages lack.
        """
        each = sum(shard.divides_input + shard.norms_row for shard in self._shards.values())
        looks_up = any(source_of(node).name == "input_ids_T" for node in graph.find_nodes(op="placeholder"))
        return each + looks_up * sum(divides_vocabulary(name, shard) for name, shard in self._shards.items())

    def run(self, graph: fx.Graph) -> PassResult:
        replacements = []
        for node in list(graph.nodes):
            found = self._part(graph, node)
            if found is not None:
                part, total = found
                replacements.append(Replacement(total.name, _summed(graph, part)))
                if not total.users:
                    graph.erase_node(total)
        return PassResult(len(replacements), replacements=tuple(replacements))

    def _part(self, graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Return the node whose value must be all-reduced because of the call `node`; None if there is none.

        The second node has the sum's value in the undivided model. For a linear with a sharded input both are `node`;
        for a linear of experts, the sum over experts after `node`. A sharded embedding is replaced by a lookup in this
        rank's rows, and the lookup is returned. For the product of normed rows and the norm's weight, it is the rank's
        share of the mean under the root.
        """
        product = product_of(node)
        shard = None if product is None else self._shard(product.weight)
        if shard is not None and shard.divides_input:
            total = _sum_of_experts(node) if is_call(node, aten.bmm.default) else node
            return None if total is None else (total, total)
        shard = self._shard(arg(node, 0)) if is_call(node, aten.embedding.default) else None
        if shard is not None and shard.dim == 0:
            with graph.inserting_before(node):
                part = emit(graph, vocabulary_part, arg(node, 0), arg(node, 1))
            node.replace_all_uses_with(part)
            return part, node
        if is_call(node, aten.mul.Tensor) and any(self._norms_row(factor) for factor in node.args):
            return _share_of_mean(graph, node, self._num_ranks)
        return None

    def _norms_row(self, factor: Any) -> bool:
        while is_call(factor, aten.view.default, aten._to_copy.default):
            factor = arg(factor, 0)
        shard = self._shard(factor)
        return shard is not None and shard.norms_row

    def _shard(self, parameter: Any) -> Shard | None:
        return self._shards.get(source_of(parameter).name) if is_parameter(parameter) else None

    def verify(self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device) -> int:
        """Compare all ranks with the undivided model; return the number of all-reduces compared. See `verify_ranks`."""
        from compiled_engine.passes.parallel.rank_verifier import verify_ranks

        assert self._whole is not None
        return verify_ranks(self._whole, graph, result, self._shards, self._num_ranks, compile_range, device)


def _sum_of_experts(product: fx.Node) -> fx.Node | None:
    """Return the weighted sum over experts that follows `product`, the experts' second linear; None if there is none.

    A rank computes only its summand, so this sum must be all-reduced.
    """
    user = only_user(product)
    if user is not None and experts_linear_of(user) is not None:  # the product and its bias
        product = user
    weighted = only_user(product)
    total = only_user(weighted) if weighted is not None and is_call(weighted, aten.mul.Tensor) else None
    is_sum = total is not None and is_call(total, aten.sum.dim_IntList) and list(arg(total, 1)) == [0]
    return total if is_sum else None


def _share_of_mean(graph: fx.Graph, normed: fx.Node, num_ranks: int) -> tuple[fx.Node, fx.Node] | None:
    """Return a rank's share of the mean of squares, plus eps, that norms a row of which each rank has a part.

    The root that precedes `normed` most closely then reads the share. The second node is the mean, plus eps, itself.
    None if there is no root.
    """
    before = list(normed.all_input_nodes)
    for node in before:
        if is_call(node, aten.rsqrt.default):
            mean = arg(node, 0)
            with graph.inserting_before(node):
                share = emit(graph, aten.mul.Tensor, mean, 1 / num_ranks)
            node.replace_input_with(mean, share)
            return share, mean
        before += node.all_input_nodes
    return None


def _summed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert an all-reduce of the node's value, and return the new node. All users of `node` then read the new node."""
    users = list(node.users)
    with graph.inserting_after(node):
        new = emit(graph, all_reduce, node)
    for user in users:
        user.replace_input_with(node, new)
    return new
