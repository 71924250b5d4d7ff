"""The kernel for decodes over caches of 8 bits: compiled for Hopper without a GPU, and on one against the reference and
against the ops that it stands for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import PADDING, Case, build, decodes, mistake, near_cache
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, stack_bytes
from test_rope_attend import TOLERANCE, arguments_of, copied

from compiled_engine.attention.backends.coded_decode import (
    CodedPlan,
    coded_decode,
    coded_decode_kernel,
    coded_plan,
)
from compiled_engine.attention.backends.decode_splits import (
    GRAIN,
    LONG_SPLIT,
    MAX_SPLITS,
    SHORT_CONTEXTS,
    Splits,
)
from compiled_engine.attention.backends.kernel_arguments import NewKeys
from compiled_engine.attention.backends.triton_write_kv import write_kv
from compiled_engine.attention.inputs import Rotation, Scoring, inputs_of
from compiled_engine.attention.op import attend
from compiled_engine.kv_format import CODED, cache_dtype, head_width
from compiled_engine.passes.rope import rope_attend as op

NUM_SMS = 132
# Of a few short contexts with scales of their own, without, and in splits; and of any others.
PLANS = tuple(
    coded_plan(count, 8, context, NUM_SMS, scaled)
    for count, context, scaled in ((8, 256, True), (8, 512, False), (1, 512, True), (16, 16_000, True))
)
OF_PLANS = pytest.mark.parametrize(
    "plan", PLANS, ids=[f"{plan.keys} keys, {plan.warps} warps, {plan.stages} stages" for plan in PLANS]
)
OF_STORAGES = pytest.mark.parametrize("storage", [elements.name for elements in CODED])
POINTERS = {
    "slot_mapping_ptr": "*i64",
    "seq_lens_ptr": "*i32",
    "block_table_ptr": "*i32",
    "partial_ptr": "*fp32",
    "partial_max_ptr": "*fp32",
    "partial_sum_ptr": "*fp32",
}
CODES = {"int8": ("*u8", "*i16"), "fp8_e4m3": ("*fp8e4nv", "*fp32")}
# One key, both sides of the ends of tiles and blocks, several tiles.
LENGTHS = (*decodes(1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 900), PADDING)
CASES = (
    Case("heads 16:8", LENGTHS, 16, 8, 128),
    Case("heads 32:8", LENGTHS, 32, 8, 128),
    Case("head size 64, group of 7", LENGTHS, 14, 2, 64),
    Case("window", (*decodes(1, 20, 33, 199, 200, 201, 215, 900), PADDING), 4, 2, 128, sliding_window=200),
    Case("small window", (*decodes(1, 20, 33, 199, 900), PADDING), 4, 2, 128, sliding_window=20),
    Case("soft cap, large blocks", LENGTHS, 4, 2, 128, block_size=48, soft_cap=5.0),
    Case("sinks, blocks of 256", LENGTHS, 4, 4, 128, block_size=256, sinks=True),
    Case("padding alone", (PADDING, PADDING), 4, 2, 128),
)
OF_CASES = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def compiled(storage: str, head_dim: int, group: int, writes: bool, plan: CodedPlan, **changed: Any) -> Any:
    kernel = getattr(coded_decode_kernel, "jit_function", coded_decode_kernel)
    constants: dict[str, Any] = {f"{name}_HEAD_STRIDE": head_dim for name in ("Q", "K", "V", "OUT")}
    constants |= {
        "STRIDE_MULTIPLE": 8,
        "OFFSET": 0.0,
        "WIDE": False,
        "WINDOW": 0,
        "CAP_SCALE": 0.0,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "WIDTH": head_width(cache_dtype(storage, torch.bfloat16), head_dim),
        "KEYS": plan.keys,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "RAW_KEYS": plan.raw_keys,
        "GRAIN": GRAIN,
        "sinks_ptr": None,
        **changed,
    }
    if not writes:
        constants |= dict.fromkeys(("k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr"))
    cache, scales = CODES[storage]
    types = POINTERS | {"cache_ptr": cache, "scales_ptr": scales, "eps": "fp32", "scale_log2": "fp32"}
    kinds = {name: types.get(name, "*bf16") for name in kernel.arg_names if name.endswith("_ptr")}
    aligned = [name for name, kind in kinds.items() if kind in ("*bf16", cache) or name == "partial_ptr"]
    options = {"num_warps": plan.warps, "maxnreg": plan.registers or None}
    return compiled_for_hopper(kernel, constants, types, aligned=aligned, **options)


@pytest.mark.product(one_in=32)
@OF_PLANS
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "reads"])
@pytest.mark.parametrize(
    ("head_dim", "group", "changed"), [(128, 2, {}), (128, 16, {"WINDOW": 100}), (64, 7, {"CAP_SCALE": 0.5})]
)
@OF_STORAGES
def test_it_fits_and_converts_in_registers(
    storage: str, head_dim: int, group: int, changed: dict[str, Any], writes: bool, plan: CodedPlan
) -> None:
    program = compiled(storage, head_dim, group, writes, plan, **changed)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) == 0
    ptx = program.asm["ptx"]
    # Four codes of a tile are an instruction sequence of each thread; nothing converts codes one by one.
    converted = 2 * plan.keys * head_dim // (32 * plan.warps) // 4
    one = "0x64646464" if storage == "int8" else "cvt.rn.f16x2.e4m3x2 %r"
    assert ptx.count(one) >= converted
    before, after = re.split(r"griddepcontrol\.wait", ptx)
    # Without this step's keys the cache may be written by the kernel just before.
    assert ("cp.async.cg.shared.global" in before) == writes
    assert "st.global" not in before
    assert "st.global" in after


def test_the_plan_follows_from_programs_and_contexts() -> None:
    def splits(num_requests: int, max_seq_len: int) -> int:
        return coded_plan(num_requests, 8, max_seq_len, NUM_SMS, True).splits.count

    assert splits(8, SHORT_CONTEXTS[0]) == 1
    assert splits(1, 32_000) == MAX_SPLITS
    assert splits(16, 16_000) == 4
    assert splits(256, 2000) == 1
    assert splits(256, 2 * LONG_SPLIT) == 2


def planned(plan: CodedPlan, splits: int) -> CodedPlan:
    return replace(plan, splits=Splits(splits, GRAIN))


@pytest.mark.gpu
@pytest.mark.product(one_in=16, each=("case",))
@OF_PLANS
@pytest.mark.parametrize("splits", [1, 4])
@OF_STORAGES
@OF_CASES
def test_it_is_attention(case: Case, storage: str, splits: int, plan: CodedPlan) -> None:
    """Over a cache of which unused blocks and slots hold NaN."""
    require_hopper()
    case = replace(case, storage=storage).sized("triton")
    batch = build(case, torch.bfloat16, "cuda")
    cache_N2PKd, scoring = batch.kv_cache_N2PKd, batch.scoring
    write_kv(batch.k_TKd, batch.v_TKd, cache_N2PKd, batch.inputs.slot_mapping_T, scoring.kv_scales_2K, True)
    out_THd = torch.full_like(batch.q_THd, math.nan)
    count = len(case.requests)
    coded_decode(batch.q_THd, None, cache_N2PKd, out_THd, batch.inputs, count, planned(plan, splits), scoring)
    assert mistake(case, batch, out_THd) is None


@pytest.mark.gpu
@pytest.mark.product(one_in=32, each=("case",))
@OF_PLANS
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("normed", [True, False])
@OF_STORAGES
@OF_CASES
def test_it_is_the_two_ops(case: Case, storage: str, normed: bool, splits: int, plan: CodedPlan) -> None:
    require_hopper()
    arguments = arguments_of(replace(case, storage=storage).sized("triton"), torch.bfloat16, "cuda", normed)
    one, two = copied(arguments), copied(arguments)
    inputs = inputs_of(tuple(one))
    new = NewKeys(one[1], one[2], Rotation(*one[5:16]))
    scoring = Scoring(*one[16:21])
    coded_decode(one[0], new, one[3], one[4], inputs, len(case.requests), planned(plan, splits), scoring)
    # Codes may be neighbours, as norms add squares in any order: the results are those of the codes that were written.
    op.unfused(lambda q_THd, _, *others: attend(q_THd, one[3], *others), *two)
    assert near_cache(one[3], two[3])
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(one[4], two[4], rtol=tolerance, atol=tolerance)
    assert not one[4][inputs.slot_mapping_T < 0].any()
