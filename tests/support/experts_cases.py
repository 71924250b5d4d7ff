"""Random layers of experts, and what they must compute, for tests here, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compiled_engine.passes.framework.rounding import codes_of, decode, in_halves, scales_of, unit_of
from compiled_engine.quantisation import Rounding


@dataclass(frozen=True)
class Case:
    """A layer of experts, with the variant of its norm, gate and routing."""

    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int = 64
    width: int = 48
    renormalise: bool = True
    norm: bool = False
    residual: bool = False
    gemma: bool = False  # the norm is Gemma's, and the gate a gelu
    gpt_oss: bool = False  # biases, and a clamped gate of alternating rows of gate and up
    given: bool = False  # the op gets the chosen experts and their weights instead of logits


CASES = (
    Case(1, 8, 2, norm=True, residual=True),
    Case(1, 5, 3, hidden_size=72, width=40, renormalise=False),
    Case(1, 128, 8, norm=True, gemma=True),
    Case(2, 8, 2, residual=True),
    Case(5, 128, 8, norm=True),
    Case(9, 1, 1),
    Case(40, 6, 6, hidden_size=72, width=40, renormalise=False, norm=True, gemma=True, residual=True),
    Case(64, 4, 2),
    Case(65, 16, 2, residual=True),
    Case(150, 3, 1),
    Case(1, 32, 4, hidden_size=72, width=40, norm=True, residual=True, gpt_oss=True),
    Case(7, 32, 4, hidden_size=72, width=40, norm=True, residual=True, gpt_oss=True),
    Case(70, 4, 2, gpt_oss=True),
    Case(1, 8, 3, renormalise=False, norm=True, residual=True, given=True),
    Case(1, 5, 2, hidden_size=72, width=40, renormalise=False, gpt_oss=True, given=True),
    Case(6, 8, 3, renormalise=False, residual=True, given=True),
    Case(3, 9, 1, renormalise=False, norm=True, residual=True, given=True),
    Case(2, 9, 2, hidden_size=72, width=40, norm=True, residual=True),
    Case(70, 6, 2, renormalise=False, norm=True, given=True),
)
ALPHA, LIMIT = 1.702, 1.5
# Roundings of weights: tiles that end inside, and whole rows.
CODES = ("e4m3 1x*", "e4m3 32x32", "e4m3 128x128", "int8 1x32")
# The same with random codes: with zero points of 8 bits, and with two codes to a byte.
RANDOM = (
    "uint8 1x32",
    "uint8 1x*",
    "mxfp4 1x32",
    "mxfp4 1x8",
    "nvfp4 1x16",
    "nvfp4 1x8",
    "int4 1x32",
    "int4 1x128",
    "int4 1x*",
    "uint4 1x32",
)


def arguments_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """Return the op's arguments, in order. Logits differ enough that no rounding changes their order."""
    generator = torch.Generator(device).manual_seed(case.num_tokens + 1000 * case.num_experts)
    T, E, D, I = case.num_tokens, case.num_experts, case.hidden_size, case.width  # noqa: E741

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    places_TE = torch.stack([torch.randperm(E, generator=generator, device=device) for _ in range(T)])
    chosen_TX = places_TE[:, : case.top_k]
    return (
        normal(T, D),
        normal(T, case.top_k).float() if case.given else (places_TE / 16).to(dtype),
        normal(E, 2 * I, D) / D**0.5,
        normal(E, D, I) / I**0.5,
        normal(E, 2 * I) if case.gpt_oss else None,
        normal(E, D) if case.gpt_oss else None,
        case.top_k,
        case.renormalise,
        "gelu_tanh" if case.gemma else "silu",
        *((ALPHA, LIMIT, True) if case.gpt_oss else (0.0, 0.0, False)),
        normal(D) / 4 if case.norm else None,
        1e-5,
        1.0 if case.gemma else 0.0,
        case.gemma,
        normal(T, D) if case.residual else None,
        chosen_TX if case.given else None,
    )


def encoded(arguments: tuple[Any, ...], text: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the op's arguments with weights as codes of a Rounding, and those of `expected` with decoded weights."""
    return with_random_codes(arguments, text) if text in RANDOM else with_codes(arguments, text)


def with_codes(arguments: tuple[Any, ...], text: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the op's arguments with weights as codes in tiles, and those of `expected` with decoded weights."""
    rounding = Rounding.parse(text)
    weights, values = [], []
    for weight_ENK in arguments[2:4]:
        scales = [scales_of(each, rounding) for each in weight_ENK]
        codes = [codes_of(each, scale, rounding) for each, scale in zip(weight_ENK, scales, strict=True)]
        weights.append((torch.stack(codes), torch.stack(scales)))
        values.append(torch.stack([decode(*each, rounding) for each in zip(codes, scales, strict=True)]))
    (gate_up, gate_up_scales), (down, down_scales) = weights
    coded = (*arguments[:2], gate_up, down, *arguments[4:], gate_up_scales, down_scales, text, text)
    return coded, (*arguments[:2], *values, *arguments[4:])


def with_random_codes(arguments: tuple[Any, ...], text: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the same as with_codes for random codes, those of four bits in the order that kernels read."""
    rounding, device = Rounding.parse(text), arguments[0].device
    generator = torch.Generator(device).manual_seed(7)
    codes, scales, zeros, row_scales, values = [], [], [], [], []

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    for weight in arguments[2:4]:
        E, N, K = weight.shape
        grid = E, *rounding.grid(N, K)
        codes.append(integers(0, 256, (E, *rounding.stored(N, K))))
        zeros.append(integers(0, 2**rounding.format.bits, grid))
        powers = integers(0, 4, grid)  # the largest scale is around a quarter of the values' size
        row_scales.append(None)
        if rounding.format.row_scales:  # all scales in e4m3, subnormal and negative ones included, but not NaN
            bits = integers(0, 127, grid) + 128 * (powers == 0).to(torch.uint8)
            scales.append(bits.view(torch.float8_e4m3fn))
            row_scales[-1] = (1 + torch.rand(E, N, 1, generator=generator, device=device)) / (500 * K**0.5)
        else:
            in_bytes = rounding.format.scales == torch.uint8
            size = 0.5 / 2**rounding.format.bits
            scales.append(powers + int(121 - math.log2(K) / 2) if in_bytes else size * (1 + powers) / K**0.5)
        of_matrices = zip(codes[-1], scales[-1], zeros[-1], strict=True)
        values.append(torch.stack([decode(codes, scales, rounding, zeros) for codes, scales, zeros in of_matrices]))
        values[-1] *= 1 if row_scales[-1] is None else row_scales[-1]
        if rounding.format.per_byte > 1:
            codes[-1] = in_halves(codes[-1], unit_of(rounding, K))
    if not rounding.format.has_zeros:
        zeros = [None, None]
    coded = (*arguments[:2], *codes, *arguments[4:], *scales, text, text, *zeros, *row_scales)
    return coded, (*arguments[:2], *values, *arguments[4:])


def expected(arguments: Sequence[Any]) -> torch.Tensor:
    """Return the result in float64: every expert on every token, with weight 0 for experts that are not chosen."""
    *op_arguments, given = arguments
    tensors = [a.double() if isinstance(a, torch.Tensor) and a.ndim < 3 else a for a in op_arguments]
    x, logits, gate_ups, downs, gate_up_bias, down_bias, top_k, renormalise, activation, *others = tensors
    alpha, limit, interleaved, norm, eps, offset, _, residual = others
    if norm is not None:
        x = x * (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5 * (norm + offset)
    if given is None:
        powers = logits.exp()
        least = logits.sort(-1, descending=True).values[:, top_k - 1 : top_k]
        chosen = powers * (logits >= least)
        weights = chosen / (chosen if renormalise else powers).sum(-1, keepdim=True)
    else:
        weights = logits.new_zeros(len(x), len(gate_ups)).scatter(1, given, logits)
    gelu = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh")}
    y = torch.zeros_like(x) if residual is None else residual
    for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):  # all at once are gigabytes
        product = x @ gate_up.double().T + (0 if gate_up_bias is None else gate_up_bias[expert])
        gate, up = (product[..., ::2], product[..., 1::2]) if interleaved else product.chunk(2, -1)
        hidden = gelu[activation](gate) * up
        if limit:
            gate = gate.clamp(max=limit)
            hidden = gate / (1 + (-alpha * gate).exp()) * (1 + up.clip(-limit, limit))
        made = hidden @ down.double().T + (0 if down_bias is None else down_bias[expert])
        y = y + made * weights[:, expert, None]
    return y


def error(got: torch.Tensor, arguments: tuple[Any, ...]) -> float:
    """Return the largest difference, relative to the largest value; NaN if a value is NaN."""
    right = expected(arguments)
    return float((got.double() - right).abs().max() / right.abs().max())
