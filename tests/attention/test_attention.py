"""Every attention backend on one table of cases, against attention by its definition in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton
from attention_cases import (
    CASES,
    LAYERS,
    PADDING,
    SOME_LAYERS,
    TILES,
    WITH_GARBAGE,
    Case,
    Request,
    build,
    decodes,
    depends_on_garbage,
    depends_on_neighbours,
    mistake,
    outcome,
    refusal,
    run_in_the_interpreter,
    step,
    wrong_layers,
    wrong_lists,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting_process import interpret

from compiled_engine.attention.backend import BACKENDS, get_backend
from compiled_engine.attention.backends.cpp_backend import HEAD_DIMS
from compiled_engine.attention.backends.torch_backend import write_kv_without_waiting
from compiled_engine.attention.case import AttentionCase, KVFormat

ON_A_GPU = tuple(name for name in BACKENDS if name != "cpp")
PARTS = 8  # of a test that takes minutes as a whole
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [case.name for case in CASES]


def refused(
    head_dims: tuple[Callable[[int], bool], str], block_multiple: int = 1, sinks: bool = True
) -> dict[str, str]:
    """The cases of the table that a backend is to refuse, and with which reason."""
    fits, allowed = head_dims
    reasons = {}
    for case in CASES:
        if not fits(case.head_dim):
            reasons[case.name] = f"head_dim is {case.head_dim}; allowed: {allowed}"
        elif case.block_size % block_multiple:
            reasons[case.name] = f"block_size is {case.block_size}; allowed: multiples of {block_multiple}"
        elif case.sinks and not sinks:
            reasons[case.name] = "sinks is True; allowed: False, since flash-attn has none"
    return reasons


LIMITS = {
    "torch": {},
    "cpp": refused((lambda size: size in HEAD_DIMS, "16, 32, 64, 80, 96, 128, 192, 256")),
    "triton": refused((lambda size: size % 8 == 0, "multiples of 8 from 16 to 576"), 16),
    "flash_attn": refused(
        (lambda size: size % 8 == 0 and size <= 256, "multiples of 8 up to 256"),
        1 if find_spec("flash_attn_interface") else 256,  # version 3 takes any block size
        sinks=False,
    ),
}
# Triton 3.6 has its interpreter turn arrays of one element into integers, which numpy refuses from 2.5 on.
INTERPRETER_IS_BROKEN = triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.5.0"
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def refusals(backend: str, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """The cases that the backend refuses, with its reasons."""
    try:
        get_backend(backend)
    except ImportError as error:
        return dict.fromkeys(NAMES, str(error))
    reasons = {case.name: refusal(backend, case.sized(backend).asked(device_type, dtype)) for case in CASES}
    return {name: reason for name, reason in reasons.items() if reason}


def expected(backend: str, cases: tuple[Case, ...] = CASES) -> dict[str, str]:
    """The outcome of each case."""
    limits = LIMITS[backend]
    return {case.name: f"refused: {limits[case.name]}" if case.name in limits else "right" for case in cases}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*product(["torch"], DTYPES), *product(["cpp"], [torch.float32, torch.bfloat16])],
    ids=str,
)
def test_on_a_cpu(backend: str, dtype: torch.dtype) -> None:
    """The table: a backend is right in each case, or refuses it with a reason."""
    assert {case.name: outcome(backend, case, "cpu", dtype) for case in CASES} == expected(backend)
    assert wrong_layers(backend, *SOME_LAYERS, "cpu", dtype) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_refuse_the_other_device(dtype: torch.dtype) -> None:
    assert refusals("cpp", "cuda", dtype) == dict.fromkeys(NAMES, "device is cuda; allowed: cpu")
    assert refusals("triton", "cpu", dtype) == dict.fromkeys(NAMES, "device is cpu; allowed: cuda")
    if not torch.cuda.is_available():
        assert refusals("triton", "cuda", dtype) == LIMITS["triton"]
    reasons = refusals("flash_attn", "cpu", dtype)
    assert "needs the package" in reasons[NAMES[0]] or reasons == dict.fromkeys(NAMES, "device is cpu; allowed: cuda")


ASKED = AttentionCase("cpu", torch.float32, 4, 2, 64, KVFormat(torch.float32, 16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": False}, "causal is False; allowed: True"),
        ({"cache": None}, "cache is None; allowed: a paged cache"),
        (
            {"cache": KVFormat(torch.int8, 16)},
            "kv_cache_dtype is torch.int8; allowed: torch.float32, torch.uint8, torch.float8_e4m3fn",
        ),
        ({"value_dim": 32}, "value_dim is 32; allowed: head_dim 64"),
        ({"num_heads": 5}, "num_heads is 5; allowed: multiples of num_kv_heads 2"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("backend", "device"), [("torch", "cpu"), ("cpp", "cpu"), ("triton", "cuda")])
def test_a_case_that_no_backend_runs_is_refused_by_each(
    backend: str, device: str, change: dict[str, Any], reason: str
) -> None:
    case = replace(ASKED, device=device)
    assert refusal(backend, case) is None
    assert refusal(backend, replace(case, **change)) == reason


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_any_number_of_queries_is_accepted(backend: str) -> None:
    for query_len in (None, 1, 4):
        assert refusal(backend, replace(ASKED, query_len=query_len)) is None


def test_too_large_a_group_is_refused() -> None:
    case = replace(ASKED, device="cuda", num_heads=66)
    assert refusal("triton", case) == "num_heads is 66; allowed: up to 32 times num_kv_heads 2"
    wide = replace(case, head_dim=512, num_heads=34)
    assert refusal("triton", wide) == "num_heads is 34; allowed: up to 16 times num_kv_heads 2"
    half = replace(wide, dtype=torch.bfloat16, cache=KVFormat(torch.bfloat16, 16))
    assert refusal("triton", half) is None
    assert refusal("triton", replace(half, num_heads=66)) == "num_heads is 66; allowed: up to 32 times num_kv_heads 2"
    allowed = "multiples of 8 from 16 to 576"
    for size in (260, 584):
        assert refusal("triton", replace(half, head_dim=size)) == f"head_dim is {size}; allowed: {allowed}"


def test_triton_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    """The table without a GPU; the interpreter is on or off for a process, so the table runs in its own."""
    every: bool = pytestconfig.getoption("--all")
    program = f"import interpreter, attention_cases; attention_cases.main('triton', {every})"
    process = interpret(__file__, "-c", program)
    if INTERPRETER_IS_BROKEN:
        assert "only 0-dimensional arrays can be converted" in process.stderr
        return
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    assert outcomes.pop("wrong lists") == []
    assert outcomes.pop("wrong layers") == []
    assert outcomes.pop("neighbours") is False
    assert outcomes.pop("garbage") == {case.name: False for case in WITH_GARBAGE}
    cases = run_in_the_interpreter(every)
    assert outcomes == {str(dtype): expected("triton", each) for dtype, each in cases.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_what_is_refused_on_cuda(backend: str, dtype: torch.dtype) -> None:
    reasons = refusals(backend, "cuda", dtype)
    if backend == "flash_attn" and len(reasons) == len(CASES):  # it is not there, or refuses the type
        assert reasons == dict.fromkeys(NAMES, reasons[NAMES[0]])
        assert dtype == torch.float32 or not (find_spec("flash_attn") or find_spec("flash_attn_interface"))
    else:
        # A reduced build also leaves out soft caps and whole head sizes, and says so; the common sizes it must have.
        defects = {name: reason for name, reason in reasons.items() if reason.startswith("this build of flash-attn")}
        assert backend == "flash_attn" or not defects
        heads = {case.head_dim for case in CASES if case.name in defects and not case.soft_cap}
        assert not heads & {64, 128}
        assert {name: reason for name, reason in reasons.items() if name not in defects} == LIMITS[backend]


# Every case compiles kernels of its own. Tiles alone differ between bf16 and fp32, which is the more exact, so a case
# runs with one of them, except where it has a tile. flash-attn refuses fp32.
OF_TABLE = [
    pytest.param(backend, dtype, case, id=f"{backend}-{dtype}-{case.name}", marks=marks)
    for case in CASES
    for backend in ON_A_GPU
    for dtype in (torch.float32, torch.bfloat16)
    if (backend, dtype) != ("flash_attn", torch.float32)
    for is_drawn in [backend != "flash_attn" and case not in TILES]
    for marks in [[pytest.mark.product(one_in=8, each=("backend", "case"))] if is_drawn else []]
]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dtype", "case"), OF_TABLE)
def test_on_cuda(backend: str, dtype: torch.dtype, case: Case) -> None:
    """The table on a GPU but for what is refused there."""
    if case.name not in refusals(backend, "cuda", dtype):
        assert outcome(backend, case, "cuda", dtype) == "right"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [name for name in ON_A_GPU if name != "triton"])
def test_other_backends_have_layers_with_and_without_windows_on_cuda(backend: str, dtype: torch.dtype) -> None:
    if len(refusals(backend, "cuda", dtype)) < len(CASES):
        assert wrong_layers(backend, *SOME_LAYERS, "cuda", dtype) == []


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
@pytest.mark.product(one_in=8, each=("window",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "requests"), LAYERS)
def test_layers_with_and_without_windows_share_a_list_on_cuda(
    window: int, requests: tuple[Request, ...], dtype: torch.dtype
) -> None:
    """Launched, and captured."""
    assert wrong_layers("triton", window, requests, "cuda", dtype, captured=True) == []


@pytest.mark.gpu
@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("part", range(PARTS))
def test_triton_on_random_batches(part: int) -> None:
    """Ragged batches of decodes and prompts in any order, as a graph of any batch has them, padding rows included. The
    batches of a part share their kernels."""
    generator = torch.Generator().manual_seed(part)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape: dict[str, Any] = {
        "num_heads": 2 * (part + 1),
        "head_dim": (16, 64, 80, 128)[(part + part // 4) % 4],
        "sliding_window": (0, 200, 0, 2048)[part % 4],
        "soft_cap": (0.0, 0.0, 5.0)[part % 3],
        "sinks": part // 2 % 2 == 1,
    }
    for seed in range(2):
        requests = [
            Request(seq_len, 1 if number(0, 2) else number(1, min(seq_len, 300) + 1))
            for seq_len in (number(1, 3000 if number(0, 4) == 0 else 400) for _ in range(number(1, 13)))
        ]
        padding = [Request(0, number(0, 20))] * number(0, 2)
        case = Case("", (*requests, *padding), bound=4096, **shape)
        batch = build(case, torch.bfloat16, "cuda", seed=seed)
        host_3 = torch.tensor([0, 4096, 4096], dtype=torch.int32)
        batch = replace(batch, inputs=replace(batch.inputs, host_3=host_3))
        assert mistake(case, batch, step("triton", case, batch)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_captured_decodes_follow_the_device_data(backend: str) -> None:
    """A graph captured with padding rows alone, for contexts of up to 512 tokens, then serves a real batch."""
    case = Case("", (*decodes(300, 2, 129), PADDING), block_size=256)
    reason = refusal(backend, case.asked("cuda", torch.bfloat16))
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
            query_lens = [min(int(n), int(torch.randint(1, 20, (), generator=generator))) for n in lens]
            num_decodes = int(torch.randint(0, len(query_lens) + 1, (), generator=generator))
            query_lens[:num_decodes] = [1] * num_decodes
            bound = int(torch.randint(0, 4096, (), generator=generator))
            case = Case("", tuple(map(Request, lens.tolist(), query_lens)), bound=bound, **shape)
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


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    """Rather than written to a copy."""
    batch = build(Case("", decodes(20)))
    strided = batch.kv_cache_N2PKd.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        step("torch", Case("", decodes(20)), replace(batch, kv_cache_N2PKd=strided))
