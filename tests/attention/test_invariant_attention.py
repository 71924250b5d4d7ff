"""Attention of batch-invariant engines: right, and the same bits for a token in every batch."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
from attention_cases import (
    CASES,
    DRAFTS,
    MIXED,
    PREFILLS,
    Batch,
    Case,
    Request,
    build,
    decodes,
    outcome,
    step,
)
from hopper_compilation import compiled_for_hopper, stack_bytes
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.backends.invariant_attention import (
    SPLIT,
    fold_splits_kernel,
    invariant_attention_kernel,
    invariant_tiles,
)
from compiled_engine.attention.backends.triton_backend import MIN_SHARED_MEMORY
from compiled_engine.attention.backends.wide_tiles import is_wide, tile_of_head
from compiled_engine.attention.case import Refused
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.kv_format import CODED

# Several splits of a context, all their borders, and rows of padding.
OWN = (
    Case("splits", (*decodes(1, SPLIT, SPLIT + 1, 2 * SPLIT + 40), Request(0, 1), Request(SPLIT + 9, 20)), 2, 1, 16),
    Case("splits, window, sinks", (*decodes(2 * SPLIT + 5), Request(SPLIT + 30, 40)), 4, 1, 16, 0, 40, 0, 5.0, True),
)
FEW = (
    Case("mixed", MIXED, head_dim=16),
    Case("heads 14:2", MIXED, 14, 2, head_dim=32),
    Case("four queries a request", DRAFTS, head_dim=16),
    Case("prefills, window", PREFILLS, 2, 2, 16, sliding_window=20),
    *(Case(f"mixed, {elements.name}", MIXED, 2, 1, 16, storage=elements.name) for elements in CODED),
    *OWN,
)
# On a GPU also sizes of heads that models have.
LARGE = tuple(
    replace(case, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    for case in OWN
    for heads, kv_heads, head_dim in ((8, 2, 128), (4, 2, 64), (4, 2, 256))
)


def queried(batch: Batch, spans: list[range]) -> Batch:
    """The batch with other queries of its only request: a row for each span of positions, decodes first."""
    index_T = torch.tensor([position for span in spans for position in span])
    lens = [len(span) for span in spans]
    device, inputs = batch.q_THd.device, batch.inputs
    index = index_T.to(device)
    starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
    others = AttentionInputs(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([span.stop for span in spans], dtype=torch.int32, device=device),
        inputs.block_table_RB.expand(len(spans), -1).contiguous(),
        inputs.slot_mapping_T[index],
        torch.tensor([lens.count(1), max(lens), int(inputs.host_3[2])], dtype=torch.int32),
        "",
    )
    tensors = batch.q_THd[index], batch.k_TKd[index], batch.v_TKd[index]
    return Batch(*tensors, batch.kv_cache_N2PKd, others, batch.scoring, batch.expected_THd[index_T], torch.empty(0))


def check_bits(
    backend: str, case: Case, length: int, seed: int, device: str, dtype: torch.dtype, batches: int = 4
) -> None:
    """Assert that a text's tokens have the same bits as a prompt, in chunks, as decodes and beside others.

    Only the last tokens of the text are queries, so that the interpreter has less to do.
    """
    draw = random.Random(seed)
    batch = build(replace(case, requests=(Request(length, length),), bound=draw.choice((0, 4096))), dtype, device)
    slots_T, kv_scales_2K = batch.inputs.slot_mapping_T, batch.scoring.kv_scales_2K
    get_backend(backend).write_kv(batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, slots_T, kv_scales_2K)
    first = max(0, length - 70)
    whole = step(backend, case, queried(batch, [range(first, length)]))
    assert whole.isfinite().all()
    for _ in range(batches):
        borders = sorted({first, length, *draw.sample(range(first, length), draw.randint(1, 6))})
        chunks = [range(*pair) for pair in pairwise(borders)]
        chunks += [range(at, at + 1) for at in draw.choices(range(first, length), k=draw.choice((1, 3, 40)))]
        draw.shuffle(chunks)
        chunks.sort(key=lambda span: len(span) != 1)
        chunks = chunks[: draw.randint(1, len(chunks))]
        found = step(backend, case, queried(batch, chunks))
        expected = torch.cat([whole[span.start - first : span.stop - first] for span in chunks])
        assert torch.equal(found, expected), (case.name, seed, chunks)


def check_interpreted() -> None:
    """Run the kernels of Triton in the interpreter."""
    for case in FEW:
        problem = outcome("invariant_triton", case, "cpu", torch.float32)
        assert problem == "right", (case.name, problem)
    for seed, (case, length, batches) in enumerate(
        ((FEW[0], 90, 3), (FEW[3], 75, 3), (FEW[4], 50, 3), (OWN[0], SPLIT + 10, 1), (OWN[1], SPLIT + 10, 2))
    ):
        check_bits("invariant_triton", case, length, seed, "cpu", torch.float32, batches)
    print("right")


def test_on_a_cpu() -> None:
    cases = [case for case in (*CASES, *FEW) if refused("invariant_cpp", case, "cpu", torch.float32) is None]
    assert len(cases) > 40
    assert [case.name for case in cases if outcome("invariant_cpp", case, "cpu", torch.float32) != "right"] == []


@pytest.mark.parametrize("seed", range(len(FEW)))
def test_a_token_has_the_same_bits_in_every_batch(seed: int) -> None:
    case = FEW[seed % len(FEW)]
    check_bits("invariant_cpp", case, random.Random(seed).choice((90, SPLIT + 30)), seed, "cpu", torch.float32)


@loops_to_a_loaded_bound
def test_kernels_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "from test_invariant_attention import check_interpreted; check_interpreted()")
    assert run.stdout == "right\n", run.stderr[-2000:]


def refused(backend: str, case: Case, device: str, dtype: torch.dtype) -> str | None:
    try:
        get_backend(backend).accept(case.sized(backend).asked(device, dtype))
    except Refused as refusal:
        return str(refusal)
    return None


def test_cases_without_a_kernel_are_refused_by_name() -> None:
    assert refused("invariant_cpp", FEW[0], "cpu", torch.bfloat16) == "dtype is torch.bfloat16; allowed: torch.float32"
    wide = replace(FEW[0], head_dim=264)
    assert refused("invariant_cpp", wide, "cpu", torch.float32) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW, *LARGE], ids=lambda case: f"{case.name} {case.num_heads} {case.head_dim}")
def test_on_cuda(case: Case) -> None:
    assert outcome("invariant_triton", case, "cuda", torch.bfloat16) == "right"
    for seed, length in enumerate((90, SPLIT + 30)):
        check_bits("invariant_triton", case, length, seed, "cuda", torch.bfloat16)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("element", "heads"),
    [
        ("bf16", (32, 8, 128)),
        ("bf16", (4, 4, 80)),
        ("bf16", (8, 4, 256)),
        ("fp32", (32, 8, 128)),
        ("fp32", (8, 4, 256)),
    ],
)
def test_kernels_compile_for_hopper(element: str, heads: tuple[int, int, int]) -> None:
    """Tiles fit into registers, and into the shared memory of every supported GPU."""
    num_heads, num_kv_heads, head_dim = heads
    assert not is_wide(head_dim)
    tiles = invariant_tiles(head_dim, 2 if element == "bf16" else 4)
    constants: dict[str, Any] = {
        "Q_HEAD_STRIDE": head_dim,
        "OUT_HEAD_STRIDE": head_dim,
        "WINDOW": 0,
        "CAP_SCALE": 0.0,
        "GROUP": num_heads // num_kv_heads,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": head_dim,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.keys,
        "TILE_D": tile_of_head(head_dim),
        "SPLIT": SPLIT,
        "DEPENDENT_LAUNCH": True,
        "scales_ptr": None,
        "sinks_ptr": None,
    }
    types = dict.fromkeys(("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"), "*i32")
    types |= dict.fromkeys(("partial_ptr", "partial_max_ptr", "partial_sum_ptr"), "*fp32") | {"scale_log2": "fp32"}
    for kernel, options in (
        (fold_splits_kernel, {"num_warps": 1}),
        (invariant_attention_kernel, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}),
    ):
        program = compiled_for_hopper(
            kernel, constants, types, pointers=f"*{element}", **options | {"enable_fp_fusion": False}
        )
        assert program.metadata.shared <= MIN_SHARED_MEMORY
        assert stack_bytes(program) <= 400
    if element == "bf16":  # the same instruction for every batch
        assert "wgmma.mma_async.sync.aligned.m64" in program.asm["ptx"]
        assert "mma.sync" not in program.asm["ptx"]
