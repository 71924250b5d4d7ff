"""Rotation, KV write and attention of requests with drafts over short contexts in one kernel: compiled for Hopper
without a GPU, and on one against the two ops that it stands for; and which batches it serves."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import AUTO
from draft_attention_cases import drafted
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, stack_bytes

from compiled_engine.attention.backends.decode_splits import SHORT_CONTEXTS
from compiled_engine.attention.backends.short_decode import ShortTiles
from compiled_engine.attention.backends.short_drafts import fits_one_tile, short_drafts, short_drafts_kernel
from compiled_engine.attention.inputs import Rotation, Scoring
from compiled_engine.attention.op import attend
from compiled_engine.passes.rope import rope_attend as op

TILES = [ShortTiles(keys) for keys in SHORT_CONTEXTS]
OF_TILES = pytest.mark.parametrize("tiles", TILES, ids=[f"{tiles.keys} keys" for tiles in TILES])
# Bytes of a thread's stack: addresses, where a tile would be kilobytes.
MOST_STACK = 96
SHAPES = ((16, 8, 128), (32, 8, 128), (8, 2, 64), (16, 8, 64), (4, 1, 128))


@OF_TILES
@pytest.mark.parametrize(
    ("head_dim", "group", "query_len", "window"),
    [(128, 4, 4, 0), pytest.param(64, 2, 7, 100, marks=pytest.mark.product(one_in=1000))],
)
def test_it_fits_and_reads_keys_before_the_wait(
    head_dim: int, group: int, query_len: int, window: int, tiles: ShortTiles
) -> None:
    constants: dict[str, Any] = {f"{name}_HEAD_STRIDE": head_dim for name in ("Q", "K", "V", "OUT")}
    constants |= {"STRIDE_MULTIPLE": 8, "OFFSET": 0.0, "WIDE": False, "WINDOW": window, "CAP_SCALE": 0.0}
    constants |= {"GROUP": group, "BLOCK_SIZE": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "QUERY_LEN": query_len}
    constants |= {"KEYS": tiles.keys, "WARPS": tiles.warps, "sinks_ptr": None}
    types = {"slot_mapping_ptr": "*i64", "seq_lens_ptr": "*i32", "block_table_ptr": "*i32"}
    types |= {"eps": "fp32", "scale_log2": "fp32"}
    program = compiled_for_hopper(short_drafts_kernel, constants, types, num_warps=tiles.warps)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) <= MOST_STACK
    before, after = re.split(r"griddepcontrol\.wait", program.asm["ptx"])
    assert before.count("ld.global.v4") == tiles.keys * head_dim // (8 * 32 * tiles.warps)
    assert "cp.async.cg.shared.global" in before
    assert "st.global" not in before
    assert "st.global" in after
    # Of the arguments none is left unread: two more are scratch memory, which there is not.
    num_arguments = len(getattr(short_drafts_kernel, "jit_function", short_drafts_kernel).arg_names) - len(constants)
    assert len(set(re.findall(r"ld\.param.*\[(\w+)\]", program.asm["ptx"]))) == num_arguments


def arguments_of(seed: int, dtype: torch.dtype, longest: int) -> tuple[list[Any], int]:
    """Of the op, with q, k and v as views of one tensor, and the rows of each request."""
    while True:
        case, batch = drafted(seed, dtype, "cuda", shapes=SHAPES, longest=longest, storages=(AUTO,))
        query_len = int(batch.inputs.host_3[1])
        if fits_one_tile(query_len, case.num_heads // case.num_kv_heads):
            break
        seed += 1000
    generator = torch.Generator().manual_seed(seed)
    parts = [batch.q_THd, batch.k_TKd, batch.v_TKd]
    q, k, v = (
        part.unflatten(-1, (-1, case.head_dim))
        for part in torch.cat([part.flatten(1) for part in parts], 1).split([p[0].numel() for p in parts], 1)
    )
    weights = tuple(torch.randn(case.head_dim, generator=generator).to("cuda", dtype) for _ in range(2))
    angles = torch.rand(len(q), 1, case.head_dim, generator=generator).mul(7)
    cos, sin = angles.cos().to("cuda", dtype), angles.sin().to("cuda", dtype).repeat(1, 1, 2)[..., : case.head_dim]
    rotation = Rotation(
        *(weights if seed % 3 else (None, None)), 3e-4, cos, sin, *((0.5, True), (0.0, False))[seed % 2]
    )
    inputs = replace(batch.inputs, backend="triton")
    out = torch.full_like(batch.q_THd, math.nan)
    return [q, k, v, batch.kv_cache_N2PKd, out, *rotation, *batch.scoring, *inputs.flat()], query_len


def wide(argument: Any, dtype: torch.dtype) -> Any:
    return argument.float() if isinstance(argument, torch.Tensor) and argument.dtype == dtype else argument


@pytest.mark.gpu
@pytest.mark.product(one_in=2, each=("dtype", "tiles"))
@OF_TILES
@pytest.mark.parametrize("fills", [False, True], ids=["a part", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_two_ops(dtype: torch.dtype, fills: bool, tiles: ShortTiles) -> None:
    """It writes what they write, and is as near as they are to what they compute in fp32; contexts of a part of the
    tile and of all of it, with drafts that are missing, and rows of padding; the same where it has nothing to write."""
    require_hopper()
    for seed in range(4):
        arguments, query_len = arguments_of(seed, dtype, tiles.keys + 1 if fills else 40)
        one, two = ([*arguments[:3], arguments[3].clone(), arguments[4].clone(), *arguments[5:]] for _ in range(2))
        exact = [wide(argument, dtype) for argument in two]
        rotation, inputs = Rotation(*one[5 : 5 + op.OF_ROTATION]), op.inputs_of(tuple(one))
        scoring = Scoring(*op.without_inputs(tuple(one[5:]))[op.OF_ROTATION :])
        short_drafts(*one[:3], rotation, one[3], one[4], inputs, query_len, scoring, tiles)
        # Without slots all keys and values are those of the cache, where they stand now.
        reads = replace(inputs, slot_mapping_T=torch.full_like(inputs.slot_mapping_T, -1))
        read = torch.full_like(one[4], math.nan)
        short_drafts(*one[:3], rotation, one[3], read, reads, query_len, scoring, tiles)
        op.unfused(attend, *two)
        op.unfused(attend, *exact)
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(one[3], two[3], rtol=2 * ulp, atol=2 * ulp, equal_nan=True)
        allowed = (two[4].double() - exact[4].double()).abs().max()
        for out in (one[4], read):
            far = (out.double() - exact[4].double()).abs().max()
            assert far <= 1.5 * allowed + 2 * ulp, f"seed {seed}: off by {far}, the two ops by {allowed}"
            assert not out[inputs.seq_lens_R == 0].any()
