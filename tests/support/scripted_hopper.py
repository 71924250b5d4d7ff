"""Hopper's kernels of linears in plain torch: they compute from what a launch gives, tile by tile, as the kernels do.

So a launch with a wrong descriptor, size or stride gives a wrong linear here too, without a GPU. Scales of inputs are
read for whole tiles of tokens, as the kernels read them: what has no room for these raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from compiled_engine.kernels import hopper_codes_kernel, hopper_linear_kernel, hopper_product_kernel
from compiled_engine.passes.linear import hopper_codes, hopper_product, quantised_kernels
from compiled_engine.passes.linear.silu_mul import activate

MULTIPROCESSORS = 132
BLOCK = 8  # rows of gate that lie together, followed by as many of up


def box(descriptor: Any, *place: int) -> torch.Tensor:
    """Return the box of a TMA descriptor that begins at this place, in fp32, with zeros beyond the tensor."""
    base = descriptor.base
    elements = base.untyped_storage().nbytes() // base.element_size() - base.storage_offset()
    flat, offset, inside = base.as_strided((elements,), (1,)), torch.tensor(0), torch.tensor(True)
    for first, size, stride, length in zip(
        place, descriptor.block_shape, descriptor.strides, descriptor.shape, strict=True
    ):
        at = first + torch.arange(size)
        offset, inside = offset.unsqueeze(-1) + at * stride, inside.unsqueeze(-1) & (at < length)
    values = flat.view(torch.uint8) if base.element_size() == 1 else flat
    values = values[torch.where(inside, offset, 0)].view(base.dtype)
    return torch.where(inside, values.float(), 0.0)


def write_box(descriptor: Any, values: torch.Tensor, *place: int) -> None:
    """Store a box, except for its part beyond the tensor."""
    assert list(values.shape) == list(descriptor.block_shape), (values.shape, descriptor.block_shape)
    rows, columns = (
        slice(min(first, length), min(first + size, length))
        for first, size, length in zip(place, values.shape, descriptor.shape, strict=True)
    )
    out = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
    out[rows, columns] = values[: rows.stop - rows.start, : columns.stop - columns.start].to(out.dtype)


def ended(y_NT: torch.Tensor, gated: bool, activation: str) -> torch.Tensor:
    """Convert results [rows, tokens] to [outputs, tokens]: a block of gate and the block of up after it become one."""
    if not gated:
        return y_NT
    gate, up = y_NT.unflatten(0, (-1, 2, BLOCK)).unbind(1)
    return (activate(gate, activation) * up).flatten(0, 1)


def weight_rows(first: int, count: int, outputs: int, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the weight that a tile's `count` rows are, and whether each exists. first: first output."""
    row = torch.arange(count)
    if not gated:
        return first + row, first + row < outputs
    output = first + row // (2 * BLOCK) * BLOCK + row % BLOCK
    return output + row // BLOCK % 2 * outputs, output < outputs


def spread(scales: torch.Tensor, rows: torch.Tensor, there: torch.Tensor, tile: tuple[int, int], k: int) -> Any:
    """Return the scale of each element of these rows of a weight."""
    tile_rows, tile_columns = tile
    blocks = -(-k // tile_columns) if tile_columns else 1
    columns = torch.arange(k) // (tile_columns or k)
    return scales.flatten()[torch.where(there, rows, 0)[:, None] // tile_rows * blocks + columns]


def input_scales(scales: torch.Tensor, first: int, tokens: int, stride: int, columns: int, k: int) -> torch.Tensor:
    """Return the scale of each element of these tokens' inputs. All are read, also of tokens that do not exist."""
    elements = scales.untyped_storage().nbytes() // scales.element_size()
    flat = scales.as_strided((elements,), (1,))
    block = torch.arange(k) // (columns or k)
    return flat[block * stride + (first + torch.arange(tokens))[:, None]]


@dataclass
class Scripted:
    """The three scripted kernels, with the grid and the options of the last launch."""

    calls: list[tuple[str, tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    def linear(
        self, grid: tuple[int, ...], w: Any, x: Any, out: Any, bias: Any, residual: Any, *sizes: int, **o: Any
    ) -> None:
        num_tokens, outputs = sizes
        boxes, k = o["PARTS"] * o["PRODUCTS"], o["K"]
        step = 128 // x.base.element_size()
        rows = 64 // o["PARTS"]
        for group in range(grid[0] * o["GROUPS"]):
            row = group * rows // (2 if o["GATED"] else 1)
            if row >= outputs:
                continue
            y_NT = torch.zeros(rows, o["TOKENS"])
            of_row, there = weight_rows(row, rows, outputs, o["GATED"])
            width = -(-k // (boxes * step)) * boxes * step
            for column in range(0, k, boxes * step):
                place = (0, group * rows // (2 * BLOCK), 0, 0, column) if o["GATED"] else (0, group * rows, column)
                w_BNK = box(w, *place).reshape(boxes, rows, step)
                x_BTK = box(x, 0, 0, column)
                if "scales_ptr" in o:
                    tile = o["TILE_ROWS"], o["TILE_COLUMNS"]
                    here = slice(column, column + boxes * step)
                    w_scale = spread(o["scales_ptr"], of_row, there, tile, width)[:, here]
                    x_scale = input_scales(
                        o["input_scales_ptr"], 0, o["TOKENS"], o["input_stride"], o["INPUT_COLUMNS"], k
                    )
                    x_scale = torch.nn.functional.pad(x_scale, (0, width - k))[:, here]
                    w_BNK = w_BNK * w_scale.unflatten(1, (boxes, step)).transpose(0, 1)
                    x_BTK = x_BTK * x_scale.unflatten(1, (boxes, step)).transpose(0, 1)
                y_NT += torch.einsum("bnk,btk->nt", w_BNK, x_BTK)
            if bias is not None:
                y_NT += torch.where(there, bias.float()[torch.where(there, of_row, 0)], 0.0)[:, None]
            y_TM = ended(y_NT, o["GATED"], o["ACTIVATION"]).t()[:num_tokens, : outputs - row].to(out.dtype)
            here_M = slice(row, row + y_TM.shape[1])
            flat = out.view(-1).unflatten(0, (num_tokens, outputs))
            flat[:, here_M] = y_TM if residual is None else residual.view(num_tokens, outputs)[:, here_M] + y_TM

    def product(self, grid: tuple[int, ...], w: Any, *others: Any, **o: Any) -> None:
        tokens, results, (token_tiles, row_tiles) = others[:3], others[3:6], others[6:]
        parts = [o["PART0"], o["PART1"], o["PART2"]]
        assert 1 <= grid[0] <= token_tiles * row_tiles
        rows, k, step = o["ROWS"], o["K"], 128 // tokens[0].base.element_size()
        outputs = rows // 2 if o["GATED"] else rows
        for group in range(row_tiles * o["GROUPS"]):
            for tile in range(token_tiles):
                token = tile * sum(parts)
                for desc, out, part in zip(tokens, results, parts, strict=True):
                    assert (desc is None) == (out is None) == (part == 0)
                    if part:
                        self._part(w, desc, out, group, token, part, (rows, outputs, k, step), o)
                    token += part

    def _part(
        self, w: Any, x: Any, out: Any, group: int, token: int, part: int, sizes: tuple[int, ...], o: dict[str, Any]
    ) -> None:
        rows, outputs, k, step = sizes
        y_NT, place = torch.zeros(rows, part), group * rows
        num_outputs = o.get("num_outputs", 1)
        of_row, there = weight_rows(group * outputs, rows, num_outputs, o["GATED"])
        width = -(-k // step) * step
        for column in range(0, k, step):
            at = (place // (2 * BLOCK), 0, 0, column) if o["GATED"] else (place, column)
            w_NK, x_TK = box(w, *at).reshape(rows, step), box(x, token, column)
            if "scales_ptr" in o:
                tile, here = (o["TILE_ROWS"], o["TILE_COLUMNS"]), slice(column, column + step)
                w_NK = w_NK * spread(o["scales_ptr"], of_row, there, tile, width)[:, here]
                given = o["input_scales_ptr"], token, part, o["input_stride"], o["INPUT_COLUMNS"], k
                x_TK = x_TK * torch.nn.functional.pad(input_scales(*given), (0, width - k))[:, here]
            y_NT += w_NK @ x_TK.t()
        y_TM = ended(y_NT, o["GATED"], o["ACTIVATION"]).t()
        is_scaled, chunk = "scales_ptr" in o, hopper_product_kernel.chunk_of(rows, o["GATED"])
        most, written = (part, outputs * 64 // rows) if is_scaled else (min(part, chunk), outputs)
        for first in range(0, part, most):
            for output in range(0, outputs, written):
                values = y_TM[first : first + most, output : output + written]
                write_box(out, values, token + first, group * outputs + output)

    def codes(self, grid: tuple[int, ...], w: Any, x: Any, out: Any, *others: Any, **o: Any) -> None:
        scales, inputs, stride, num_tokens, num_outputs, token_tiles, row_tiles = others
        assert 1 <= grid[0] <= token_tiles * row_tiles
        rows, k = o["ROWS"], o["K"]
        outputs, width = (rows // 2 if o["GATED"] else rows), -(-k // 128) * 128
        for row_tile in range(row_tiles):
            of_row, there = weight_rows(row_tile * outputs, rows, num_outputs, o["GATED"])
            w_scale = spread(scales, of_row, there, (o["TILE_ROWS"], o["TILE_COLUMNS"]), width)
            at = (row_tile * rows // (2 * BLOCK), 0, 0) if o["GATED"] else (row_tile * rows,)
            w_NK = torch.cat([box(w, *at, column).reshape(rows, 128) for column in range(0, k, 128)], 1) * w_scale
            for token in range(0, token_tiles * 2 * o["GROUP_TOKENS"], o["GROUP_TOKENS"]):
                x_TK = torch.cat([box(x, token, column) for column in range(0, k, 128)], 1)
                here = min(num_tokens - token, o["GROUP_TOKENS"])
                if here <= 0:
                    continue
                x_scale = input_scales(inputs, token, here, stride, o["TILE_COLUMNS"], k)
                x_TK[:here] *= torch.nn.functional.pad(x_scale, (0, width - k))
                y_TM = ended(w_NK @ x_TK.t(), o["GATED"], o["ACTIVATION"]).t()
                for first in range(0, o["GROUP_TOKENS"], 64):
                    write_box(out, y_TM[first : first + 64], token + first, row_tile * outputs)

    def kernel(self, name: str) -> Any:
        scripted = self

        class Launch:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(*arguments: Any, **options: Any) -> None:
                    scripted.calls.append((name, grid, options))
                    getattr(scripted, name)(grid, *arguments, **options)

                return launch

        return Launch()


@contextmanager
def scripted_hopper(capability: tuple[int, int] = (9, 0)) -> Iterator[Scripted]:
    """Let the host take the CPU for a GPU with scripted kernels of linears, by default a Hopper, within a block."""
    scripted = Scripted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_linear_kernel, "hopper_linear_kernel", scripted.kernel("linear"))
        patch.setattr(hopper_product_kernel, "hopper_product_kernel", scripted.kernel("product"))
        patch.setattr(hopper_codes_kernel, "hopper_codes_kernel", scripted.kernel("codes"))
        for module in (hopper_product, hopper_codes, quantised_kernels):
            patch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
        patch.setattr(quantised_kernels, "capability_of", lambda device: capability)
        yield scripted
