"""The kernel for decodes with short contexts: compiled for Hopper without a GPU, and on one against the ops that it
stands for; and which batches it serves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attention_cases import PADDING, Case, decodes
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, stack_bytes
from test_rope_attend import DECODES, TOLERANCE, WITH_PADDING, arguments_of, copied

from compiled_engine.attention.backends.decode_splits import LONG_SPLIT, SHORT_CONTEXTS
from compiled_engine.attention.backends.kernel_choice import layer_facts
from compiled_engine.attention.backends.short_decode import (
    HEAD_DIMS,
    MANY,
    MAX_GROUP,
    MOST,
    SEVERAL,
    ShortTiles,
    short_decode,
    short_decode_kernel,
)
from compiled_engine.attention.inputs import Rotation, Scoring, inputs_of
from compiled_engine.attention.op import attend
from compiled_engine.passes.rope import rope_attend as op

# Bytes of a thread's stack: addresses, where a tile would be kilobytes.
MOST_STACK = 96
NUM_SMS = 132
TILES = (*(ShortTiles.of(8, NUM_SMS, context) for context in SHORT_CONTEXTS), SEVERAL, MANY, MOST)
OF_TILES = pytest.mark.parametrize("tiles", TILES, ids=[f"{tiles.keys} keys, {tiles.stages} stages" for tiles in TILES])
# One key, both sides of a tile's end, several tiles.
CASES = (
    Case("decodes around a small tile", decodes(63, 64, 65, 66, 127, 128, 129, 130), num_heads=8, head_dim=128),
    Case("decodes around a tile", (*decodes(1, 2, 255, 256, 257, 258), PADDING), num_heads=4, head_dim=128),
    Case("several tiles", decodes(512, 513, 900), num_heads=8, head_dim=64),
    *(case for case in DECODES if case.head_dim in HEAD_DIMS and case.num_heads <= MAX_GROUP * case.num_kv_heads),
)


def compiled(head_dim: int, group: int, window: int, sinks: bool, cap_scale: float, tiles: ShortTiles) -> Any:
    constants: dict[str, Any] = {
        "STRIDE_MULTIPLE": 8,
        "Q_HEAD_STRIDE": head_dim,
        "K_HEAD_STRIDE": head_dim,
        "V_HEAD_STRIDE": head_dim,
        "OUT_HEAD_STRIDE": head_dim,
        "OFFSET": 0.0,
        "WIDE": False,
        "WINDOW": window,
        "CAP_SCALE": cap_scale,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "KEYS": tiles.keys,
        "WARPS": tiles.warps,
        "STAGES": tiles.stages,
    } | ({} if sinks else {"sinks_ptr": None})
    types = {"slot_mapping_ptr": "*i64", "seq_lens_ptr": "*i32", "block_table_ptr": "*i32"}
    types |= {"eps": "fp32", "scale_log2": "fp32"}
    names = [name for name in short_decode_kernel.arg_names if name.endswith("_ptr")]
    aligned = [name for name in names if name not in {*types, "sinks_ptr"}]
    options = {"num_warps": tiles.warps, "maxnreg": tiles.registers or None}
    return compiled_for_hopper(short_decode_kernel, constants, types, aligned=aligned, **options)


@OF_TILES
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "sinks", "cap_scale"),
    [
        (128, 16, 100, True, 0.0),
        pytest.param(128, 2, 0, False, 0.0, marks=pytest.mark.product(one_in=1000)),
        pytest.param(64, 7, 0, False, 0.5, marks=pytest.mark.product(one_in=1000)),
    ],
)
def test_it_fits_and_reads_keys_before_the_wait(
    head_dim: int, group: int, window: int, sinks: bool, cap_scale: float, tiles: ShortTiles
) -> None:
    program = compiled(head_dim, group, window, sinks, cap_scale, tiles)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) <= MOST_STACK
    before, after = re.split(r"griddepcontrol\.wait", program.asm["ptx"])
    assert "ld.global.v4" in before
    assert "cp.async.cg.shared.global" in before
    assert "st.global" not in before
    assert "st.global" in after


def in_one(arguments: list[Any], tiles: ShortTiles) -> None:
    q, k, v, cache, out = arguments[:5]
    scoring, inputs = Scoring(*arguments[16:21]), inputs_of(tuple(arguments))
    rotation = Rotation(*arguments[5:16])
    short_decode(q, k, v, rotation, cache, out, inputs, inputs.seq_lens_R.shape[0], scoring, tiles)


@pytest.mark.gpu
@pytest.mark.product(one_in=24, each=("case",))
@OF_TILES
@pytest.mark.parametrize(("dtype", "normed"), [(torch.bfloat16, True), (torch.float16, False)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_the_two_ops(case: Case, dtype: torch.dtype, normed: bool, tiles: ShortTiles) -> None:
    """Unused slots and the output are NaN; contexts may be longer than a tile."""
    require_hopper()
    arguments = arguments_of(case, dtype, "cuda", normed)
    one, two = copied(arguments), copied(arguments)
    in_one(one, tiles)
    op.unfused(attend, *two)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(one[3], two[3], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(one[4], two[4], rtol=tolerance, atol=tolerance)
    assert not one[4][inputs_of(tuple(arguments)).slot_mapping_T < 0].any()


@pytest.mark.gpu
@OF_TILES
def test_padding_and_unused_slots_change_no_bit(tiles: ShortTiles) -> None:
    require_hopper()
    outputs = []
    for garbage in (float("nan"), 1e4):
        arguments = arguments_of(WITH_PADDING, torch.bfloat16, "cuda", True, garbage)
        in_one(arguments, tiles)
        outputs.append(arguments[4][inputs_of(tuple(arguments)).slot_mapping_T >= 0])
    assert torch.equal(*outputs)


@pytest.mark.gpu
def test_contexts_follow_from_the_programs_that_a_multiprocessor_has() -> None:
    require_hopper()
    num_sms = torch.cuda.get_device_properties().multi_processor_count

    def short_contexts(num_requests: int, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[int, ...]:
        return layer_facts(16, 8, head_dim, dtype, dtype, torch.device("cuda")).short_contexts(num_requests)

    assert short_contexts(num_sms // 8) == SHORT_CONTEXTS
    assert short_contexts(num_sms // 8 + 1) == SHORT_CONTEXTS[-1:]
    assert short_contexts(num_sms // 4) == SHORT_CONTEXTS[-1:]
    assert short_contexts(num_sms // 4 + 1) == (SHORT_CONTEXTS[-1], LONG_SPLIT)
    assert short_contexts(num_sms // 2) == (SHORT_CONTEXTS[-1], LONG_SPLIT)
    assert short_contexts(num_sms // 2 + 1) == (LONG_SPLIT,)
    assert short_contexts(1, dtype=torch.float32) == ()
    assert short_contexts(1, head_dim=96) == ()
