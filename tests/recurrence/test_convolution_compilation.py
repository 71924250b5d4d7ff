"""Kernels of convolutions, compiled for a Hopper: they wait for the kernel before, and release the one behind."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.recurrence import convolution_triton

# Of LFM2-1.2B.
SHAPE: dict[str, Any] = {"D": 2048, "W": 3, "ACTIVATION": "", "DEPENDENT_LAUNCH": True}
TILES = {"convolve_kernel": {"TILE_T": 16, "TILE_D": 64, "TILE_R": 64}}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["shift_state_kernel", "convolve_kernel"])
def test_kernels_compile_for_hopper(name: str, gated: bool) -> None:
    kernel = getattr(convolution_triton, name)
    kernel = getattr(kernel, "jit_function", kernel)
    constants = SHAPE | TILES.get(name, {"TILE_D": 256, "COMPUTES": True}) | {"bias_ptr": None}
    constants |= {} if gated else {"factor_ptr": None, "gate_ptr": None}
    types = dict.fromkeys(("rows_ptr", "query_start_loc_ptr", "seq_lens_ptr"), "*i32")
    types |= {each: "i32" for each in kernel.arg_names if each.startswith("num_") or each.endswith("_stride")}
    signature = {each: "constexpr" if each in constants else types.get(each, "*bf16") for each in kernel.arg_names}
    aligned = [each for each, kind in signature.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(each),): value for each, value in constants.items()},
        {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned},
    )
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    before, after = program.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" not in before
    assert "st.global" in after
