"""The kernel of the small-batch linear that reads into registers: compiled for Hopper without a GPU, and on one against
the formula; what is launched, and which linears it serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from small_batch_linear_cases import Case, arguments_of, error, nan_in_new_tensors

from compiled_engine.passes.linear import small_batch_linear_op, small_batch_linear_registers
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, choose_tiles, launch
from compiled_engine.passes.linear.small_batch_linear_registers import register_linear_kernel

H100 = "NVIDIA H100 80GB HBM3"
# One step and several, of which all or some are ahead; warps alone and in groups; one block of rows and several.
WAYS = {
    "one step": Tiles(8, 8, 128, groups=4, num_warps=4, norm_inside=True, ahead=1),
    "several steps ahead": Tiles(8, 16, 64, groups=2, num_warps=2, norm_inside=True, ahead=4),
    "fewer steps ahead than there are": Tiles(8, 32, 32, groups=4, num_warps=4, norm_inside=True, ahead=2),
    "the norm before it": Tiles(8, 16, 64, groups=8, num_warps=8, ahead=1),
}
# tokens, rows, columns: rows that are no multiple of the tiles' among them
SHAPES = [(1, 72, 512), (2, 70, 512), (4, 136, 1024), (8, 48, 512)]
KINDS: list[dict[str, bool]] = [
    {},
    {"norm": True, "residual": True},
    {"norm": True, "bias": True, "silu_mul": True},
    {"norm": True, "silu_mul": True, "gemma": True},
    {"bias": True, "residual": True},
]


def compiled(tiles: Tiles, k: int, norm: bool, silu_mul: bool) -> Any:
    constants: dict[str, Any] = {
        "K": k,
        "BIAS": False,
        "NORM": norm and tiles.norm_inside,
        "RESIDUAL": not silu_mul,
        "SILU_MUL": silu_mul,
        "ACTIVATION": "silu",
        "OFFSET": 0.0,
        "ROWS": tiles.rows,
        "BLOCK_K": tiles.block_k,
        "GROUPS": tiles.groups,
        "AHEAD": tiles.ahead,
    }
    return compiled_for_hopper(register_linear_kernel, constants, {"eps": "fp32"}, num_warps=tiles.num_warps)


@pytest.mark.parametrize(("rows", "k", "norm", "silu_mul"), [(1024, 2048, False, False), (6144, 1024, True, True)])
def test_weights_are_in_registers_before_the_wait_and_nothing_else_is_read(
    rows: int, k: int, norm: bool, silu_mul: bool
) -> None:
    """In the tiles of the profile: 16 bytes at a time, in the order in which the tensor cores take them."""
    tiles = choose_tiles(4, rows, k, silu_mul, torch.bfloat16, H100)
    assert tiles.ahead > 0
    program = compiled(tiles, k, norm, silu_mul)
    before, after = re.split(r"griddepcontrol\.wait", program.asm["ptx"])
    weights = tiles.rows * tiles.block_k * tiles.ahead // (8 * 32)
    assert before.count("ld.global") == len(re.findall(r"ld\.global\S*v4", before)) == weights
    assert "st.global" in after
    assert "st.global" not in before
    assert len(re.findall(r"mma\.sync", after)) == tiles.rows * k // tiles.groups // (8 * 16)
    assert stack_bytes(program) == 0


class Kernel:
    """The kernel by the formula; `last`: the grid and the options of the last launch."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(x: torch.Tensor, weight: torch.Tensor, *operands: Any, **o: Any) -> None:
            bias, norm, residual, out, eps, *counts = operands
            assert counts == [out.shape[1], x.shape[0], x.stride(0)]
            self.last = o | {"grid": grid, "norm": norm}
            given = x, weight, bias, norm, eps, residual, o["SILU_MUL"], o["ACTIVATION"], o["OFFSET"]
            out.copy_(small_batch_linear_op.reference(*given, norm_wide=o["OFFSET"] != 0))

        return launched


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    scripted = Kernel()
    monkeypatch.setattr(small_batch_linear_registers, "register_linear_kernel", scripted)
    monkeypatch.setattr(small_batch_linear_op.rms_norm, "launch", small_batch_linear_op.rms_norm.reference)
    return scripted


@pytest.mark.product(one_in=4, each=("way",))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_launch_is_the_formula(way: str, dtype: torch.dtype, kind: dict[str, bool], kernel: Kernel) -> None:
    tiles, given = WAYS[way], arguments_of(Case(3, 70, 512, **kind), dtype)
    with nan_in_new_tensors():
        found = launch(*given.values(), tiles=tiles)  # type: ignore[arg-type]
    assert error(found, given) < 2e-2
    assert kernel.last["grid"] == (-(-70 // tiles.rows),)
    names = ("ROWS", "BLOCK_K", "GROUPS", "AHEAD", "num_warps")
    assert [kernel.last[name] for name in names] == [tiles.rows, tiles.block_k, tiles.groups, tiles.ahead, tiles.groups]
    # In float16 the kernel cannot hold what is not scaled yet.
    inside = tiles.norm_inside and dtype != torch.float16
    assert (kernel.last["norm"] is not None) == (inside and kind.get("norm", False))


@pytest.mark.parametrize("measured", [True, False])
def test_a_shape_that_was_measured_with_it_has_it_also_where_hopper_has_another(
    measured: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of Hopper's kernel stay in the profile for shapes that are near."""
    tiles = WAYS["one step"] if measured else Tiles(8, 16, 128)
    asked: list[Any] = []
    monkeypatch.setattr(small_batch_linear_op, "choose_tiles", lambda *shape: tiles)
    monkeypatch.setattr(
        small_batch_linear_op, "hopper_tiles", lambda *shape: asked.append(shape) or HopperTiles(1, 8, 3)
    )
    monkeypatch.setattr(small_batch_linear_op, "hopper_linear", lambda x, weight, *others: x @ weight.T)
    given = arguments_of(Case(3, 70, 512), torch.bfloat16)
    assert error(launch(*given.values()), given) < 2e-2  # type: ignore[arg-type]
    assert bool(kernel.last) == measured
    assert bool(asked) == (not measured)


@pytest.mark.parametrize(("tokens", "split_k"), [(32, 1), (8, 2)])
def test_tiles_of_more_tokens_or_splits_are_refused(tokens: int, split_k: int) -> None:
    """The kernel would leave them out."""
    with pytest.raises(ValueError, match=f"ahead 2 with tokens {tokens} and split_k {split_k}.*allowed: tokens 8"):
        Tiles(tokens, 16, 64, split_k=split_k, ahead=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu(way: str, dtype: torch.dtype) -> None:
    """Right, in a graph, bit for bit the same a second time; a row does not depend on the others."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the kernel is for compute capability 9")
    for shape in SHAPES:
        for kind in KINDS:
            given = arguments_of(Case(*shape, **kind), dtype, "cuda")
            with nan_in_new_tensors():
                out = launch(*given.values(), tiles=WAYS[way])  # type: ignore[arg-type]
            assert error(out, given) < 2e-2, (shape, kind)
            given.x_TK[:-1] = float("nan")
            again = launch(*given.values(), tiles=WAYS[way])  # type: ignore[arg-type]
            assert torch.equal(again[-1], out[-1]), (shape, kind)
