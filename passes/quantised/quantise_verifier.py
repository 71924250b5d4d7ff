"""Verifies quantise: compares quantised linears with the checkpoint's layout, element by element and on every rank.

Each weight gets a random checkpoint: undivided codes and scales according to its rules, or a weight that is quantised
while loading. Expected values and rounded inputs are computed from each element's position alone, without the engine's
code for loading, retiling or rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import PassResult
from compiled_engine.passes.framework.parameter import CODES, COLUMNS, INPUT_SCALE, SCALES, ZEROS, Parameter, compute
from compiled_engine.passes.framework.rounding import retile
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.linears import Linear, linear_of
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

NUM_TOKENS = 5
# Relative to a row's largest result: the order of summation differs, and results are rounded to x's dtype.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


@torch.no_grad()
def verify_quantised(
    before: fx.Graph, result: PassResult, quantisation: Quantisation, num_ranks: int, device: torch.device
) -> int:
    """Check all replacements of the pass, and return their number. before: the graph before the pass.

    Raises VerificationError, which names the linear and the error.
    """
    originals = {node.name: node for node in before.nodes}
    weights = {parameter_of(node).name: parameter_of(node) for node in filter(is_parameter, before.nodes)}
    for replacement in result.replacements:
        old, new = linear_of(originals[replacement.before]), linear_of(replacement.after)
        name = f"pass quantise: {replacement.after.name}, which replaced {replacement.before},"
        if old is None or new is None or new.quantised is None:
            raise VerificationError(f"{name} is no quantised linear")
        if not all(map(is_parameter, new.parameters)):
            raise VerificationError(f"{name} reads what is no parameter")
        if new.x.name != old.x.name or (new.bias and new.bias.name) != (old.bias and old.bias.name):
            raise VerificationError(f"{name} has another input or bias")
        for rank in range(num_ranks):
            _verify(name, _Checkpoint(quantisation, weights, rank, num_ranks, device), old, new)
    return len(result.replacements)


@dataclass(frozen=True)
class _Checkpoint:
    """A random checkpoint with quantised weights, as one rank reads it."""

    quantisation: Quantisation
    weights: Mapping[str, Parameter]  # all weights, by name
    rank: int
    num_ranks: int
    device: torch.device

    def stands_for(self, name: str) -> torch.Tensor:
        """Return the values [N, K], in fp32, that this rank's codes of the weight `name` must decode to."""
        rounding = self._scheme(name).weight
        if self.quantisation.is_online:
            weight = self.weights[name]
            values = self.read(weight).float()
            if rounding.format.zero is not None:
                return nearest_integers(values, _ending_with_the_share(rounding, weight))
            codes, scales = rounded(values, _ending_with_the_share(rounding, weight), None)
            return codes.float() * scales
        values = values_of_codes(self._stored(name)[0], self._zeros(name), rounding, self._whole(name))
        values *= at_each_element(self._stored(name)[1], rounding, *values.shape)
        if self._scheme(name).reordered:
            found = torch.empty_like(values)
            for place, column in enumerate(self.columns(name).tolist()):
                found[:, column] = values[:, place]
            values = found
        return self._of_rank(values, self.weights[name].shard)

    def columns(self, name: str) -> torch.Tensor:
        """Return, for each column of the codes, the index of the weight's column that it represents; int32 [K]."""
        return self._random(f"{name} columns", self._whole(name)[1:]).argsort().int()

    def input_scale(self, name: str) -> torch.Tensor:
        return 0.01 * (1 + self._random(f"{name} inputs", (1,)).abs())

    def read(self, leaf: Parameter) -> torch.Tensor:
        """Return this rank's part of a parameter as the checkpoint has it. leaf: a parameter that is not packed."""
        name = leaf.name.rpartition(".")[0]
        if leaf.role == INPUT_SCALE:
            return self.input_scale(name)
        if leaf.role == COLUMNS:
            return self.columns(name)[None]
        if leaf.role == CODES:
            return self._of_rank(self._stored(name)[0], leaf.shard)
        if leaf.role in (SCALES, ZEROS):
            of_tiles = self._stored(name)[1] if leaf.role == SCALES else self._zeros(name)
            tile = LinearScheme.parse(leaf.scheme).weight
            return self._of_rank(retile(of_tiles, self._scheme(name).weight, tile, *self._whole(name)), leaf.shard)
        shape = leaf.shape if leaf.shard is None else leaf.shard.whole
        return self._of_rank(self._random(leaf.name, shape).to(leaf.torch_dtype), leaf.shard)

    def _stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the undivided codes and scales of a weight, random and in the format that the rules state."""
        return random_codes(name, self._whole(name), self._scheme(name).weight, self.device)

    def _zeros(self, name: str) -> torch.Tensor:
        """Return the undivided, random zero points of a weight."""
        return random_zeros(name, self._whole(name), self._scheme(name).weight, self.device)

    def _whole(self, name: str) -> tuple[int, ...]:
        weight = self.weights[name]
        return weight.shape if weight.shard is None else weight.shard.whole

    def _scheme(self, name: str) -> LinearScheme:
        scheme = self.quantisation.of_parameter(name, (name.removesuffix(".weight"),))
        if isinstance(scheme, str):
            raise VerificationError(f"pass quantise: {name} is quantised, but {scheme}")
        return scheme

    def _of_rank(self, whole: torch.Tensor, shard: Shard | None) -> torch.Tensor:
        return whole if shard is None else shard.of(whole, self.rank, self.num_ranks)

    def _random(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return random_values(name, shape, self.device)


def random_values(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return normally distributed fp32 values of this shape; the same for the same name and shape."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def random_codes(
    name: str, shape: tuple[int, ...], rounding: Rounding, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes of a weight of this shape, and scales that span three decades.

    Both are the same for the same name, shape and rounding.
    """
    scales = random_values(f"{name} scales", rounding.grid(*shape), device).exp() * 1e-3
    if rounding.format.scales == torch.float8_e4m3fn:
        scales = (1e3 * scales).to(torch.float8_e4m3fn)
    elif rounding.format.scales == torch.uint8:
        scales = scales.log2().round().add(127).to(torch.uint8)
    if not rounding.dtype.is_floating_point:
        values = random_values(name, rounding.stored(*shape), device)
        least = torch.iinfo(rounding.dtype).min
        return (64 * values + 128).clamp(0, 255).add(least).to(rounding.dtype), scales
    codes = (random_values(name, shape, device) * rounding.largest / 4).clamp(-rounding.largest, rounding.largest)
    return codes.to(rounding.dtype), scales


def random_zeros(name: str, shape: tuple[int, ...], rounding: Rounding, device: torch.device) -> torch.Tensor:
    """Return a random zero point, uint8, for each tile of a weight of this shape; the same for the same arguments."""
    most = 2**rounding.format.bits - 1
    values = random_values(f"{name} zeros", rounding.grid(*shape), device)
    return ((values + 2) * most / 4).round().clamp(0, most).to(torch.uint8)


def scale_of_each(scales: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return stored scales in fp32. Scales in uint8 are exponents of powers of two, plus 127."""
    if rounding.format.scales != torch.uint8:
        return scales.float()
    return torch.tensor([2.0 ** (power - 127) for power in range(255)], device=scales.device)[scales.long()]


def values_of_codes(
    codes: torch.Tensor, zeros: torch.Tensor, rounding: Rounding, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the values of codes before they are multiplied by scales, computed from each element's position.

    zeros: the zero point of each tile; only read for formats that have zero points. shape: [N, K] of the values.
    """
    if rounding.dtype != torch.uint8:
        return codes.float()
    columns = torch.arange(shape[1], device=codes.device)
    per_byte, bits = rounding.format.per_byte, rounding.format.bits
    found = (codes[:, columns // per_byte].int() >> columns % per_byte * bits) % 2**bits
    if rounding.format.values:
        exponent, mantissa, sign = found // 2 % 4, found % 2, 1 - found // 8 * 2
        return sign * torch.where(exponent == 0, 0.5 * mantissa, 2.0 ** (exponent - 1) * (1 + 0.5 * mantissa))
    if rounding.format.has_zeros:
        return (found - at_each_element(zeros, rounding, *shape).int()).float()
    return (found - 2 ** (bits - 1)).float()


def _verify(name: str, checkpoint: _Checkpoint, old: Linear, new: Linear) -> None:
    assert new.quantised is not None
    weight, dtype = parameter_of(old.weight), old.node.meta["val"].dtype
    scheme = _local(checkpoint.quantisation, weight)
    values_NK = checkpoint.stands_for(weight.name)
    x_TK = torch.randn((NUM_TOKENS, values_NK.shape[1]), generator=torch.Generator().manual_seed(0)).exp()
    x_TK = x_TK.to(checkpoint.device)
    expected_TK = x_TK
    if scheme.inputs is not None:
        static = checkpoint.input_scale(weight.name) if scheme.inputs.static else None
        codes, scales = rounded(x_TK, scheme.inputs, static)
        expected_TK = codes.float() * scales
        # Stay away from ties between two codes, where an ulp of x would decide.
        x_TK = torch.where(x_TK.abs() > expected_TK.abs().amax(), x_TK, expected_TK + (x_TK - expected_TK) / 4)
    expected_TN = expected_TK @ values_NK.t()
    arguments = {each: compute(parameter_of(node), checkpoint.read) for each, node in new.quantised.parameters.items()}
    codes_NK = compute(parameter_of(new.weight), checkpoint.read)
    bias_N = None if old.bias is None else checkpoint.read(parameter_of(old.bias))
    if bias_N is not None:
        expected_TN += bias_N.float()
    try:
        found_TN = new.node.target(  # type: ignore[operator]
            x_TK.to(dtype),
            codes_NK,
            arguments["scales_RC"],
            arguments.get("zeros_RC"),
            arguments.get("input_scale_1"),
            None if new.bias is None else bias_N,
            str(new.quantised.scheme),
            columns_1K=arguments.get("columns_1K"),
        )
        error_T = (found_TN.float() - expected_TN).abs().amax(1)
    except RuntimeError as error:
        raise VerificationError(f"{name} cannot be computed: {error}") from error
    if not (error_T <= TOLERANCE[dtype] * expected_TN.abs().amax(1)).all():
        raise VerificationError(f"{name} is off by {float(error_T.max()):.3g} on rank {checkpoint.rank}")


def _ending_with_the_share(rounding: Rounding, weight: Parameter) -> Rounding:
    """Return the rounding with tiles cut so that they divide a rank's part of a weight quantised while it is loaded.

    Each rank quantises its own part, so no tile may cross the end of the part.
    """
    shard, (rows, columns) = weight.shard, weight.shape
    lengths = [rows] if shard is None or shard.dim != 0 else [length // parts for length, parts in shard.sections]
    divided = rounding.columns and shard is not None and shard.divides_input
    return Rounding(
        rounding.element,
        math.gcd(rounding.rows or 1, *lengths),
        math.gcd(rounding.columns, columns) if divided else rounding.columns,
    )


def nearest_integers(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the values after rounding to four-bit integers times a scale, in fp32.

    Each tile has the scale with the smallest squared error, of 20 candidates.
    """
    rows, columns = rounding.grid(*values.shape)
    tiles = torch.arange(rows * columns, device=values.device).view(rows, columns)
    place = at_each_element(tiles, rounding, *values.shape).flatten()
    largest = values.new_zeros(rows * columns).scatter_reduce_(0, place, values.abs().flatten(), "amax")
    best, least = torch.zeros_like(values), torch.full_like(largest, math.inf, dtype=torch.float64)
    for candidate in range(20):
        size = (1.075 - 0.025 * candidate) / 7.5
        scales = (largest * size).to(torch.bfloat16).float()[place].view(values.shape)
        found = torch.minimum(torch.maximum((values / scales).round(), scales.new_tensor(-8)), scales.new_tensor(7))
        found *= scales
        errors = torch.zeros_like(least).index_add_(0, place, (found - values).square().flatten().double())
        best = torch.where((errors < least)[place].view(values.shape), found, best)
        least = torch.minimum(least, errors)
    return best


def _local(quantisation: Quantisation, weight: Parameter) -> LinearScheme:
    """Return the weight's scheme, with groups of inputs that share a scale cut so that a rank holds whole groups."""
    scheme = quantisation.of_parameter(weight.name, (weight.name.removesuffix(".weight"),))
    assert not isinstance(scheme, str)
    divides = weight.shard is not None and weight.shard.divides_input
    if scheme.inputs is None or not scheme.inputs.columns or not divides:
        return scheme
    columns = math.gcd(scheme.inputs.columns, weight.shape[1])
    return LinearScheme(scheme.weight, Rounding(scheme.inputs.element, scheme.inputs.rows, columns))


def at_each_element(scales: torch.Tensor, rounding: Rounding, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return the scale of each element, [num_rows, num_columns], by the element's position. scales: one per tile."""
    rows = torch.arange(num_rows, device=scales.device) // (rounding.rows or num_rows)
    columns = torch.arange(num_columns, device=scales.device) // (rounding.columns or num_columns)
    return scales[rows[:, None], columns[None, :]]


def rounded(values: torch.Tensor, rounding: Rounding, static: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `values`. Return (codes in the dtype of `rounding`, the scale of each element).

    Both results have the shape of `values`. static: the scale to use, expandable to this shape; None: each tile's scale
    follows from its largest magnitude.
    """
    rows, columns = rounding.grid(*values.shape)
    if static is None:
        place = at_each_element(
            torch.arange(rows * columns, device=values.device).view(rows, columns), rounding, *values.shape
        )
        largest = torch.zeros(rows * columns, device=values.device)
        largest.scatter_reduce_(0, place.flatten(), values.abs().flatten(), "amax")
        # Divide by a tensor: for a Python number, PyTorch on CUDA multiplies by the reciprocal, and ties differ.
        scales = (largest / torch.full_like(largest, rounding.largest))[place]
    else:
        scales = static.expand(values.shape)
    found = (values / scales).clamp(-128 if rounding.is_integer else -rounding.largest, rounding.largest)
    return (found.round() if rounding.is_integer else found).to(rounding.dtype), scales
