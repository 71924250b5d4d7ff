"""Kernels of recurrences, compiled for a Hopper; those of convolutions wait for the kernel before, and release the one
behind."""

from __future__ import annotations

from typing import Any

import pytest
from hopper_compilation import compiled_for_hopper, stack_bytes

from compiled_engine.recurrence import convolution_triton
from compiled_engine.recurrence.decays_by_element_triton import element_products_kernel
from compiled_engine.recurrence.delta_rule_triton import (
    REGISTERS_OF_TOKENS,
    REGISTERS_OF_TOKENS_BY_ELEMENT,
    TILES_OF_CHUNKS,
    TILES_OF_TOKENS,
    delta_rule_kernel,
)
from compiled_engine.recurrence.state_space_triton import REGISTERS, state_space_kernel

# Of LFM2-1.2B.
SHAPE: dict[str, Any] = {"D": 2048, "W": 3, "ACTIVATION": "", "DEPENDENT_LAUNCH": True}
TILES = {"convolve_kernel": {"TILE_T": 16, "TILE_D": 64, "TILE_R": 64}}
# Of Qwen3.5-27B.
RULE: dict[str, Any] = {"H": 48, "GROUP": 3, "K": 128, "V": 128, "SCALE": 128**-0.5, "EPS": 1e-6, "NORMALISES": True}
RULE |= {"TILE_K": 128, "PRECISION": "tf32"}
INTEGERS = dict.fromkeys(("rows_ptr", "query_start_loc_ptr", "seq_lens_ptr", "lengths_ptr"), "*i32")


@pytest.mark.product(one_in=1000, each=("name",))
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["keep_inputs_kernel", "convolve_kernel"])
def test_kernels_of_convolutions_compile_for_hopper(name: str, gated: bool, drafts: int) -> None:
    kernel = getattr(convolution_triton, name)
    constants = SHAPE | TILES.get(name, {"TILE_D": 256, "COMPUTES": True}) | {"bias_ptr": None, "SLOTS": 2 + drafts}
    constants |= {} if gated else {"factor_ptr": None, "gate_ptr": None}
    pointers = [each for each in kernel.arg_names if each.endswith("_ptr")]
    program = compiled_for_hopper(kernel, constants, INTEGERS, aligned=pointers)
    before, after = program.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" not in before
    assert "st.global" in after


@pytest.mark.product(one_in=1000, each=("chunk",))
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("chunk", [1, 16])
def test_the_kernel_of_delta_rules_compiles_for_hopper(chunk: int, drafts: int) -> None:
    tile_v, num_warps = TILES_OF_TOKENS if chunk == 1 else TILES_OF_CHUNKS
    constants = RULE | {
        "TILE_V": tile_v,
        "CHUNK": chunk,
        "SLOTS": 2 * drafts + 1 if drafts else 0,
        "IN_TWO": drafts > 0,
    }
    constants |= {"DECAYS": 1, "keys_ptr": None, "scores_ptr": None}
    constants |= {} if drafts else {"drafts_ptr": None, "lengths_ptr": None}
    pointers = [each for each in delta_rule_kernel.arg_names if each.endswith("_ptr")]
    types = INTEGERS | dict.fromkeys(("state_ptr", "drafts_ptr"), "*fp32")
    options = {"num_warps": num_warps} | ({"maxnreg": REGISTERS_OF_TOKENS} if drafts and chunk == 1 else {})
    program = compiled_for_hopper(delta_rule_kernel, constants, types, aligned=pointers, **options)
    assert stack_bytes(program) == 0


# Of Kimi-Linear-48B.
ELEMENTS = RULE | {"H": 32, "GROUP": 1}


@pytest.mark.parametrize(("chunk", "drafts", "stack"), [(1, 3, 0), (16, 0, 64)])
def test_the_kernel_of_decays_by_element_compiles_for_hopper(chunk: int, drafts: int, stack: int) -> None:
    tile_v, num_warps = TILES_OF_TOKENS if chunk == 1 else TILES_OF_CHUNKS
    constants = ELEMENTS | {
        "TILE_V": tile_v,
        "CHUNK": chunk,
        "SLOTS": 2 * drafts + 1 if drafts else 0,
        "IN_TWO": drafts > 0,
    }
    constants |= {"DECAYS": 128} | ({"keys_ptr": None, "scores_ptr": None} if chunk == 1 else {})
    constants |= {} if drafts else {"drafts_ptr": None, "lengths_ptr": None}
    pointers = [each for each in delta_rule_kernel.arg_names if each.endswith("_ptr")]
    types = INTEGERS | dict.fromkeys(("state_ptr", "drafts_ptr", "g_ptr", "keys_ptr", "scores_ptr"), "*fp32")
    options = {"num_warps": num_warps} | ({"maxnreg": REGISTERS_OF_TOKENS_BY_ELEMENT} if drafts else {})
    program = compiled_for_hopper(delta_rule_kernel, constants, types, aligned=pointers, **options)
    assert stack_bytes(program) <= stack


def test_the_kernel_of_products_by_element_compiles_for_hopper() -> None:
    constants = ELEMENTS | {"CHUNK": 16, "SLICES": 4, "SUMS": "tf32x3"}
    constants = {name: value for name, value in constants.items() if name in element_products_kernel.arg_names}
    pointers = [each for each in element_products_kernel.arg_names if each.endswith("_ptr")]
    types = dict.fromkeys(("g_ptr", "keys_ptr", "scores_ptr"), "*fp32")
    program = compiled_for_hopper(element_products_kernel, constants, types, aligned=pointers, num_warps=4)
    assert stack_bytes(program) == 0
    assert "mma.sync" in program.asm["ptx"]


# Of Nemotron-H-8B, and with states as large as those of Falcon-H1.
@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(("chunk", "state_size", "drafts"), [(1, 128, 3), (32, 128, 0), (16, 256, 0)])
def test_the_kernel_of_state_space_models_compiles_for_hopper(chunk: int, state_size: int, drafts: int) -> None:
    tiles = {"TILE_V": 32} if chunk == 1 else {"TILE_V": 64}
    constants: dict[str, Any] = {"H": 128, "GROUP": 16, "K": state_size, "V": 64, "LEAST": 0.0, "MOST": None}
    constants |= {"CHUNK": chunk, "TILE_K": state_size, "PRECISION": "tf32", "IN_TWO": drafts > 0} | tiles
    constants |= {"SLOTS": 2 * drafts + 1} if drafts else {"SLOTS": 0, "drafts_ptr": None, "lengths_ptr": None}
    pointers = [each for each in state_space_kernel.arg_names if each.endswith("_ptr")]
    types = INTEGERS | dict.fromkeys(("state_ptr", "drafts_ptr", "A_ptr"), "*fp32")
    options = {"num_warps": 4, "maxnreg": REGISTERS} if chunk == 1 else {"num_warps": 8}
    program = compiled_for_hopper(state_space_kernel, constants, types, aligned=pointers, **options)
    assert stack_bytes(program) == 0
    assert "lg2.approx" not in program.asm["ptx"]  # its error next to 1 is that of small step sizes
