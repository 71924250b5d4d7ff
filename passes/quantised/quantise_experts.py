"""Keeps the expert matrices that the model's quantisation rules name as codes and scales, decoded in experts' kernels.

Why: with few tokens a mixture of experts costs the read of the experts in use. With codes of 8 or four bits this is a
half or a quarter, and two or four times as many experts fit into memory. The matrices become calls of experts_weight;
the pass `experts` then passes codes and scales to its own op. Rules name each projection of each expert, unless
Quantisation.stored says how the checkpoint has the whole matrix. As in `quantise`, the pass sees a rank's part of a
matrix, and cuts tiles smaller if the part does not end with a tile.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, emit, fake_mode_of
from compiled_engine.passes.framework.parameter import CODES, ROW_SCALES, SCALES, WEIGHT, ZEROS, Parameter, made
from compiled_engine.passes.framework.rounding import unit_of
from compiled_engine.passes.linear.experts_codes import (
    experts_weight,
    modules_of,
    obstacle,
    of_experts,
    projections_of,
)
from compiled_engine.passes.linear.linears import by_rows, is_by_columns
from compiled_engine.passes.quantised.quantise import scales_shard, shard_of_tiles
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding


class QuantiseExperts(GraphPass):
    name = "quantise_experts"
    required = True  # its parameters make the loader read codes

    def __init__(
        self,
        quantisation: Quantisation,
        device: torch.device,
        num_ranks: int = 1,
        before: fx.Graph | None = None,
    ):
        """Make the pass. num_ranks: tensor-parallel ranks. before: a copy of the graph, which only `verify` reads."""
        self._quantisation, self._device, self._num_ranks, self._before = quantisation, device, num_ranks, before

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of expert matrices that the rules name and the kernels support: one match each."""
        return sum(isinstance(rounding, Rounding) for rounding in self._roundings(graph).values())

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        notes: list[str] = []
        for node, rounding in self._roundings(graph).items():
            if isinstance(rounding, Rounding):
                new = _rewrite(graph, node, rounding, self._quantisation.is_online)
                replacements.append(Replacement(node.name, new))
                text = f"{rounding}, inputs stay {parameter_of(node).dtype}; {self._origin}; {_bytes_of(new):,} bytes"
                graph.erase_node(node)
            else:
                text = f"stays in 16 bits: {rounding}"
            notes.append(f"{parameter_of(node).name}: {text}")
        return PassResult(len(replacements), (), tuple(replacements), tuple(notes))

    @property
    def _origin(self) -> str:
        return "made while it is loaded" if self._quantisation.is_online else self._quantisation.method

    def _roundings(self, graph: fx.Graph) -> dict[fx.Node, Rounding | str]:
        """Return the rounding of each expert matrix [E, N, K] of the graph, or why it stays in 16 bits."""
        return {node: self._rounding(node) for node in filter(is_experts, graph.find_nodes(op="placeholder"))}

    def _rounding(self, node: fx.Node) -> Rounding | str:
        weight = by_rows(node)
        num_experts, num_rows, num_columns = weight.shape
        scheme = self._quantisation.of_parameter(weight.name, modules_of(weight.name, num_experts))
        if isinstance(scheme, str):
            return scheme
        # The projections' rows are stacked.
        of_share = num_columns if weight.shard is not None and weight.shard.divides_input else 0
        scheme = scheme._replace(weight=of_experts(scheme.weight), inputs=None)
        scheme = scheme.dividing(num_rows // len(projections_of(weight.name)), of_share)
        reason = obstacle(scheme, num_columns, weight.torch_dtype, self._device)
        return scheme.weight if reason is None else reason

    def verify(self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device) -> int:
        """Compare each matrix, on each rank, with the values of a random checkpoint; see experts_verifier.

        Returns the number of matrices compared.
        """
        from compiled_engine.passes.quantised.experts_verifier import verify_experts

        assert self._before is not None
        return verify_experts(self._before, result, self._quantisation, self._num_ranks, device)


def is_experts(node: fx.Node) -> bool:
    """Return whether an input of a graph is a matrix of experts that the rules may name, [E, N, K] or [E, K, N]."""
    return is_parameter(node) and node.meta["val"].dim() == 3 and bool(projections_of(parameter_of(node).name))


def _rewrite(graph: fx.Graph, node: fx.Node, rounding: Rounding, is_online: bool) -> fx.Node:
    weight, like, text, element = by_rows(node), node.meta["val"], str(rounding), rounding.format
    num_experts, *matrix = weight.shape
    grid = num_experts, *rounding.grid(*matrix)
    stored = num_experts, *rounding.stored(*matrix)
    codes = Parameter(f"{weight.name}.{CODES}", stored, _name(rounding.dtype), CODES, scheme=text)
    scales = Parameter(f"{weight.name}.{SCALES}", grid, _name(element.scales), SCALES, scheme=text)
    if is_online:
        whole, in_order = (parameter_of(node),), (("by_rows", ""),) * is_by_columns(node)
        codes, scales = (
            replace(each, role=WEIGHT, members=whole, make=(*in_order, (each.role, text)), scheme="")
            for each in (codes, scales)
        )
    elif weight.shard is not None:
        codes = replace(codes, shard=shard_of_tiles(weight.shard, 1, element.per_byte))
        scales = replace(scales, shard=scales_shard(weight.shard, LinearScheme(rounding, None)))
    parameters = {CODES: codes, SCALES: scales}
    if element.per_byte > 1:
        packed = torch.empty(stored, dtype=rounding.dtype, device="meta")
        parameters[CODES] = made(codes, "halves", unit_of(rounding, weight.shape[2]), packed)
    if element.has_zeros:
        parameters[ZEROS] = replace(scales, name=f"{weight.name}.{ZEROS}", dtype="uint8", role=ZEROS)
    if element.row_scales:
        shard = None if weight.shard is None else shard_of_tiles(weight.shard, 1, 0)
        name, shape = f"{weight.name}.{ROW_SCALES}", (*weight.shape[:2], 1)
        parameters[ROW_SCALES] = Parameter(name, shape, "float32", ROW_SCALES, shard=shard, scheme=text)
    inputs: dict[str, fx.Node] = {}
    for role, parameter in parameters.items():
        with graph.inserting_before(node), fake_mode_of(like):
            new = graph.placeholder(re.sub(r"\W", "_", parameter.name))
            new.meta["val"] = torch.empty(parameter.shape, dtype=parameter.torch_dtype, device=like.device)
            new.meta["source"] = parameter
        inputs[role] = new
    beside = inputs[SCALES], inputs.get(ZEROS), text, weight.dtype, inputs.get(ROW_SCALES)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        decoded = emit(graph, experts_weight, inputs[CODES], *beside)
    value = decoded
    if is_by_columns(node):
        with graph.inserting_after(decoded):
            value = emit(graph, aten.transpose.int, decoded, 1, 2)
    node.replace_all_uses_with(value)
    return decoded


def _bytes_of(decoded: fx.Node) -> int:
    return sum(parameter_of(part).nbytes for part in decoded.all_input_nodes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
