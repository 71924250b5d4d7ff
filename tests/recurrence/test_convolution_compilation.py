"""Kernels of convolutions, compiled for a Hopper: they wait for the kernel before, and release the one behind."""

from __future__ import annotations

from typing import Any

import pytest
from hopper_compilation import compiled_for_hopper

from compiled_engine.recurrence import convolution_triton

# Of LFM2-1.2B.
SHAPE: dict[str, Any] = {"D": 2048, "W": 3, "ACTIVATION": "", "DEPENDENT_LAUNCH": True}
TILES = {"convolve_kernel": {"TILE_T": 16, "TILE_D": 64, "TILE_R": 64}}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["shift_state_kernel", "convolve_kernel"])
def test_kernels_compile_for_hopper(name: str, gated: bool) -> None:
    kernel = getattr(convolution_triton, name)
    constants = SHAPE | TILES.get(name, {"TILE_D": 256, "COMPUTES": True}) | {"bias_ptr": None}
    constants |= {} if gated else {"factor_ptr": None, "gate_ptr": None}
    types = dict.fromkeys(("rows_ptr", "query_start_loc_ptr", "seq_lens_ptr"), "*i32")
    pointers = [each for each in kernel.arg_names if each.endswith("_ptr")]
    program = compiled_for_hopper(kernel, constants, types, aligned=pointers)
    before, after = program.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" not in before
    assert "st.global" in after
