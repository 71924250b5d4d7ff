"""Shapes and options of the small-batch linear, and what it must compute, for tests here and in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

EPS = 3e-5


@dataclass(frozen=True)
class Case:
    """A shape and the options of a small-batch linear."""

    num_tokens: int
    num_rows: int  # of the weight; with silu_mul half as many results
    k: int
    norm: bool = False
    bias: bool = False
    silu_mul: bool = False
    residual: bool = False
    gemma: bool = False  # norm and gate are Gemma's

    def __str__(self) -> str:
        names = [name for name in ("norm", "bias", "silu_mul", "residual", "gemma") if getattr(self, name)]
        return f"{self.num_tokens}x{self.num_rows}x{self.k} {' '.join(names)}".strip()


@dataclass(frozen=True)
class Arguments:
    """The arguments of the op, in order."""

    x_TK: torch.Tensor
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    norm_weight_K: torch.Tensor | None
    eps: float
    residual_TM: torch.Tensor | None
    silu_mul: bool
    activation: str
    norm_offset: float
    norm_wide: bool

    def values(self) -> tuple[object, ...]:
        return tuple(vars(self).values())


def arguments_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Arguments:
    """Return random arguments. x is a slice of a wider tensor, so its rows do not follow one another."""
    generator = torch.Generator().manual_seed(case.num_tokens + 1000 * case.num_rows + case.k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    outputs = case.num_rows // 2 if case.silu_mul else case.num_rows
    return Arguments(
        normal(case.num_tokens, case.k + 8)[:, : case.k],
        normal(case.num_rows, case.k) / case.k**0.5,
        normal(case.num_rows) if case.bias else None,
        1 + 0.2 * normal(case.k) if case.norm else None,
        EPS,
        normal(case.num_tokens, outputs) if case.residual else None,
        case.silu_mul,
        "gelu_tanh" if case.gemma else "silu",
        1.0 if case.gemma else 0.0,
        case.gemma,
    )


def large_float16(device: str = "cpu") -> Arguments:
    """Return arguments like the massive activations of Qwen2.5-0.5B: times the norm's weight, they exceed float16."""
    given = arguments_of(Case(4, 64, 896, norm=True), torch.float16, device)
    assert given.norm_weight_K is not None
    return replace(given, x_TK=given.x_TK.sign() * 9000, norm_weight_K=torch.full_like(given.norm_weight_K, 8))


def expected(given: Arguments) -> torch.Tensor:
    """Return the result in float64, from the formula and not with the models' ops."""
    x = given.x_TK.double()
    if given.norm_weight_K is not None:
        mean_square = torch.einsum("tk,tk->t", x, x) / x.shape[1]
        x = torch.einsum(
            "tk,k,t->tk", x, given.norm_weight_K.double() + given.norm_offset, (mean_square + given.eps) ** -0.5
        )
    y = torch.einsum("tk,nk->tn", x, given.weight_NK.double())
    if given.bias_N is not None:
        y = y + given.bias_N.double()
    if given.silu_mul:
        width = y.shape[1] // 2
        gate, up = y[:, :width], y[:, width:]
        inner = gate if given.activation == "silu" else math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
        y = gate / (1 + torch.exp(-inner)) * up
    return y if given.residual_TM is None else y + given.residual_TM.double()


def error(got: torch.Tensor, given: Arguments) -> float:
    """Return the largest difference, relative to the largest value; NaN if a value is NaN."""
    right = expected(given)
    return float((got.double() - right).abs().max() / right.abs().max())


@contextmanager
def nan_in_new_tensors() -> Iterator[None]:
    """Let torch.empty return NaN within a block, so that elements which a kernel does not write are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
