"""The host side of small-batch and gated linears, and of sums over ranks: which kernel computes what.

Kernels are plain torch here, so this needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from scripted_hopper import scripted_hopper
from small_batch_linear_cases import Case, arguments_of, error, nan_in_new_tensors

from compiled_engine.parallel.group import FakeGroup, PushBuffer, in_group
from compiled_engine.passes.framework.op_library import implementation
from compiled_engine.passes.linear import gated_linear, hopper_linear, hopper_product, silu_mul, small_batch_linear_op
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.passes.linear.small_batch_linear_op import (
    MAX_TILES,
    TOKEN_BUCKETS,
    Tiles,
    choose_tiles,
    columns_ahead,
    launch,
)
from compiled_engine.passes.norm import residual_rms_norm, rms_norm
from compiled_engine.passes.parallel import all_reduce_residual_rms_norm as summed
from compiled_engine.passes.parallel import sequence_parallel_op as divided

pytestmark = pytest.mark.usefixtures("one_thread")

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
OPTIONS = [
    {"norm": norm, "bias": bias, "silu_mul": silu_mul_, "residual": residual, "gemma": norm and not bias}
    for norm, bias, silu_mul_, residual in product((False, True), repeat=4)
    if not (silu_mul_ and residual)
]


class Kernel:
    """Either kernel of small_batch_linear, by the formula; `last`: the grid and the options of the last launch."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(x: torch.Tensor, weight: torch.Tensor, *operands: Any, **o: Any) -> None:
            bias, norm, residual, out, *others = operands
            of_several = len(others) > 2
            partial, counters, eps = others[:3] if of_several else (None, None, others[0])
            self.last = o | {"grid": grid, "partial": partial, "counters": counters, "norm": norm}
            if of_several:
                assert tuple(others[3:]) == (out.shape[1], x.shape[0], x.stride(0))
            else:
                assert others[1] == out.shape[1]
            assert (o["BIAS"], o["NORM"], o["RESIDUAL"]) == (bias is not None, norm is not None, residual is not None)
            assert o["K"] == x.shape[1]
            assert x.stride(1) == 1
            assert residual is None or residual.is_contiguous()
            given = x, weight, bias, norm, eps, residual, o["SILU_MUL"], o["ACTIVATION"], o["OFFSET"]
            out.copy_(small_batch_linear_op.reference(*given, norm_wide=o["OFFSET"] != 0))

        return launched


@contextmanager
def scripted_kernels() -> Iterator[Kernel]:
    kernel = Kernel()
    with pytest.MonkeyPatch.context() as patch, nan_in_new_tensors():
        patch.setattr(small_batch_linear_op, "one_token_kernel", kernel)
        patch.setattr(small_batch_linear_op, "few_tokens_kernel", kernel)
        patch.setattr(rms_norm, "launch", rms_norm.reference)
        patch.setattr(silu_mul, "launch", silu_mul.reference)
        yield kernel


@pytest.mark.product(one_in=4, each=("tiles", "dtype"))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "tiles",
    [Tiles(1, 8, 16), Tiles(8, 16, 32, groups=2, norm_inside=True), Tiles(8, 16, 32, split_k=2), Tiles(4, 8, 16)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_small_batch_linear_launches_its_formula(options: dict[str, bool], tiles: Tiles, dtype: torch.dtype) -> None:
    """Inputs and residuals that are turned are copied."""
    tokens = 1 if tiles.tokens == 1 else 11
    given = arguments_of(Case(tokens, 48, 64, **options), dtype)
    turned = {name: getattr(given, name).t().contiguous().t() for name in ("x_TK",)}
    if given.residual_TM is not None:
        turned["residual_TM"] = given.residual_TM.t().contiguous().t()
    for each in (given, replace(given, **turned)):
        with scripted_kernels() as kernel:
            found = launch(*each.values(), tiles)  # type: ignore[arg-type]
        assert found.dtype == dtype
        assert error(found, given) < 2e-2
        # In float16 the kernel for several tokens cannot hold what is not scaled yet.
        inside = tiles.tokens == 1 or (tiles.norm_inside and dtype != FLOAT16)
        assert (kernel.last["norm"] is not None) == (inside and options["norm"])
        row_tiles, token_tiles = -(-48 // tiles.rows), -(-tokens // tiles.tokens)
        names = ("ROWS", "BLOCK_K", "num_warps")
        assert [kernel.last[name] for name in names] == [tiles.rows, tiles.block_k, tiles.num_warps]
        if tiles.tokens == 1:
            assert kernel.last["grid"] == (row_tiles,)
            continue
        assert kernel.last["grid"] == (row_tiles, tiles.split_k, token_tiles)
        names = ("TOKENS", "GROUPS", "SPLIT_K", "NUM_STAGES", "COLUMNS_AHEAD")
        assert [kernel.last[name] for name in names] == [tiles.tokens, tiles.groups, tiles.split_k, tiles.num_stages, 0]
        partial = kernel.last["partial"]
        if tiles.split_k == 1:
            assert partial is None
            continue
        assert partial.shape == (row_tiles * token_tiles, tiles.split_k, tiles.tokens, tiles.rows)
        assert partial.dtype == torch.float32
        assert kernel.last["counters"].dtype == torch.int32
        assert kernel.last["counters"].numel() >= row_tiles * token_tiles
        assert not kernel.last["counters"].any()


def test_no_more_tiles_are_split_than_there_are_counters() -> None:
    tiles, x_TK = Tiles(2, 1, 16, split_k=2), torch.ones(2, 1)
    for rows in (MAX_TILES, MAX_TILES + 1):
        arguments = x_TK, torch.ones(rows, 1), None, None, 0.0, None, False
        with scripted_kernels():
            if rows == MAX_TILES:
                assert launch(*arguments, tiles=tiles).shape == (2, rows)
                continue
            with pytest.raises(ValueError, match=f"{rows} tiles with split_k 2; allowed: {MAX_TILES}"):
                launch(*arguments, tiles=tiles)
            assert launch(*arguments, tiles=replace(tiles, split_k=1)).shape == (2, rows)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_small_batch_linear_on_hopper_is_its_linear_after_the_norm(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    tiles = HopperTiles(1, 16, 3)
    monkeypatch.setattr(small_batch_linear_op, "hopper_tiles", lambda *shape: asked.append(shape) or tiles)
    given = arguments_of(Case(11, 48, 64, **options), BFLOAT16)
    with scripted_hopper() as scripted, scripted_kernels():
        found = launch(*given.values())  # type: ignore[arg-type]
    assert [name for name, *_ in scripted.calls] == ["linear"]
    assert error(found, given) < 2e-2
    assert asked == [(11, 48, 64, options["silu_mul"], BFLOAT16, torch.device("cpu"))]


def test_without_hopper_the_rule_chooses() -> None:
    given = arguments_of(Case(11, 48, 64, silu_mul=True), BFLOAT16)
    with scripted_kernels() as kernel:
        launch(*given.values())  # type: ignore[arg-type]
    tiles = choose_tiles(11, 48, 64, True, BFLOAT16)
    assert (kernel.last["TOKENS"], kernel.last["ROWS"], kernel.last["BLOCK_K"]) == (
        tiles.tokens,
        tiles.rows,
        tiles.block_k,
    )


@settings(max_examples=150, deadline=None)
@drawn(
    rows=st.integers(1, 30_000),
    eighths=st.integers(1, 2000),
    tiles=st.builds(
        Tiles,
        tokens=st.just(8),
        rows=st.sampled_from([16, 32, 64]),
        block_k=st.sampled_from([16, 64, 256]),
        groups=st.sampled_from([1, 4]),
        split_k=st.sampled_from([1, 2, 4]),
    ),
)
def test_a_small_weight_is_prefetched_as_a_whole_and_of_a_larger_one_the_beginning(
    rows: int, eighths: int, tiles: Tiles
) -> None:
    """Of 16 MiB at most; else 16 KiB of each program's part, in multiples of 16 bytes."""
    k = 8 * eighths
    part = -(-k // (tiles.split_k * tiles.groups * tiles.block_k)) * tiles.groups * tiles.block_k
    ahead = columns_ahead(rows, k, 2, tiles)
    if rows * k * 2 <= 16 << 20:
        assert ahead == part
    else:
        assert ahead % 8 == 0
        assert ahead * tiles.rows * 2 <= 16 << 10
        assert ahead == part or (ahead + 8) * tiles.rows * 2 > 16 << 10
    assert columns_ahead(rows, k + 4, 2, tiles) == 0
    assert columns_ahead(rows, k + 4, 4, tiles) > 0


@pytest.mark.product(one_in=4, each=("rows", "silu_mul_"))
@pytest.mark.parametrize("silu_mul_", [False, True])
@pytest.mark.parametrize("k", [64, 1024, 1032, 4096])
@pytest.mark.parametrize("rows", [64, 2048, 4096, 24576])
def test_the_weight_is_read_once_for_up_to_64_tokens(rows: int, k: int, silu_mul_: bool) -> None:
    """By the smallest tiles that hold them; the kernel for a single token is for one."""
    buckets = TOKEN_BUCKETS
    for tokens in range(1, 65):
        tiles = choose_tiles(tokens, rows, k, silu_mul_, BFLOAT16)
        assert tiles.tokens == min(bucket for bucket in buckets if bucket >= tokens)
        assert tiles.split_k == 1 or (not silu_mul_ and k >= 1024 and tokens > 8)
        assert not tiles.norm_inside or k <= 1024
    beyond = choose_tiles(65, rows, k, silu_mul_, BFLOAT16)
    assert (beyond.tokens, beyond.split_k) == (64, 1)
    assert choose_tiles(65, rows, k, silu_mul_, BFLOAT16, "NVIDIA H200") == beyond
    for tokens in (2, 64, 65):
        assert choose_tiles(tokens, rows, k, silu_mul_, torch.float32).tokens == 16
    assert choose_tiles(1, rows, k, silu_mul_, torch.float32).tokens == 1


@pytest.mark.parametrize(
    ("bias", "has_product", "has_linear", "kernels"),
    [
        (False, True, True, ["product"]),
        (True, True, True, ["linear"]),  # the product has no bias
        (True, True, False, []),
        (False, False, True, ["linear"]),
        (False, False, False, []),
    ],
)
def test_a_gated_linear_is_one_kernel_where_one_was_the_fastest(
    bias: bool, has_product: bool, has_linear: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    few, many = HopperTiles(1, 16, 3), ProductTiles(2, 64, (16,), 2)
    monkeypatch.setattr(hopper_product, "product_tiles", lambda *s: asked.append(s) or (many if has_product else None))
    monkeypatch.setattr(hopper_linear, "hopper_tiles", lambda *s: asked.append(s) or (few if has_linear else None))
    given = arguments_of(Case(13, 48, 64, bias=bias, silu_mul=True, gemma=True), BFLOAT16)
    arguments = given.x_TK, given.weight_NK, given.bias_N, given.activation
    with scripted_hopper() as scripted, scripted_kernels():
        found = gated_linear.launch(*arguments)
    assert [name for name, *_ in scripted.calls] == kernels
    assert error(found, given) < 2e-2
    assert error(gated_linear.reference(*arguments), given) < 2e-2
    assert set(asked) == {(13, 48, 64, True, BFLOAT16, torch.device("cpu"))}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_those_of_their_names(activation: str) -> None:
    gate, up = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)).double()
    cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "gelu_tanh": gate * (1 + cubic.tanh()) / 2,
    }[activation]
    both = torch.cat((gate, up), 1)
    torch.testing.assert_close(silu_mul.reference(both, activation), expected * up)
    if activation == "silu":
        torch.testing.assert_close(silu_mul.reference(both), expected * up)


D, SLOTS = 16, 4


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A group with memory for SLOTS rows of D numbers in fp32; the list gets what is launched."""
    calls: list[str] = []

    def of(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        return lambda buffer, *arguments: calls.append(name) or result(*arguments)

    def own_rows(x: torch.Tensor, *others: Any) -> Any:
        return residual_rms_norm.reference(x, *others)

    monkeypatch.setattr(summed, "push", of("whole rows", own_rows))
    monkeypatch.setattr(summed, "push_rounded", of("rounded rows", summed.rounded_reference))
    monkeypatch.setattr(divided, "push", of("own rows", own_rows))
    monkeypatch.setattr(divided, "LEAST_TOKENS", 3)
    monkeypatch.setattr(residual_rms_norm, "launch", lambda *a: calls.append("norm") or residual_rms_norm.reference(*a))
    monkeypatch.setattr(
        summed.round_inputs, "sum_launch", lambda *a: calls.append("rounding") or summed.round_inputs.sum_reference(*a)
    )
    return calls


def group(has_memory: bool) -> FakeGroup:
    none = torch.zeros(0, dtype=torch.uint8)
    epochs = torch.zeros(SLOTS, dtype=torch.int32)
    return FakeGroup(1, 0, PushBuffer(none, none, epochs, epochs, 0, 1, D * 4) if has_memory else None)


def rows(tokens: int, width: int = D) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, width, generator=generator)
    return x, residual, 1 + torch.randn(width, generator=generator)


@pytest.mark.parametrize(
    ("has_memory", "tokens", "width", "call"),
    [(True, 4, D, "whole rows"), (True, 5, D, "norm"), (True, 4, 2 * D, "norm"), (False, 4, D, "norm")],
)
def test_a_sum_is_pushed_where_its_rows_fit(
    pushed: list[str], has_memory: bool, tokens: int, width: int, call: str
) -> None:
    arguments = *rows(tokens, width), 0.3
    with in_group(group(has_memory)):
        found = summed.launch(*arguments)
        expected = summed.reference(*arguments)
    torch.testing.assert_close(found, expected)
    assert pushed == [call]


@pytest.mark.parametrize(
    ("has_memory", "tokens", "rounding", "call"),
    [
        (True, 4, "e4m3 1x*", "rounded rows"),
        (True, 5, "e4m3 1x*", "rounding"),
        (False, 4, "e4m3 1x*", "rounding"),
        (True, 4, "e4m3 1x5", "rounding"),
        (True, 4, "e4m3 static", "rounded rows"),
    ],
)
def test_a_rounded_sum_is_pushed_where_its_rows_fit_and_the_kernel_rounds(
    pushed: list[str], has_memory: bool, tokens: int, rounding: str, call: str
) -> None:
    static = torch.tensor([0.01]) if "static" in rounding else None
    arguments = *rows(tokens), static, rounding, 0.3
    with in_group(group(has_memory)):
        found = summed.rounded_launch(*arguments)
        expected = implementation(summed.all_reduce_residual_rms_norm_rounded, "cpu")(*arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float())
    assert pushed == [call]


@pytest.mark.parametrize(
    ("has_memory", "tokens", "how", "call"),
    [
        (True, 2, {}, "whole rows"),
        (False, 2, {}, "norm"),
        (True, 2, {"offset": 0.5}, "norm"),
        (True, 2, {"wide": True}, "norm"),
        (True, 2, {"inner_weight_D": torch.full((D,), 0.7)}, "norm"),
        (True, 3, {}, "own rows"),
        (True, 4, {"offset": 0.5, "wide": True, "inner_weight_D": torch.full((D,), 0.7)}, "own rows"),
        (True, 5, {"offset": 0.5, "wide": True, "inner_weight_D": torch.full((D,), 0.7)}, "norm"),
        (False, 3, {"offset": 0.5}, "norm"),
    ],
    ids=str,
)
def test_few_tokens_are_exchanged_as_whole_rows_and_many_are_divided(
    pushed: list[str], has_memory: bool, tokens: int, how: dict[str, Any], call: str
) -> None:
    arguments = *rows(tokens), 0.3
    with in_group(group(has_memory)):
        found = divided.launch(*arguments, **how)
        expected = divided.reference(*arguments, **how)
    torch.testing.assert_close(found, expected)
    assert pushed == [call]
