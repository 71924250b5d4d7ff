"""Rounding to codes and scales against plain loops over tiles, for any tile and any shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.passes.framework.rounding import (
    codes_of,
    decode,
    pack,
    retile,
    round_inputs,
    scales_of,
    spread,
    unpack,
    weight_codes,
    weight_scales,
)
from compiled_engine.passes.linear import round_inputs as round_inputs_op
from compiled_engine.passes.linear.round_inputs import by_formula
from compiled_engine.quantisation import Rounding

LARGEST = 448.0
SIZES = st.integers(1, 9)
TILES = st.integers(0, 5)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def tiles(num_rows: int, num_columns: int, rows: int, columns: int) -> list[tuple[int, int, slice, slice]]:
    """Place in the grid, and rows and columns, of each tile."""
    rows, columns = rows or num_rows, columns or num_columns
    return [
        (i, j, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        for i in range(math.ceil(num_rows / rows))
        for j in range(math.ceil(num_columns / columns))
    ]


@settings(max_examples=60, deadline=None)
@given(num_rows=SIZES, num_columns=SIZES, rows=TILES, columns=TILES, seed=st.integers(0, 99))
def test_a_tile_has_the_scale_of_its_largest_magnitude(
    num_rows: int, num_columns: int, rows: int, columns: int, seed: int
) -> None:
    values, rounding = normal(num_rows, num_columns, seed=seed), Rounding("e4m3", rows, columns)
    scales = scales_of(values, rounding)
    assert scales.shape == rounding.grid(num_rows, num_columns)
    spread_out = spread(scales, rounding, num_rows, num_columns).expand(num_rows, num_columns)
    for i, j, of_rows, of_columns in tiles(num_rows, num_columns, rows, columns):
        assert scales[i, j] == values[of_rows, of_columns].abs().max() / LARGEST
        assert (spread_out[of_rows, of_columns] == scales[i, j]).all()
    codes = codes_of(values, scales, rounding)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().abs().max() == LARGEST
    assert torch.equal(decode(codes, scales, rounding), codes.float() * spread_out)
    # Half a step of a mantissa of 3 bits, or of the smallest number.
    off = (decode(codes, scales, rounding) - values).abs()
    assert (off <= values.abs() / 16 + spread_out * 2.0**-10).all()


def test_zeros_have_a_small_scale_and_large_values_the_largest_code() -> None:
    rounding = Rounding("e4m3", 1, 2)
    values = torch.tensor([[0.0, 0.0, 1.0, -2.0]])
    scales = scales_of(values, rounding)
    assert torch.equal(scales, torch.tensor([[2.0**-24, 2.0]]) / torch.tensor(LARGEST))
    assert codes_of(values, scales, rounding).float().tolist() == [[0.0, 0.0, 224.0, -448.0]]
    beyond = codes_of(torch.tensor([[1e9, -1e9]]), torch.ones(1, 1), Rounding("e4m3", 0, 0))
    assert beyond.float().tolist() == [[LARGEST, -LARGEST]]


@settings(max_examples=60, deadline=None)
@given(
    kept=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    times=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    shape=st.tuples(st.integers(1, 10), st.integers(1, 10)),
)
def test_smaller_tiles_have_the_scales_of_those_they_lie_in(
    kept: tuple[int, int], times: tuple[int, int], shape: tuple[int, int]
) -> None:
    """A stored tile is a number of kept ones, or all rows or columns, which then end with a kept one."""
    (rows, columns), stored_rows, stored_columns = kept, kept[0] * times[0], kept[1] * times[1]
    num_rows = shape[0] * rows if not stored_rows else shape[0]
    num_columns = shape[1] * columns if columns and not stored_columns else shape[1]
    stored, smaller = Rounding("e4m3", stored_rows, stored_columns), Rounding("e4m3", rows, columns)
    scales = normal(*stored.grid(num_rows, num_columns))
    found = retile(scales.flatten(), stored, smaller, num_rows, num_columns)
    assert found.shape == smaller.grid(num_rows, num_columns)
    before, after = (
        spread(each, rounding, num_rows, num_columns).expand(num_rows, num_columns)
        for each, rounding in ((scales, stored), (found, smaller))
    )
    assert torch.equal(before, after)


def test_inputs_have_their_own_scales_or_the_static_one() -> None:
    x_TK = normal(5, 6).bfloat16()
    codes, scales = round_inputs(x_TK, Rounding("e4m3", 1, 3), None)
    assert torch.equal(scales, scales_of(x_TK, Rounding("e4m3", 1, 3)))
    assert torch.equal(codes.float(), codes_of(x_TK, scales, Rounding("e4m3", 1, 3)).float())
    static = Rounding("e4m3", 0, 0, static=True)
    codes, scales = round_inputs(x_TK, static, torch.tensor([0.5]))
    assert scales.tolist() == [[0.5]]
    assert torch.equal(codes.float(), (x_TK.float() / 0.5).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float())


def test_bytes_hold_the_nearest_whole_multiple_of_the_scale() -> None:
    values, rounding = torch.tensor([[2.5, -1.5, 0.49, -254.0], [0.0, 0.0, 3.0, 1.0]]), Rounding("int8", 1, 0)
    scales = scales_of(values, rounding)
    assert torch.equal(scales, torch.tensor([[2.0], [3.0 / 127]]))
    codes = codes_of(values, scales, rounding)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [[1, -1, 0, -127], [0, 0, 127, 42]]
    assert torch.equal(decode(codes, scales, rounding), codes * scales)
    static = Rounding("int8", 0, 0, static=True)
    assert round_inputs(values, static, torch.tensor([0.5]))[0].tolist() == [[5, -3, 1, -128], [0, 0, 6, 2]]


@pytest.mark.parametrize("scheme", ["e4m3 1x*, inputs e4m3 1x*", "e4m3 2x3, inputs e4m3 1x3"])
def test_matrices_of_experts_are_rounded_one_by_one(scheme: str) -> None:
    weight = normal(3, 4, 6)
    codes, scales = weight_codes(weight, scheme), weight_scales(weight, scheme)
    for expert in range(3):
        assert torch.equal(codes[expert].float(), weight_codes(weight[expert], scheme).float())
        assert torch.equal(scales[expert], weight_scales(weight[expert], scheme))


@pytest.mark.parametrize("rounding", ["e4m3 1x*", "e4m3 1x8", "e4m3 static"])
def test_codes_of_turned_inputs_have_rows_that_follow_each_other(rounding: str) -> None:
    """Products read them so."""
    x_TK = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).t()
    static_1 = torch.full((1,), 0.5) if "static" in rounding else None
    (found, scales), (wanted, wanted_scales) = (
        by_formula(x, Rounding.parse(rounding), static_1) for x in (x_TK, x_TK.contiguous())
    )
    assert found.is_contiguous()
    assert torch.equal(found.float(), wanted.float())
    assert torch.equal(scales, wanted_scales)


INTEGERS = Rounding("int4", 1, 6)


def nearest(values: list[float]) -> tuple[float, float]:
    """The smallest squared error of a group, over all scales that are tried, and the error of the first."""
    largest, errors = max(map(abs, values)), []
    for step in range(20):
        size = torch.tensor(largest, dtype=torch.float32) * ((1.075 - 0.025 * step) / 7.5)
        scale = float(size.bfloat16())
        errors.append(sum((min(max(round(value / scale), -8), 7) * scale - value) ** 2 for value in values))
    return min(errors), errors[0]


@settings(max_examples=30, deadline=None)
@given(num_rows=SIZES, groups=st.integers(1, 4), seed=st.integers(0, 99))
def test_integers_have_the_scale_of_the_smallest_error(num_rows: int, groups: int, seed: int) -> None:
    values = normal(num_rows, 6 * groups, seed=seed)
    scales = scales_of(values, INTEGERS)
    assert torch.equal(scales, scales.bfloat16().float())
    codes = codes_of(values, scales, INTEGERS)
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (num_rows, 3 * groups))
    errors = (decode(codes, scales, INTEGERS) - values).square().unflatten(1, (groups, 6)).sum(2)
    for row in range(num_rows):
        for group in range(groups):
            least, _ = nearest(values[row, 6 * group : 6 * group + 6].tolist())
            assert float(errors[row, group]) <= least * (1 + 1e-4) + 1e-12


def test_a_searched_scale_is_nearer_than_that_of_the_largest_value() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 10.0], [0.0] * 6])
    scales = scales_of(values, INTEGERS)
    codes = codes_of(values, scales, INTEGERS)
    assert float((decode(codes, scales, INTEGERS) - values).square().sum()) == pytest.approx(
        nearest(values[0].tolist())[0]
    )
    assert not decode(codes, scales, INTEGERS)[1].any()
    assert (scales > 0).all()


def test_a_byte_holds_neighbouring_columns_the_first_in_its_low_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [8, 7, 3, 4]], dtype=torch.uint8)
    assert pack(codes, INTEGERS).tolist() == [[0x21, 0x0F], [0x78, 0x43]]
    assert torch.equal(unpack(pack(codes, INTEGERS), INTEGERS), codes)


def test_values_are_codes_less_zeros_times_scales() -> None:
    """Zero points of four bits and 16, which a format that stores them less one can state."""
    codes = torch.tensor([[0x21, 0x0F, 0x43, 0x65]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 16]], dtype=torch.uint8)
    expected = [[-1.0, -0.5, 6.0, -1.5, -26.0, -24.0, -22.0, -20.0]]
    assert decode(codes, scales, Rounding("uint4", 1, 4), zeros).tolist() == expected
    of_eight = [[-3.5, -3.0, 3.5, -4.0, -10.0, -8.0, -6.0, -4.0]]
    assert decode(codes, scales, Rounding("int4", 1, 4)).tolist() == of_eight


def test_kernels_round_as_many_columns_as_remain_of_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(round_inputs_op, "launch", lambda x_TK, *given, activation="": launched.append(given[-1]))
    x_TK = torch.zeros(1, 2 * round_inputs_op.MOST_COLUMNS)
    round_inputs_op._round_inputs(x_TK, None, "e4m3 1x*", activation="silu")
    assert launched == ["silu"]
    assert round_inputs_op._round_inputs(x_TK, None, "e4m3 1x*")[0].shape == x_TK.shape
    assert launched == ["silu"]
