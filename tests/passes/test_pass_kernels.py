"""The fused kernels of the passes against their plain-torch references, on random shapes.

`launch` runs under Triton's interpreter without a GPU; the tests marked gpu run it compiled, with poisoned memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret
from small_batch_linear_cases import Case, arguments_of

from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.linear import small_batch_linear_op as linear_op
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, Tiles, choose_tiles
from compiled_engine.passes.norm import layer_norm, residual_rms_norm, rms_norm
from compiled_engine.passes.rope import rope_angles

SHAPES = [(1, 8), (2, 64), (7, 100), (64, 1024), (3, 4096), (513, 640), (5, 5120)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LINEAR_SHAPES = [(1, 70, 96), (1, 64, 1024), (2, 96, 2048), (7, 70, 96), (16, 64, 256), (17, 48, 512), (70, 64, 136)]
LINEAR_KINDS: list[dict[str, bool]] = [
    {},
    {"norm": True, "bias": True},
    {"silu_mul": True, "norm": True},
    {"silu_mul": True, "norm": True, "gemma": True},
    {"silu_mul": True, "bias": True},
    {"residual": True},
    {"norm": True, "residual": True, "bias": True},
]

LLAMA = {"OFFSET": 0.0, "WIDE": False, "inner_weight_ptr": None}
GEMMA = {"OFFSET": 1.0, "WIDE": True}

INTERPRETED = """
import torch
from test_pass_kernels import LINEAR_KINDS, LINEAR_SHAPES, linear_tiles
from small_batch_linear_cases import Case, arguments_of
from compiled_engine.passes.norm import layer_norm
from compiled_engine.passes.norm import residual_rms_norm
from compiled_engine.passes.norm import rms_norm
from compiled_engine.passes.rope import rope_angles
from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.linear import small_batch_linear_op as linear_op
from compiled_engine.passes.linear.small_batch_linear_op import launch

generator = torch.Generator().manual_seed(0)
same = lambda got, expected: torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
for tokens, width in [(1, 8), (3, 100), (5, 256)]:
    x, residual = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    weight, gate_up = torch.randn(width, generator=generator), torch.randn(tokens, 2 * width, generator=generator)
    for how in ((3e-5,), (3e-5, 1.0, True)):
        same(rms_norm.launch(x, weight, *how), rms_norm.reference(x, weight, *how))
        for norm in ((x, residual, weight, *how), (x, residual, weight, 3e-5, 1.0, True, weight * 2)):
            same(residual_rms_norm.launch(*norm), residual_rms_norm.reference(*norm))
    for activation in ("silu", "gelu_tanh", "gelu"):
        same(silu_mul.launch(gate_up, activation), silu_mul.reference(gate_up, activation))
    for norm in ((residual, weight, weight * 2, 3e-5), (None, weight, None, 3e-5), (residual, None, None, 0.1)):
        same(layer_norm.launch(x, *norm), layer_norm.reference(x, *norm))
    angles = torch.arange(tokens) * 7, torch.rand(width // 2, generator=generator), 1.3, torch.float32
    for layout in ("halves", "pairs", "once"):
        same(rope_angles.launch(*angles, layout), rope_angles.reference(*angles, layout))
for shape in LINEAR_SHAPES[:4]:
    for kind in LINEAR_KINDS:
        arguments = arguments_of(Case(*shape, **kind), torch.float32).values()
        for tiles in linear_tiles(shape, kind):
            same(launch(*arguments, tiles), linear_op.reference(*arguments))
print("right")
"""


def linear_tiles(shape: tuple[int, int, int], kind: dict[str, bool]) -> list[Tiles | None]:
    """The default tiles, those of half precision, and, where they may be, small ones that split K."""
    tokens, rows, k = shape
    half = choose_tiles(tokens, rows, k, "silu_mul" in kind, torch.bfloat16)
    split = [Tiles(half.tokens, 16, 32, split_k=3, num_stages=2)] if tokens > 1 and "silu_mul" not in kind else []
    # The interpreter knows no streams, which tell the counters of split tiles apart.
    return [None, half] if half.split_k == 1 else [None] if not torch.cuda.is_available() else [None, half, *split]


def test_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (residual_rms_norm.residual_rms_norm_kernel, LLAMA | {"HIDDEN_SIZE": 4096, "BLOCK": 4096}),
        (residual_rms_norm.residual_rms_norm_kernel, GEMMA | {"HIDDEN_SIZE": 2560, "BLOCK": 4096}),
        (silu_mul.silu_mul_kernel, {"WIDTH": 3072, "BLOCK": 1024, "ACTIVATION": "silu"}),
        (silu_mul.silu_mul_kernel, {"WIDTH": 3072, "BLOCK": 1024, "ACTIVATION": "gelu_tanh"}),
        (silu_mul.silu_mul_kernel, {"WIDTH": 3072, "BLOCK": 1024, "ACTIVATION": "gelu"}),
        (layer_norm.layer_norm_kernel, {"HIDDEN_SIZE": 3072, "BLOCK": 4096}),
        (rms_norm.rms_norm_kernel, {"K": 4096, "BLOCK_K": 4096, "OFFSET": 0.0, "WIDE": False}),
        (rms_norm.rms_norm_kernel, {"K": 2560, "BLOCK_K": 4096, "OFFSET": 1.0, "WIDE": True}),
        (rope_angles.rope_angles_kernel, {"NUM_PAIRS": 64, "BLOCK": 64, "LAYOUT": "halves"}),
        (rope_angles.rope_angles_kernel, {"NUM_PAIRS": 64, "BLOCK": 64, "LAYOUT": "pairs"}),
    ],
)
def test_compiled_for_hopper(kernel: Any, constants: dict[str, Any]) -> None:
    """Needs no GPU."""
    types = {"eps": "fp32", "scale": "fp32", "positions_ptr": "*i64", "inv_freq_ptr": "*fp32"}
    program = compiled_for_hopper(kernel, constants | {"DEPENDENT_LAUNCH": 1}, types, aligned=())
    assert "griddepcontrol.wait" in program.asm["ptx"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("silu", [False, True])
def test_there_are_tiles_for_every_shape(silu: bool, dtype: torch.dtype) -> None:
    for device in ("", "NVIDIA H200", "a device that nobody has measured"):
        for tokens in (*TOKEN_BUCKETS, 2, 5, 33, 64, 500):
            for rows, k in ((2, 8), (64, 64), (4096, 1024), (6144, 1024), (151936, 4096), (24576, 4096)):
                tiles = choose_tiles(tokens, rows, k, silu, dtype, device)
                assert (tiles.tokens == 1) == (tokens == 1)
                assert tiles.split_k == 1 or not silu
                outputs = rows // 2 if silu else rows
                programs = -(-outputs // tiles.rows) * -(-tokens // tiles.tokens)
                assert tiles.split_k == 1 or programs <= linear_op.MAX_TILES


def poison(*sizes: int, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next allocation of this size gets."""
    torch.full(sizes, float("nan"), device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("shape",))
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_silu_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    def close(got: Any, expected: Any) -> None:
        torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])

    x, residual = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(shape[1], device="cuda", dtype=dtype)
    for how in ((), (1.0, True), (1.0, True, weight * 2)):
        arguments = x, residual, weight, 1e-6, *how
        poison(*shape, dtype=dtype)
        close(residual_rms_norm.residual_rms_norm(*arguments), residual_rms_norm.reference(*arguments))
        poison(*shape, dtype=dtype)
        close(rms_norm.rms_norm(x, weight, 1e-6, *how[:2]), rms_norm.reference(x, weight, 1e-6, *how[:2]))
    for arguments in ((x, residual, weight, weight * 2, 1e-5), (x, None, None, None, 1e-5)):
        poison(*shape, dtype=dtype)
        close(layer_norm.layer_norm(*arguments), layer_norm.reference(*arguments))
    gate_up = torch.randn(shape[0], 2 * shape[1], device="cuda", dtype=dtype)
    for activation in ("silu", "gelu_tanh", "gelu"):
        poison(*shape, dtype=dtype)
        close(silu_mul.silu_mul(gate_up, activation), silu_mul.reference(gate_up, activation))
    angles = torch.arange(shape[0], device="cuda") * 37, torch.rand(shape[1] // 2, device="cuda"), 1.5, dtype
    close(rope_angles.rope_angles(*angles), rope_angles.reference(*angles))


@pytest.mark.gpu
@pytest.mark.product(one_in=24, each=("shape",))
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("shape", [*LINEAR_SHAPES, (1, 4096, 1024), (8, 1024, 3072), (32, 1024, 2048)])
def test_small_batch_linear_on_a_gpu(shape: tuple[int, int, int], kind: dict[str, bool], dtype: torch.dtype) -> None:
    """Right, the same whenever it is repeated, and the same for a row whatever stands in the others."""
    arguments = arguments_of(Case(*shape, **kind), dtype, "cuda").values()
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in arguments]
    expected = linear_op.reference(*wide)
    for tiles in linear_tiles(shape, kind):
        poison(*expected.shape, dtype=dtype)
        got = linear_op.launch(*arguments, tiles)
        error = (got.float() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(got, linear_op.launch(*arguments, tiles))
        others = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
        others[0][1:] = float("nan")
        assert torch.equal(got[:1], linear_op.launch(*others, tiles)[:1])
