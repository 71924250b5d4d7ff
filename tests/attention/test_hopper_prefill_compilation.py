"""The Gluon kernel of prefill attention compiled for Hopper, which needs no GPU: it must fit, and keep its tiles in
registers."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hopper_compilation import compiled_for_hopper, stack_bytes

from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
from compiled_engine.attention.backends.hopper_prefill import SHARED, WIDTH, box_rows, hopper_prefill_kernel
from compiled_engine.attention.backends.work_list import HEADER

# Bytes of a thread's stack: addresses around an item's loop, where a tile would be kilobytes.
MOST_STACK = 96


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "block_size"),
    [(2, 128, 0, 16), (4, 128, 1024, 256), (7, 64, 0, 48)],
)
def test_it_fits(group: int, head_dim: int, window: int, block_size: int) -> None:
    box = box_rows(block_size)
    constants: dict[str, Any] = {
        "Q_HEAD_STRIDE": head_dim,
        "OUT_HEAD_STRIDE": head_dim,
        "WINDOW": window,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "BOX": box,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "MAX_SPLITS": MAX_LISTED_SPLITS,
        "HEADER": HEADER,
    }
    types = {"cache_desc": f"tensordesc<bf16[{box}, {WIDTH.value}],{SHARED.value!r}>", "scale_log2": "fp32"}
    types |= {"q_ptr": "*bf16", "out_ptr": "*bf16"}
    program = compiled_for_hopper(
        hopper_prefill_kernel, constants, types, aligned=("q_ptr", "out_ptr"), pointers="*i32"
    )
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) <= MOST_STACK
    ptx = program.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim}k16" in ptx
    boxes = 2 * 128 // box * head_dim // WIDTH.value
    assert ptx.count("cp.async.bulk.tensor") == boxes
    # One thread arrives for its group of warps. All of the group must be done before, with stores too: the other group
    # multiplies the rows of values that this one has cleared.
    ordered = re.findall(r"bar\.sync|st\.shared|wgmma\.mma_async|mbarrier\.arrive\.shared::cta\.b64 _", ptx)
    arrivals = [before for before, op in pairwise(ordered) if op.startswith("mbarrier")]
    assert set(arrivals) == {"bar.sync"}
