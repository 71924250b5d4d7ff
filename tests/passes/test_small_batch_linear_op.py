"""The ways through the small-batch linear's kernels: tokens, splits between warps and programs, steps, norm inside.

Without a GPU they run under Triton's interpreter, and compile for Hopper; with one, also inside a CUDA graph.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret
from small_batch_linear_cases import Case, arguments_of

from compiled_engine.passes.framework.profile import load_profile
from compiled_engine.passes.linear.small_batch_linear_gemv import one_token_kernel
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, choose_tiles, columns_ahead, launch, reference
from compiled_engine.passes.linear.small_batch_linear_tiles import few_tokens_kernel

WAYS = {
    "one token, one step": Tiles(1, 4, 128),
    "one token, several steps": Tiles(1, 2, 32),
    "one step": Tiles(8, 16, 128, norm_inside=True),
    "several steps": Tiles(8, 16, 32, norm_inside=True),
    "warps share a step": Tiles(8, 16, 32, groups=4, norm_inside=True),
    "warps share several steps": Tiles(8, 16, 16, groups=2, norm_inside=True),
    "programs share": Tiles(16, 16, 16, split_k=2),
    "programs share and warps share": Tiles(8, 16, 16, groups=2, split_k=4),
    "tokens first": Tiles(64, 32, 16, norm_inside=True),
    "tokens first, programs share": Tiles(64, 16, 32, split_k=2),
}
# tokens, rows of the weight, columns: not multiples of the tiles, more tokens than a tile
SHAPES = [(1, 70, 128), (3, 70, 104), (11, 34, 128), (70, 36, 72)]
KINDS: list[dict[str, bool]] = [
    {},
    {"norm": True, "residual": True},
    {"silu_mul": True, "norm": True, "bias": True},
    {"silu_mul": True, "residual": True},
]

INTERPRETED = """
import torch
from test_small_batch_linear_op import WAYS, kinds_of, shapes_of
from small_batch_linear_cases import Case, arguments_of
from compiled_engine.passes.linear.small_batch_linear_op import launch
from compiled_engine.passes.linear.small_batch_linear_op import reference

count = 0
for name, tiles in WAYS.items():
    for place, shape in enumerate(shapes_of(tiles)):
        for kind in kinds_of(tiles, place):
            arguments = arguments_of(Case(*shape, **kind), torch.float32).values()
            expected = reference(*arguments)
            torch.full_like(expected, float("nan"))
            got = launch(*arguments, tiles)
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, msg=f"{name} {shape} {kind}")
            count += 1
print(count)
"""


def shapes_of(tiles: Tiles) -> list[tuple[int, int, int]]:
    """One that a tile of tokens holds, and one that it does not."""
    if tiles.tokens == 1:
        return SHAPES[:1]
    return [SHAPES[1], next(shape for shape in SHAPES[1:] if shape[0] > tiles.tokens)]


def kinds_of(tiles: Tiles, place: int) -> list[dict[str, bool]]:
    """Every kind with one of the two shapes that there are."""
    return KINDS if tiles.tokens == 1 else KINDS[place::2]


def test_every_way_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    expected = sum(len(kinds_of(tiles, place)) for tiles in WAYS.values() for place, _ in enumerate(shapes_of(tiles)))
    assert run.stdout.strip() == str(expected), run.stderr[-2000:]


def compiled(tiles: Tiles, rows: int, k: int, norm: bool, silu_mul: bool) -> Any:
    constants = {
        "K": k,
        "BIAS": False,
        "NORM": norm and (tiles.norm_inside or tiles.tokens == 1),
        "RESIDUAL": not silu_mul,
        "SILU_MUL": silu_mul,
        "ACTIVATION": "silu",
        "OFFSET": 0.0,
        "ROWS": tiles.rows,
        "BLOCK_K": tiles.block_k,
        "DEPENDENT_LAUNCH": True,
    }
    kernel = one_token_kernel
    if tiles.tokens > 1:
        kernel = few_tokens_kernel
        constants |= {"TOKENS": tiles.tokens, "GROUPS": tiles.groups, "SPLIT_K": tiles.split_k}
        constants |= {"NUM_STAGES": tiles.num_stages, "COLUMNS_AHEAD": columns_ahead(rows, k, 2, tiles)}
    types = {"eps": "fp32", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "x_stride"]
    return compiled_for_hopper(kernel, constants, types, aligned=aligned, num_warps=tiles.num_warps)


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize(
    ("tokens", "rows", "k", "norm", "silu_mul"),
    [
        (1, 4096, 1024, True, False),
        (1, 24576, 4096, True, True),
        (8, 4096, 1024, True, False),
        (8, 6144, 1024, True, True),
        (8, 1024, 3072, False, False),
        (32, 1024, 2048, False, False),
        (64, 24576, 4096, True, True),
    ],
)
def test_weights_are_under_way_before_the_wait_and_nothing_else(
    tokens: int, rows: int, k: int, norm: bool, silu_mul: bool
) -> None:
    """On Hopper, in the kernels of the profile: what earlier kernels write or read is touched after they ended."""
    tiles = choose_tiles(tokens, rows, k, silu_mul, torch.bfloat16, "NVIDIA H200")
    program = compiled(tiles, rows, k, norm, silu_mul)
    before, after = re.split(r"griddepcontrol\.wait", program.asm["ptx"])
    in_registers = tiles.tokens == 1 or tiles.groups * tiles.block_k * tiles.split_k >= k
    assert ("ld.global" if in_registers else "cp.async.bulk.prefetch") in before
    assert not re.search(r"cp\.async\.c[ag]", before)
    assert "evict_last" not in before
    assert "st.global" not in before
    assert "atom" not in before
    assert "st.global" in after
    assert program.metadata.shared <= 227 << 10


def test_measured_tiles_are_tiles() -> None:
    profile = load_profile("NVIDIA H200")
    assert profile is not None
    for tokens, rows, k, silu_mul in profile.tiles:
        tiles = choose_tiles(tokens, rows, k, silu_mul, torch.bfloat16, "NVIDIA H200")
        assert tiles == Tiles(**profile.tiles[tokens, rows, k, silu_mul])
        assert tiles.tokens >= tokens
        assert not silu_mul or tiles.rows % 2 == 0


def test_the_norm_needs_whole_rows() -> None:
    with pytest.raises(ValueError, match=r"norm_inside with split_k 2.*allowed: split_k 1"):
        Tiles(8, 16, 64, split_k=2, norm_inside=True)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("way",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_a_graph_on_a_gpu(way: str, dtype: torch.dtype) -> None:
    """Chained launches, replayed: right every time, and bit for bit the same."""
    tiles = WAYS[way]
    for shape in SHAPES:
        if (tiles.tokens == 1) != (shape[0] == 1):
            continue
        for kind in KINDS:
            arguments = arguments_of(Case(*shape, **kind), dtype, "cuda").values()
            expected = reference(*(value.float() if isinstance(value, torch.Tensor) else value for value in arguments))
            first = launch(*arguments, tiles)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = [launch(*arguments, tiles) for _ in range(4)]
            for _ in range(3):
                for output in outputs:
                    output.fill_(float("nan"))
                graph.replay()
                assert all(torch.equal(output, first) for output in outputs)
            assert float((first.float() - expected).norm() / expected.norm()) < (
                1e-2 if dtype == torch.bfloat16 else 2e-3
            )
