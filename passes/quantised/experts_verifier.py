"""Verifies quantise_experts: compares expert matrices with the checkpoint's layout, by element and on every rank.

Each projection of each expert gets a random checkpoint: undivided codes and scales according to its rules, or a weight
that is quantised while loading. The expected values are computed from each element's position alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import PassResult
from compiled_engine.passes.framework.matching import aten, is_call, named, only_user
from compiled_engine.passes.framework.parameter import CODES, ROW_SCALES, SCALES, ZEROS, Parameter, compute
from compiled_engine.passes.framework.rounding import retile
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.experts_codes import experts_weight, modules_of, of_experts, projections_of
from compiled_engine.passes.linear.linears import by_rows, is_by_columns
from compiled_engine.passes.quantised.quantise_verifier import (
    at_each_element,
    nearest_integers,
    random_codes,
    random_values,
    random_zeros,
    rounded,
    scale_of_each,
    values_of_codes,
)
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

Sizes = tuple[int, int]


@torch.no_grad()
def verify_experts(
    before: fx.Graph, result: PassResult, quantisation: Quantisation, num_ranks: int, device: torch.device
) -> int:
    """Check all replacements of the pass, and return their number. before: the graph before the pass.

    Raises VerificationError, which names the matrix and the error.
    """
    originals = {node.name: node for node in before.nodes}
    weights = {parameter_of(node).name: by_rows(node) for node in filter(is_parameter, before.nodes)}
    for replacement in result.replacements:
        old, new = originals[replacement.before], replacement.after
        name = f"pass quantise_experts: {new.name}, which replaced {replacement.before},"
        if not is_call(new, experts_weight):
            raise VerificationError(f"{name} is no matrix of codes")
        arguments, weight, by_columns = named(new), by_rows(old), is_by_columns(old)
        names = "codes_ENK", "scales_ERC", "zeros_ERC", "row_scales_ER1"
        parts = {part: arguments[part] for part in names if arguments[part] is not None}
        if not all(map(is_parameter, parts.values())):
            raise VerificationError(f"{name} reads what is no parameter")
        if arguments["dtype"] != weight.dtype:
            raise VerificationError(f"{name} is decoded to {arguments['dtype']} instead of {weight.dtype}")
        read = only_user(new) if by_columns else new
        if read is None or (by_columns and not (is_call(read, aten.transpose.int) and read.args[1:] == (1, 2))):
            raise VerificationError(f"{name} is not read by columns")
        if {user.name for user in read.users} != {user.name for user in old.users}:
            raise VerificationError(f"{name} is read by others")
        for rank in range(num_ranks):
            checkpoint = _Checkpoint(quantisation, weights, rank, num_ranks, device)
            expected = checkpoint.stands_for(weight, old)
            try:
                given = {part: compute(parameter_of(node), checkpoint.read) for part, node in parts.items()}
                found = new.target(**arguments | given | {"dtype": "float32"})  # type: ignore[operator]
                error = float((found - expected).abs().max())
            except RuntimeError as problem:
                raise VerificationError(f"{name} cannot be computed: {problem}") from problem
            if not torch.allclose(found, expected, rtol=1e-5, atol=0.0):
                raise VerificationError(f"{name} is off by {error:.3g} on rank {rank}")
    return len(result.replacements)


@dataclass(frozen=True)
class _Checkpoint:
    """A random checkpoint, as one rank reads it. Its expert matrices are quantised, or become so while being loaded."""

    quantisation: Quantisation
    weights: Mapping[str, Parameter]  # all weights, by name
    rank: int
    num_ranks: int
    device: torch.device

    def stands_for(self, weight: Parameter, node: fx.Node) -> torch.Tensor:
        """Return the values [E, N, K], in fp32, that this rank's codes of a weight must decode to.

        node: the weight in the graph before the pass, which may have the shape [E, K, N].
        """
        if self.quantisation.is_online:
            parts, tile = len(projections_of(weight.name)), self._local(weight)
            given = self.read(parameter_of(node)).float()
            matrices = [part for matrix in (given.mT if is_by_columns(node) else given) for part in matrix.chunk(parts)]
            if tile.is_integer:
                return torch.cat([nearest_integers(each, tile) for each in matrices]).view(weight.shape)
            found = [codes.float() * scales for codes, scales in (rounded(each, tile, None) for each in matrices)]
            return torch.cat(found).view(weight.shape)
        tile = self._rounding(weight.name)

        def values(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, shape: Sizes) -> torch.Tensor:
            factors = at_each_element(scale_of_each(scales, tile), tile, *shape)
            return values_of_codes(codes, zeros, tile, shape) * factors

        whole = self._stacked(weight.name, values)
        if tile.format.row_scales:
            whole *= self._scales_of_rows(weight.name)
        return self._of_rank(whole, weight.shard)

    def read(self, leaf: Parameter) -> torch.Tensor:
        """Return this rank's part of a parameter as the checkpoint has it. leaf: a parameter that is not packed."""
        name = leaf.name.rpartition(".")[0]
        if leaf.role == CODES:
            return self._of_rank(self._stacked(name, lambda codes, scales, zeros, shape: codes), leaf.shard)
        if leaf.role == ROW_SCALES:
            return self._of_rank(self._scales_of_rows(name), leaf.shard)
        if leaf.role in (SCALES, ZEROS):
            stored, kept, is_zeros = self._rounding(name), LinearScheme.parse(leaf.scheme).weight, leaf.role == ZEROS

            def of_tiles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, shape: Sizes) -> torch.Tensor:
                return retile(zeros if is_zeros else scales, stored, kept, *shape)

            return self._of_rank(self._stacked(name, of_tiles), leaf.shard)
        shape = leaf.shape if leaf.shard is None else leaf.shard.whole
        return self._of_rank(random_values(leaf.name, shape, self.device).to(leaf.torch_dtype), leaf.shard)

    def _stacked(self, name: str, part: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Call `part` for each projection and return the results, stacked: [experts, rows of all projections, ...].

        part: a function of the codes, scales, zero points and shape of one projection.
        """
        weight, rounding, projections = self.weights[name], self._rounding(name), projections_of(name)
        num_experts, num_rows, k = weight.shape if weight.shard is None else weight.shard.whole
        made = []
        for expert in range(num_experts):
            for projection in projections:
                shape, matrix = (num_rows // len(projections), k), f"{name} {expert} {projection}"
                codes, scales = random_codes(matrix, shape, rounding, self.device)
                made.append(part(codes, scales, random_zeros(matrix, shape, rounding, self.device), shape))
        return torch.cat(made).unflatten(0, (num_experts, -1))

    def _scales_of_rows(self, name: str) -> torch.Tensor:
        """Return for each row the scale of its projection's matrix, which differs between experts and projections."""

        def of_matrix(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, shape: Sizes) -> torch.Tensor:
            return scales.float().mean().expand(shape[0], 1) / 1024

        return self._stacked(name, of_matrix)

    def _rounding(self, name: str) -> Rounding:
        """Return the rounding of an expert matrix, by that of its first expert.

        Raises VerificationError if it is not quantised.
        """
        scheme = self.quantisation.of_parameter(name, modules_of(name, 1))
        if isinstance(scheme, str):
            raise VerificationError(f"pass quantise_experts: {name} is quantised, but {scheme}")
        return of_experts(scheme.weight)

    def _local(self, weight: Parameter) -> Rounding:
        """Return the rounding of a weight that is quantised while loading.

        Each rank quantises its own part, so tiles are cut to end where the part does.
        """
        rounding, (_, rows, columns) = self._rounding(weight.name), weight.shape
        divided = rounding.columns and weight.shard is not None and weight.shard.divides_input
        return Rounding(
            rounding.element,
            math.gcd(rounding.rows or 1, rows // len(projections_of(weight.name))),
            math.gcd(rounding.columns, columns) if divided else rounding.columns,
        )

    def _of_rank(self, whole: torch.Tensor, shard: Shard | None) -> torch.Tensor:
        return whole if shard is None else shard.of(whole, self.rank, self.num_ranks)
