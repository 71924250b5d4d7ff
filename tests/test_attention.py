"""Every attention backend on one table of cases, against attention by its definition in float64."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from attention_cases import (
    CASES,
    PADDING,
    PLAIN,
    WINDOWS,
    WITH_GARBAGE,
    Case,
    Request,
    around,
    build,
    decodes,
    depends_on_garbage,
    depends_on_neighbours,
    mistake,
    obstacle,
    outcome,
    step,
    wrong_layers,
    wrong_lists,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.attention.backends.cpp_backend import HEAD_DIMS
from compiled_engine.attention.backends.torch_backend import write_kv_without_waiting
from compiled_engine.attention.registry import BACKENDS

ON_A_GPU = tuple(name for name in BACKENDS if name != "cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [case.name for case in CASES]
LIMITS_OF_TRITON = {
    "mixed, block size 24": "block_size is 24; allowed: multiples of 16",
    "head size 20": "head_dim is 20; allowed: multiples of 8 from 16 to 256",
}
# Version 3 takes any block size.
LIMITS_OF_FLASH_ATTN = {
    case.name: f"block_size is {case.block_size}; allowed: multiples of 256"
    for case in CASES
    if case.block_size != 256 and not find_spec("flash_attn_interface")
} | {"head size 20": "head_dim is 20; allowed: multiples of 8 up to 256"}
LIMITS_OF_FLASH_ATTN |= {
    case.name: "the model's attention has sinks, which flash-attn does not know; allowed: models without"
    for case in CASES
    if case.sinks and case.name not in LIMITS_OF_FLASH_ATTN
}
# Triton 3.6 has its interpreter turn arrays of one element into integers, which numpy refuses from 2.5 on.
INTERPRETER_IS_BROKEN = triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.5.0"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small only make threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unsupported(backend: str, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """The cases that the backend says it cannot run, with its reasons."""
    reasons = {case.name: obstacle(backend, case, device_type, dtype) for case in CASES}
    return {name: reason for name, reason in reasons.items() if reason}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_torch_on_cpu(case: Case, dtype: torch.dtype) -> None:
    assert outcome("torch", case, "cpu", dtype) == "right"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_cpp(case: Case, dtype: torch.dtype) -> None:
    left_out = "unsupported: head_dim is 20; allowed: 16, 32, 64, 80, 96, 128, 192, 256"
    assert outcome("cpp", case, "cpu", dtype) == (left_out if case.head_dim == 20 else "right")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_torch_runs_every_case_on_a_cpu(dtype: torch.dtype) -> None:
    assert unsupported("torch", "cpu", dtype) == {}
    no_cuda = "device is cuda; allowed: cpu"
    assert unsupported("cpp", "cuda", dtype) == dict.fromkeys(NAMES, no_cuda)
    assert unsupported("triton", "cpu", dtype) == dict.fromkeys(NAMES, "device is cpu; allowed: cuda")
    if not torch.cuda.is_available():
        assert unsupported("triton", "cuda", dtype) == LIMITS_OF_TRITON
    missing = "attention_backend 'flash_attn' needs the package flash-attn: No module named 'flash_attn'"
    installed = "device is cpu; allowed: cuda"
    assert unsupported("flash_attn", "cpu", dtype) in (dict.fromkeys(NAMES, missing), dict.fromkeys(NAMES, installed))


def test_triton_in_the_interpreter() -> None:
    """The whole table without a GPU; the interpreter is on or off for a process, so the table runs in its own."""
    script = Path(__file__).with_name("attention_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, script, "triton"], env=environment, capture_output=True, text=True, check=False
    )
    if INTERPRETER_IS_BROKEN:
        assert "only 0-dimensional arrays can be converted" in process.stderr
        return
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    expected = dict.fromkeys(NAMES, "right")
    expected |= {name: f"unsupported: {reason}" for name, reason in LIMITS_OF_TRITON.items()}
    assert outcomes.pop("wrong lists") == []
    assert outcomes.pop("wrong layers") == []
    assert outcomes.pop("neighbours") is False
    assert outcomes.pop("garbage") == {case.name: False for case in WITH_GARBAGE}
    plain = {case.name: expected[case.name] for case in PLAIN}
    assert outcomes == {"torch.float32": expected, "torch.float16": plain}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_on_cuda(backend: str, dtype: torch.dtype) -> None:
    """The table on a GPU, and exactly which cases a backend leaves out there."""
    reasons = unsupported(backend, "cuda", dtype)
    if backend == "torch":
        assert reasons == {}
    elif backend == "triton":
        assert reasons == LIMITS_OF_TRITON
    elif dtype == torch.float32 or not (find_spec("flash_attn") or find_spec("flash_attn_interface")):
        assert reasons == dict.fromkeys(NAMES, reasons[NAMES[0]])
    else:
        # A reduced build also leaves out soft caps and whole head sizes, and says so; the common sizes it must have.
        defects = {name: reason for name, reason in reasons.items() if reason.startswith("this build of flash-attn")}
        heads = {case.head_dim for case in CASES if case.name in defects and not case.soft_cap}
        assert not heads & {64, 128}
        assert {name: reason for name, reason in reasons.items() if name not in defects} == LIMITS_OF_FLASH_ATTN
    outcomes = {case.name: outcome(backend, case, "cuda", dtype) for case in CASES if case.name not in reasons}
    assert outcomes == dict.fromkeys(outcomes, "right")


@pytest.mark.gpu
@pytest.mark.parametrize("case", WITH_GARBAGE, ids=[case.name for case in WITH_GARBAGE])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_garbage_does_not_matter_on_cuda(backend: str, case: Case) -> None:
    assert not depends_on_garbage(backend, case, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_neighbours_do_not_matter_on_cuda(dtype: torch.dtype) -> None:
    assert not depends_on_neighbours("triton", "cuda", dtype)


@pytest.mark.gpu
def test_work_lists_on_cuda() -> None:
    assert wrong_lists("cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_layers_with_and_without_windows_share_a_list_on_cuda(window: int, dtype: torch.dtype, captured: bool) -> None:
    """Beside a prompt, and so many decodes alone that they have a list."""
    lens = around(window)
    for requests in ((*decodes(*lens), Request(40, 3)), decodes(*lens * 4)):
        assert wrong_layers("triton", requests, window, "cuda", dtype, captured) == []


@pytest.mark.gpu
def test_triton_on_random_batches() -> None:
    """Ragged batches of decodes and prompts in any order, as a graph of any batch has them, padding rows included."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for seed in range(16):
        requests = [
            Request(seq_len, 1 if number(0, 2) else number(1, min(seq_len, 300) + 1))
            for seq_len in (number(1, 3000 if number(0, 4) == 0 else 400) for _ in range(number(1, 13)))
        ]
        padding = [Request(0, number(0, 20))] * number(0, 2)
        case = Case(
            "",
            (*requests, *padding),
            num_heads=2 * number(1, 9),
            head_dim=(16, 64, 80, 128)[number(0, 4)],
            sliding_window=(0, 0, 200, 2048)[number(0, 4)],
            bound=4096,
            soft_cap=(0.0, 0.0, 5.0)[number(0, 3)],
            sinks=number(0, 2) == 1,
        )
        batch = build(case, torch.bfloat16, "cuda", seed=seed)
        host_3 = torch.tensor([0, 4096, 4096], dtype=torch.int32)
        batch = replace(batch, inputs=replace(batch.inputs, host_3=host_3))
        assert mistake(case, batch, step("triton", case, batch)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_captured_decodes_follow_the_device_data(backend: str) -> None:
    """A graph captured with padding rows alone, for contexts of up to 512 tokens, then serves a real batch."""
    case = Case("", (*decodes(300, 2, 129), PADDING), block_size=256)
    reason = obstacle(backend, case, "cuda", torch.bfloat16)
    if reason:
        assert backend == "flash_attn"
        assert "needs the package" in reason
        return
    real = build(case, torch.bfloat16, "cuda")
    host_3 = torch.tensor([4, 1, 512], dtype=torch.int32)
    inputs = replace(
        real.inputs,
        seq_lens_R=torch.zeros_like(real.inputs.seq_lens_R),
        block_table_RB=torch.zeros_like(real.inputs.block_table_RB),
        slot_mapping_T=torch.full_like(real.inputs.slot_mapping_T, -1),
        host_3=host_3,
    )
    static = replace(real, **{name: getattr(real, name).clone() for name in ("q_THd", "k_TKd", "v_TKd")}, inputs=inputs)
    for name in ("q_THd", "k_TKd", "v_TKd"):
        getattr(static, name).fill_(math.nan)
    assert not step(backend, case, static).any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THd = step(backend, case, static)
    for name in ("q_THd", "k_TKd", "v_TKd"):
        getattr(static, name).copy_(getattr(real, name))
    for name in ("seq_lens_R", "block_table_RB", "slot_mapping_T"):
        getattr(static.inputs, name).copy_(getattr(real.inputs, name))
    graph.replay()
    assert mistake(case, real, out_THd) is None


@pytest.mark.gpu
def test_triton_compiles_nothing_after_its_first_batches() -> None:
    """Decodes of one request and of some, whose splits are combined in powers of two, and two prefills: no size nor
    unaligned view makes a further variant."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    bounds = [1 << i for i in range(5, 13)]
    for requests, bound in (
        *product((decodes(20), decodes(*[20] * 20)), bounds),
        ((Request(40, 40),), 0),
        ((Request(40, 40),), 4096),
    ):
        case = Case("", requests, bound=bound, **shape)
        batch = build(case, torch.bfloat16, "cuda")
        step("triton", case, batch)
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: compiled.append(repr)
    try:
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            lens = torch.randint(1, 70, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
            queries = [min(int(n), int(torch.randint(1, 20, (), generator=generator))) for n in lens]
            num_decodes = int(torch.randint(0, len(queries) + 1, (), generator=generator))
            queries[:num_decodes] = [1] * num_decodes
            bound = int(torch.randint(0, 4096, (), generator=generator))
            case = Case("", tuple(map(Request, lens.tolist(), queries)), bound=bound, **shape)
            batch = build(case, torch.bfloat16, "cuda")
            unaligned = {
                name: torch.nn.functional.pad(getattr(batch.inputs, name), (1, 0))[..., 1:]
                for name in ("query_start_loc_R1", "seq_lens_R", "block_table_RB", "slot_mapping_T")
            }
            batch = replace(batch, inputs=replace(batch.inputs, **unaligned))
            assert mistake(case, batch, step("triton", case, batch)) is None
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@st.composite
def cases(draw: st.DrawFn, head_dims: tuple[int, ...] = (1, 8, 20, 32)) -> Case:
    """Batches as a scheduler could make them: decodes first, then others, then padding."""
    group, num_kv_heads = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    ragged = st.integers(1, 60).flatmap(lambda n: st.builds(Request, st.just(n), st.integers(1, n)))
    requests = [
        *draw(st.lists(st.integers(1, 80).map(lambda n: Request(n, 1)), max_size=5)),
        *draw(st.lists(ragged, max_size=4)),
        *draw(st.lists(st.integers(1, 4).map(lambda n: Request(0, n)), max_size=2)),
    ]
    return Case(
        "drawn",
        tuple(requests) or decodes(1),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 40])),
        sliding_window=draw(st.sampled_from([0, 0, 1, 2, 9, 100])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        sinks=draw(st.booleans()),
    )


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_torch_on_drawn_batches(case: Case, seed: int) -> None:
    batch = build(case, seed=seed)
    assert mistake(case, batch, step("torch", case, batch)) is None


@settings(max_examples=100, deadline=None)
@given(case=cases(HEAD_DIMS), seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cpp_on_drawn_batches(case: Case, seed: int, dtype: torch.dtype) -> None:
    batch = build(case, dtype, seed=seed)
    assert mistake(case, batch, step("cpp", case, batch)) is None


@settings(max_examples=30, deadline=None)
@given(case=cases((16, 32)))
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_garbage_does_not_matter_on_a_cpu(backend: str, case: Case) -> None:
    assert not depends_on_garbage(backend, case)


@pytest.mark.parametrize("threads", [1, 2])
def test_cpp_gives_a_request_the_same_bits_whatever_stands_beside_it(threads: int) -> None:
    """Also with contexts that are split, and whatever the number of threads."""
    alone = Case("", decodes(2500), num_heads=4, num_kv_heads=1)
    batch = build(alone)
    expected_THd = step("cpp", alone, batch)
    torch.set_num_threads(threads)
    beside = Case("", decodes(2500, 70, 1025, 1024), num_heads=4, num_kv_heads=1)
    other = build(beside)
    table_B = batch.inputs.block_table_RB[0]
    blocks = other.inputs.block_table_RB[0, : len(table_B)].long()
    other.kv_cache_N2PKd[blocks] = batch.kv_cache_N2PKd[table_B.long()]
    for name in ("q_THd", "k_TKd", "v_TKd"):
        getattr(other, name)[0] = getattr(batch, name)[0]
    out_THd = step("cpp", beside, other)
    torch.set_num_threads(1)
    assert torch.equal(out_THd[0], expected_THd[0])
    assert mistake(alone, batch, expected_THd) is None


@settings(max_examples=30, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_both_ways_of_writing_agree(case: Case, seed: int) -> None:
    """The one that never asks the device for the slots writes the same, also when there is nothing to write."""
    batch = build(case, seed=seed)
    tensors = batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, batch.inputs.slot_mapping_T
    write_kv_without_waiting(*tensors)
    torch.testing.assert_close(batch.kv_cache_N2PKd, batch.expected_cache_N2PKd, rtol=0, atol=0, equal_nan=True)
    nothing_T = torch.full_like(batch.inputs.slot_mapping_T, -1)
    write_kv_without_waiting(batch.k_TKd * 2, batch.v_TKd * 2, batch.kv_cache_N2PKd, nothing_T)
    torch.testing.assert_close(batch.kv_cache_N2PKd, batch.expected_cache_N2PKd, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_padding_rows_leave_real_rows_bit_identical(backend: str) -> None:
    """On the CPU, whatever the number of padding rows added to a batch of decodes."""
    case = Case("", decodes(5, 33, 200, 64))
    batch = build(case)
    expected_THd = step(backend, case, batch)
    for padding in (1, 4, 12):
        padded = Case("", (*case.requests, *[PADDING] * padding))
        padded_batch = build(padded)
        out_THd = step(backend, padded, padded_batch)
        assert torch.equal(out_THd[:4], expected_THd)
        assert not out_THd[4:].any()


def test_more_decodes_than_are_gathered_at_a_time() -> None:
    """So many long contexts that the torch backend takes them in several groups."""
    case = Case("", decodes(*range(1200, 1205)), num_heads=8, num_kv_heads=8, head_dim=128)
    batch = build(case)
    assert mistake(case, batch, step("torch", case, batch)) is None


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    """Rather than written to a copy."""
    batch = build(Case("", decodes(20)))
    strided = batch.kv_cache_N2PKd.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        step("torch", Case("", decodes(20)), replace(batch, kv_cache_N2PKd=strided))
