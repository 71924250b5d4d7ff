"""Kernels that start before those before them have ended: what they read before they wait is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hopper_compilation import compiled_for_hopper
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, MAX_LISTED_SPLITS
from compiled_engine.attention.backends.decoded_contexts import decode_contexts_kernel
from compiled_engine.attention.backends.triton_listed_decode import listed_decode_kernel
from compiled_engine.attention.backends.work_list import HEADER, list_kernel
from compiled_engine.engine.input_batch import InputBuffers, launch_prepare
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_kernels import TILE, prepare_kernel

STEP: dict[str, Any] = {"NUM_AHEAD": 0, "MAX_BLOCKS": 8, "BLOCK_SIZE": 16, "TILE": TILE}
STEP |= dict.fromkeys(("offsets_ptr", "ahead_ptr", "history_ptr"))
LISTED: dict[str, Any] = {"HEADER": HEADER, "MAX_SPLITS": MAX_LISTED_SPLITS, "NUM_KV_HEADS": 2}
HEADS: dict[str, Any] = {"HEAD_DIM": 64, "WIDTH": 64, "BLOCK_SIZE": 16, "WINDOW": 0, "TILE_D": 64}
ATTENTION: dict[str, Any] = LISTED | HEADS | {"GROUP": 2, "TILE_M": 16, "TILE_N": 64, "GRAIN": GRAIN, "CAP_SCALE": 0.0}
ATTENTION |= {"Q_HEAD_STRIDE": 64, "OUT_HEAD_STRIDE": 64, "scales_ptr": None, "sinks_ptr": None}
# Kernels whose results others read before they wait, with the constants that they are compiled for.
WRITERS = {
    "prepare": (prepare_kernel, STEP | {"DECODES_ONLY": False}),
    "prepare, decodes": (prepare_kernel, STEP | {"DECODES_ONLY": True}),
    "list": (list_kernel, LISTED | {"QUERIES": 32, "TILE_K": 2}),
    "decode contexts": (decode_contexts_kernel, HEADS | {"NUM_KV_HEADS": 2, "TILE_H": 128}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_kernel_starts_before_the_end_of_one_whose_results_are_read_before_a_wait(name: str) -> None:
    kernel, constants = WRITERS[name]
    types = {"cache_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "new_cache_ptr": "*bf16"}
    types |= {f"{name}_ptr": "*i64" for name in ("input_ids", "positions", "slot_mapping")}
    types |= {f"{name}_ptr": "*i64" for name in ("logits_index", "sample_positions")}
    ptx = compiled_for_hopper(kernel, constants | {"DEPENDENT_LAUNCH": True}, types, pointers="*i32").asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    assert "griddepcontrol.launch_dependents" not in ptx


def test_splits_are_read_after_the_wait_as_a_layer_may_have_planned_them_just_before() -> None:
    types = {"scale_log2": "fp32", **{f"{name}_ptr": "*i32" for name in ("work", "seq_lens", "query_start_loc")}}
    types |= {"block_table_ptr": "*i32", **{f"partial{name}_ptr": "*fp32" for name in ("", "_max", "_sum")}}
    program = compiled_for_hopper(listed_decode_kernel, ATTENTION | {"DEPENDENT_LAUNCH": True}, types)
    before, _, after = program.asm["ptx"].partition("griddepcontrol.wait")
    assert "ld.global" not in before
    assert "ld.global" in after


@triton.jit
def _letting_go_kernel() -> None:
    """Let the next kernel start before this one has waited, like norms do."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def _reading_early_kernel(seq_lens_ptr: tl.tensor, seen_ptr: tl.tensor) -> None:
    """Read lengths before waiting, like attention does."""
    seen = tl.load(seq_lens_ptr, volatile=True)
    gdc_wait()
    tl.store(seen_ptr, seen)


@pytest.mark.gpu
def test_lengths_are_there_before_attention_waits() -> None:
    """With a chunk of so many tokens that it takes long to prepare, and no kernel that waits before the next may start,
    as in a pipeline stage behind the first."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels start early from compute capability 9 on")
    device, num_tokens = torch.device("cuda"), 1 << 16
    states = RequestStates(2, num_tokens + 64, 16, device)
    buffers = InputBuffers(num_tokens, 2, states.block_table_SB.shape[1], states.writes, device)
    states.prefill_len_S.fill_(num_tokens)
    buffers.rows_R.zero_()
    buffers.query_start_loc_R1.copy_(torch.tensor([0, num_tokens, num_tokens]))
    seen_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def step() -> None:
        launch_prepare(states, buffers, 1, num_tokens, decodes_only=False)
        _letting_go_kernel[(1,)](launch_pdl=True)
        _reading_early_kernel[(1,)](buffers.seq_lens_R, seen_1, launch_pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for computed in range(32):
        states.num_computed_S.fill_(computed)
        graph.replay()
        assert seen_1.item() == computed + num_tokens
