"""The host side of quantised linears: whichever kernel computes a part, the op is what its reference says.

Kernels are plain torch that computes from what the launches give, so this needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from quantised_linear_cases import BY_BLOCKS, BY_ROWS, Case, arguments_of
from scripted_hopper import Scripted, scripted_hopper, spread
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.passes.framework.op_library import implementation
from compiled_engine.passes.framework.rounding import decode
from compiled_engine.passes.linear import quantised_kernels, quantised_product, round_inputs, silu_mul
from compiled_engine.passes.linear.quantised_linear_op import (
    gated_launch,
    gated_reference,
    launch,
    quantised_gated_rounded,
    reference,
)
from compiled_engine.passes.linear.quantised_product import Scaling
from compiled_engine.passes.linear.round_inputs import residual_rms_norm_rounded
from compiled_engine.passes.linear.round_inputs import round_inputs as round_op
from compiled_engine.passes.norm import residual_rms_norm, rms_norm
from compiled_engine.quantisation import LinearScheme, Rounding

pytestmark = pytest.mark.usefixtures("one_thread")

HOPPER, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)
TENSOR, WEIGHTS, ODD = "e4m3 1x*, inputs e4m3 static", "e4m3 1x*", "e4m3 8x40, inputs e4m3 1x40"
FEW_ROWS = "e4m3 8x128, inputs e4m3 1x128"
MIXED = "e4m3 1x*, inputs e4m3 1x128"


def triton_product(scripted: Scripted) -> Any:
    def computed(
        x_TK: torch.Tensor,
        codes_NK: torch.Tensor,
        scaling: Scaling,
        bias_N: torch.Tensor | None,
        residual_TM: torch.Tensor | None,
        silu_mul_: bool,
        activation: str,
        step: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        (num_rows, k), num_tokens = codes_NK.shape, x_TK.shape[0]
        scripted.calls.append(("Triton's", (), {"step": step}))
        assert step >= 32
        assert all(columns % step == 0 for columns in (scaling.columns, scaling.input_columns))
        rows = torch.arange(num_rows)
        tile = scaling.rows or num_rows, scaling.columns
        weight_NK = codes_NK.float() * spread(scaling.weights_RC, rows, rows >= 0, tile, k)
        wide_TK = x_TK.float()
        if scaling.inputs_CT is not None:
            blocks = torch.arange(k) // (scaling.input_columns or k)
            wide_TK = wide_TK * scaling.inputs_CT[:, :num_tokens].t()[:, blocks]
        y_TN = wide_TK @ weight_NK.t()
        y_TN = (y_TN if bias_N is None else y_TN + bias_N.float()).to(dtype)
        y_TM = silu_mul.reference(y_TN, activation) if silu_mul_ else y_TN
        return y_TM if residual_TM is None else residual_TM + y_TM

    return computed


class RoundingKernel:
    """The kernel of round_inputs in plain torch."""

    def __init__(self, scripted: Scripted):
        self._scripted = scripted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._num_tokens = grid[0]
        return self._launch

    def _launch(self, x: Any, residual: Any, weight: Any, inner: Any, static: Any, *others: Any, **o: Any) -> None:
        codes, scales, total, x_stride, residual_stride, eps, scale_stride = others
        self._scripted.calls.append(("rounding", (self._num_tokens,), o))
        k, norm = o["K"], (eps, o["OFFSET"], o["WIDE"])
        width = 2 * k if o["ACTIVATION"] else k
        x_TK = x.as_strided((self._num_tokens, width), (x_stride, 1), x.storage_offset())
        if o["ACTIVATION"]:
            x_TK = silu_mul.reference(x_TK, o["ACTIVATION"])
        if inner is not None:
            x_TK = rms_norm.reference(x_TK, inner, *norm)
        if residual is not None:
            x_TK = x_TK + residual.as_strided((self._num_tokens, k), (residual_stride, 1), residual.storage_offset())
            total.copy_(x_TK)
        if weight is not None:
            x_TK = rms_norm.reference(x_TK, weight, *norm)
        wide = torch.nn.functional.pad(x_TK.float(), (0, o["GROUPS"] * o["COLUMNS"] - k))
        tiles_TGC = wide.unflatten(1, (o["GROUPS"], o["COLUMNS"]))
        scales_TG = tiles_TGC.abs().amax(2).clamp(min=o["SMALLEST"]) / o["LARGEST"]
        if static is not None:
            scales_TG = static.expand(scales_TG.shape)
        rounded = (tiles_TGC / scales_TG[..., None]).clamp(-o["LARGEST"], o["LARGEST"]).flatten(1)[:, :k]
        codes.copy_(rounded.to(codes.dtype))
        groups = -(-k // o["COLUMNS"])
        scales.as_strided((groups, self._num_tokens), (scale_stride, 1)).copy_(scales_TG.t()[:groups])


def library_product(scripted: Scripted) -> Any:
    def computed(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        scripted.calls.append(("library", (), {"use_fast_accum": use_fast_accum}))
        assert not use_fast_accum
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        product = (a.float() * scale_a) @ (b.float() * scale_b)
        return (product if bias is None else product + bias.float()).to(out_dtype)

    return computed


@contextmanager
def scripted_gpu(capability: tuple[int, int]) -> Iterator[Scripted]:
    """Meanwhile every kernel is plain torch; new tensors are NaN."""
    with scripted_hopper(capability) as scripted, pytest.MonkeyPatch.context() as patch, nan_in_new_tensors():
        patch.setattr(quantised_product, "launch", triton_product(scripted))
        patch.setattr(round_inputs, "round_inputs_kernel", RoundingKernel(scripted))
        patch.setattr(rms_norm, "launch", rms_norm.reference)
        patch.setattr(residual_rms_norm, "launch", residual_rms_norm.reference)
        patch.setattr(quantised_kernels, "silu_mul_launch", silu_mul.reference)
        patch.setattr(torch, "_scaled_mm", library_product(scripted))
        yield scripted


def kernels(scripted: Scripted) -> list[str]:
    return [name for name, *_ in scripted.calls]


# Capability, scheme, tokens, bias: what computes the inputs' codes and the product; none where plain torch does.
WAYS = [
    (HOPPER, BY_ROWS, 1, False, ["rounding", "linear"]),
    (HOPPER, BY_ROWS, 64, True, ["rounding", "linear"]),
    (HOPPER, TENSOR, 9, False, ["rounding", "linear"]),
    (HOPPER, BY_BLOCKS, 17, False, ["rounding", "linear"]),
    (HOPPER, MIXED, 3, False, ["rounding", "linear"]),
    (HOPPER, FEW_ROWS, 128, True, ["rounding", "linear"]),
    (HOPPER, BY_ROWS, 65, False, ["rounding", "codes"]),
    (HOPPER, TENSOR, 130, False, ["rounding", "codes"]),
    (HOPPER, BY_BLOCKS, 300, False, ["rounding", "codes"]),
    (HOPPER, FEW_ROWS, 129, False, ["rounding", "product"]),
    (HOPPER, MIXED, 200, False, ["rounding", "product"]),
    (HOPPER, BY_BLOCKS, 130, True, ["rounding", "Triton's"]),
    (HOPPER, BY_ROWS, 130, True, ["rounding", "library"]),
    (HOPPER, WEIGHTS, 5, True, ["Triton's"]),
    (BLACKWELL, BY_BLOCKS, 5, False, ["rounding", "Triton's"]),
    (BLACKWELL, TENSOR, 5, False, ["rounding", "Triton's"]),
    (ADA, BY_ROWS, 129, False, ["rounding", "library"]),
    (ADA, WEIGHTS, 129, False, ["Triton's"]),
    (HOPPER, ODD, 5, True, []),
    (HOPPER, "e4m3 1x*, inputs e4m3 1x96", 5, False, []),
    (AMPERE, WEIGHTS, 5, False, []),
]
# Of the op, besides the linear: a number stands for a random vector or matrix.
AROUND: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a norm": {"norm_weight_K": 1.0, "eps": 0.3},
    "a wide norm with an offset": {"norm_weight_K": 1.0, "eps": 0.3, "norm_offset": 0.5, "norm_wide": True},
    "a residual": {"residual": True},
    "gelu * up": {"silu_mul": True, "activation": "gelu"},
    "silu * up and a residual": {"silu_mul": True, "residual": True},
}


@pytest.mark.product(one_in=1000, each=("capability", "scheme", "tokens"))
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("capability", "scheme", "tokens", "bias", "expected"), WAYS, ids=str)
def test_every_way_is_the_linear(
    capability: tuple[int, int], scheme: str, tokens: int, bias: bool, expected: list[str], around: str
) -> None:
    more = dict(AROUND[around])
    of_case = {name: more.pop(name) for name in ("residual", "silu_mul", "activation") if name in more}
    given = arguments_of(Case(tokens, 256, 256, bias, **of_case), scheme, torch.bfloat16)
    if "norm_weight_K" in more:
        more["norm_weight_K"] = 1 + 0.2 * torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    if given["residual_TM"] is not None:  # not contiguous
        given["residual_TM"] = torch.stack((given["residual_TM"],) * 2, 2)[..., 0]
    given |= more
    with scripted_gpu(capability) as scripted:
        found = launch(**given)
    assert kernels(scripted) == expected
    wanted = reference(**given)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-2


@pytest.mark.parametrize(("capability", "scheme", "tokens", "bias", "expected"), WAYS, ids=str)
def test_every_way_takes_codes(
    capability: tuple[int, int], scheme: str, tokens: int, bias: bool, expected: list[str]
) -> None:
    """Inputs that another kernel has rounded are multiplied as they are."""
    inputs = LinearScheme.parse(scheme).inputs
    if inputs is None:
        return
    given = arguments_of(Case(tokens, 256, 256, bias, residual=True), scheme, torch.bfloat16)
    codes_TK, scales_CT = round_inputs.by_formula(given["x_TK"], inputs, given["input_scale_1"])
    given |= {"x_TK": codes_TK, "input_scales_CT": scales_CT, "input_scale_1": None, "dtype": "bfloat16"}
    with scripted_gpu(capability) as scripted:
        found = launch(**given)
    assert kernels(scripted) == expected[1:]
    wanted = reference(**given)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-2


@pytest.mark.product(one_in=1000, each=("capability", "scheme", "tokens"))
@pytest.mark.parametrize("rounding", ["e4m3 1x*", "e4m3 1x32", "e4m3 static", "e4m3 1x40"])
@pytest.mark.parametrize(("capability", "scheme", "tokens", "bias", "expected"), WAYS, ids=str)
def test_the_results_of_gate_and_up_are_rounded_after_the_activation(
    capability: tuple[int, int], scheme: str, tokens: int, bias: bool, expected: list[str], rounding: str
) -> None:
    """The activation is computed once: by the product's kernel, or by the one that rounds, or by one of its own."""
    inputs = LinearScheme.parse(scheme).inputs
    if inputs is None:
        return
    given = arguments_of(Case(tokens, 256, 256, bias, silu_mul=True), scheme, torch.bfloat16)
    codes_TK, scales_CT = round_inputs.by_formula(given["x_TK"], inputs, given["input_scale_1"])
    static = torch.full((1,), 3.0) if rounding == "e4m3 static" else None
    of_weight = given["codes_NK"], given["scales_RC"], given["bias_N"], scheme
    arguments = codes_TK, scales_CT, *of_weight, "gelu_tanh", "bfloat16", static, rounding
    with scripted_gpu(capability) as scripted:
        codes, scales = gated_launch(*arguments)
    assert kernels(scripted) == expected[1:] + ["rounding"] * (rounding != "e4m3 1x40")
    activations = [options["ACTIVATION"] for name, _, options in scripted.calls if name == "rounding"]
    assert set(activations) <= {"gelu_tanh" if expected[-1:] in ([], ["library"]) else ""}
    wanted_codes, wanted_scales = gated_reference(*arguments)
    assert (codes.dtype, codes.shape) == (wanted_codes.dtype, wanted_codes.shape)
    assert scales.shape[0] == wanted_scales.shape[0]
    parsed = Rounding.parse(rounding)
    found, wanted = (
        decode(*each, parsed) for each in ((codes, scales[:, :tokens].t()), (wanted_codes, wanted_scales.t()))
    )
    # A step of bfloat16 before may be a step of the codes, which are an eighth apart.
    assert ((found - wanted).abs() <= wanted.abs() / 7 + wanted.abs().max() / 100).all()
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments]
        like = quantised_gated_rounded(*fakes)
    assert [(each.shape, each.dtype) for each in like] == [(e.shape, e.dtype) for e in (wanted_codes, wanted_scales)]


@pytest.mark.parametrize("rounding", ["e4m3 1x*", "e4m3 1x32", "e4m3 static", "e4m3 1x40"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"norm_weight_K": 1.0, "eps": 0.3, "norm_offset": 0.5, "norm_wide": True},
        {"activation": "gelu"},
        {"residual_TD": 1.0, "weight_D": 1.0, "eps": 0.3},
        {"residual_TD": 1.0, "weight_D": 1.0, "eps": 0.3, "offset": 0.5, "wide": True, "inner_weight_D": 1.0},
    ],
    ids=str,
)
def test_rounding_ops_give_on_a_gpu_what_they_give_on_a_cpu(how: dict[str, Any], rounding: str) -> None:
    """Whether a kernel rounds or plain torch; inputs and residual may be turned."""
    generator, tokens, k = torch.Generator().manual_seed(0), 5, 80

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = {"norm_weight_K": (k,), "weight_D": (k,), "inner_weight_D": (k,), "residual_TD": (k, tokens)}
    given = {name: normal(*sizes[name]) if name in sizes else value for name, value in how.items()}
    op, x = (residual_rms_norm_rounded, "x_TD") if "residual_TD" in how else (round_op, "x_TK")
    if "residual_TD" in given:
        given["residual_TD"] = given["residual_TD"].t()
    given[x] = normal(2 * k if "activation" in how else k, tokens).t()
    given |= {"static_1": torch.full((1,), 0.01) if "static" in rounding else None, "rounding": rounding}
    with scripted_gpu(ADA) as scripted:
        found = implementation(op, "cuda")(**given)
    assert kernels(scripted) == ["rounding"] * ("40" not in rounding)
    wanted = implementation(op, "cpu")(**given)
    assert len(found) == len(wanted)
    assert found[0].dtype == wanted[0].dtype
    assert torch.equal(found[0].float(), wanted[0].float())
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        like = op(**fakes)
    assert [(each.shape, each.dtype) for each in like] == [(each.shape, each.dtype) for each in wanted]
    assert like[1].stride() == found[1].stride()
