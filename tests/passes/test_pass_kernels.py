"""The fused kernels of the passes against their plain-torch references, on random shapes.

`launch` runs under Triton's interpreter without a GPU; the tests marked gpu run it compiled, with poisoned memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret

from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.norm import layer_norm, residual_rms_norm, rms_norm
from compiled_engine.passes.rope import rope_angles

SHAPES = [(1, 8), (2, 64), (7, 100), (64, 1024), (3, 4096), (513, 640), (5, 5120)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LLAMA = {"OFFSET": 0.0, "WIDE": False, "inner_weight_ptr": None}
GEMMA = {"OFFSET": 1.0, "WIDE": True}

INTERPRETED = """
import torch
from compiled_engine.passes.norm import layer_norm
from compiled_engine.passes.norm import residual_rms_norm
from compiled_engine.passes.norm import rms_norm
from compiled_engine.passes.rope import rope_angles
from compiled_engine.passes.linear import silu_mul

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
    by_token = angles[0], torch.rand(tokens, width // 2, generator=generator), *angles[2:]
    for layout in ("halves", "pairs", "once"):
        for given in (angles, by_token):
            same(rope_angles.launch(*given, layout), rope_angles.reference(*given, layout))
print("right")
"""


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
        (rope_angles.rope_angles_kernel, {"NUM_PAIRS": 64, "BLOCK": 64, "LAYOUT": "halves", "PER_TOKEN": 0}),
        (rope_angles.rope_angles_kernel, {"NUM_PAIRS": 64, "BLOCK": 64, "LAYOUT": "pairs", "PER_TOKEN": 0}),
        (rope_angles.rope_angles_kernel, {"NUM_PAIRS": 48, "BLOCK": 64, "LAYOUT": "halves", "PER_TOKEN": 1}),
    ],
)
def test_compiled_for_hopper(kernel: Any, constants: dict[str, Any]) -> None:
    """Needs no GPU."""
    types = {"eps": "fp32", "scale": "fp32", "positions_ptr": "*i64", "inv_freq_ptr": "*fp32"}
    program = compiled_for_hopper(kernel, constants | {"DEPENDENT_LAUNCH": 1}, types, aligned=())
    assert "griddepcontrol.wait" in program.asm["ptx"]


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
    for given in (angles, (angles[0], torch.rand(shape[0], shape[1] // 2, device="cuda"), *angles[2:])):
        close(rope_angles.rope_angles(*given), rope_angles.reference(*given))
