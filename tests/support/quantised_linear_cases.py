"""Random quantised linears, whose inputs lie on the grid that they are rounded to, for tests here and elsewhere.

On the grid a rounding in another order changes no code, so kernels can be compared closely; Triton's interpreter
also rounds to 8 bits without a carry into the exponent, and is exact for what needs no rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.passes.framework.rounding import spread, to_words
from compiled_engine.passes.linear.quantised_linear_op import launch, reference
from compiled_engine.quantisation import LinearScheme
from compiled_engine.quantisation_names import ONLINE

BY_ROWS, BY_BLOCKS = ONLINE["fp8"], ONLINE["fp8_block"]
SCHEMES = (
    BY_ROWS,
    BY_BLOCKS,
    "e4m3 1x*, inputs e4m3 static",
    "e4m3 1x*",
    "e4m3 64x128, inputs e4m3 1x*",
    "e4m3 1x64, inputs e4m3 1x64",
    "e4m3 1x*, inputs e4m3 1x128",
    "e4m3 128x128",
    "int8 1x*, inputs int8 1x*",
    "int8 *x*, inputs int8 static",
    "int8 1x64, inputs int8 1x32",
)
# Smallest and largest scales are three decades apart.
DECADES = 3


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_rows: int
    k: int
    bias: bool = False
    residual: bool = False
    silu_mul: bool = False
    activation: str = "silu"

    def __str__(self) -> str:
        names = [name for name in ("bias", "residual", "silu_mul") if getattr(self, name)]
        return f"{self.num_tokens}x{self.num_rows}x{self.k} {' '.join(names)}".strip()


# Weights alone in four and 8 bits: groups, whole rows, groups that K does not fill, zero points, and small groups.
INTEGERS = ("int4 1x128", "int4 1x32", "int4 1x*", "uint4 1x64", "uint4 1x96", "uint4 1x*")
INTEGERS += ("int8 1x128", "int8 1x*", "uint8 1x32", "uint8 1x*")
ALONE = (*INTEGERS, "e2m1 1x16", "e2m1 1x32", "uint4 1x16")


def codes(shape: tuple[int, ...], generator: torch.Generator, device: str, element: str = "e4m3") -> torch.Tensor:
    """Return random codes with all patterns of e4m3 but NaN, or of int8 but -128."""
    if element == "int8":
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8).to(device)
    patterns = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    return (patterns | signs).view(torch.float8_e4m3fn).to(device)


def packed(scheme: LinearScheme, num_rows: int, k: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Return random packed codes with all patterns of a byte."""
    shape = scheme.weight.stored(num_rows, k)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(scheme.weight.dtype).to(device)


def scales(shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    """Return random scales, log-uniform over DECADES."""
    return (10 ** (DECADES * (torch.rand(shape, generator=generator) - 1)) / 448).to(device)


def arguments_of(case: Case, scheme: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Return the op's arguments. x: codes times powers of two; in each tile the largest code occurs with factor 1."""
    parsed = LinearScheme.parse(scheme)
    generator = torch.Generator().manual_seed(case.num_tokens + 1000 * case.num_rows + case.k)
    T, N, K = case.num_tokens, case.num_rows, case.k
    outputs = N // 2 if case.silu_mul else N

    in_bytes = parsed.weight.element != "e4m3"
    most = 16 if parsed.weight.format.bits == 4 else 255  # GPTQ's zero points of four bits end with 16
    zeros = torch.randint(0, most + 1, parsed.weight.grid(N, K), generator=generator, dtype=torch.uint8)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    grid = (1, 1)
    element = "e4m3" if parsed.inputs is None else parsed.inputs.element
    x_TK = codes((T, K + 16), generator, device, element).float()
    if parsed.inputs is not None:
        grid = parsed.inputs.grid(T, K)
        columns = K if parsed.inputs.static else parsed.inputs.columns or K
        x_TK[:, :K:columns] = parsed.inputs.largest
    powers = torch.randint(-9, -4, grid, generator=generator).float().exp2().to(device)
    if parsed.inputs is not None:
        x_TK[:, :K] *= spread(powers, parsed.inputs, T, K)
    else:
        x_TK *= 2.0**-7
    return {
        "x_TK": x_TK.to(dtype)[:, :K],
        "codes_NK": packed(parsed, N, K, generator, device) if in_bytes else codes((N, K), generator, device),
        "scales_RC": scales(parsed.weight.grid(N, K), generator, device),
        "zeros_RC": zeros.to(device) if parsed.weight.format.has_zeros else None,
        "input_scale_1": powers.view(1) if parsed.inputs is not None and parsed.inputs.static else None,
        "bias_N": normal(N) if case.bias else None,
        "scheme": scheme,
        "residual_TM": normal(T, outputs) if case.residual else None,
        "silu_mul": case.silu_mul,
        "activation": case.activation,
    }


def in_words(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with codes, scales and zero points in the layout of Hopper's kernel."""
    zeros = given["zeros_RC"]
    return given | {
        "codes_NK": to_words(given["codes_NK"]),
        "scales_RC": given["scales_RC"].t().contiguous(),
        "zeros_RC": None if zeros is None else zeros.t().short().contiguous(),
    }


def assert_kernels_compute_the_reference(
    case: Case, scheme: str, dtype: torch.dtype, change: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> None:
    """Compare the kernels with the reference on a GPU, with memory that was NaN, also in a replayed graph.

    change: of the kernels' arguments.
    """
    given = arguments_of(case, scheme, dtype, "cuda")
    expected = reference(**given).float()
    given = change(given)
    with nan_in_new_tensors():
        first = launch(**given)
    tolerance = 2.0 ** (-7 if dtype == torch.bfloat16 else -9) * float(expected.abs().max())
    assert float((first.float() - expected).abs().max()) <= tolerance
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch(**given) for _ in range(3)]
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(output, first) for output in outputs)
