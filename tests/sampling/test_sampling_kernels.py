"""The sampling kernels: in Triton's interpreter, compiled for Hopper, on a GPU; see sampling_kernel_cases.py."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sampling_kernel_cases as cases
import torch
from hopper_compilation import compiled_for_hopper
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from token_masks import step_masks

from compiled_engine.rows import staged_writes_kernel
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling import edits_triton, filters_triton, gumbel_triton, logprobs_triton
from compiled_engine.sampling.edits import penalty_bytes
from compiled_engine.sampling.logprobs import batch_logprobs, logprob_rows
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampler import Sampler, SamplerClass

EOS_ID = cases.EOS
CHI_SQUARE_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
]

# Small numbers of rows, which are programs of the kernels; vocabularies of one block and of several.
IN_THE_INTERPRETER: dict[str, Callable[[], Any]] = {
    "choose": lambda: [
        cases.choose_matches("cpu", num_samples, vocab_size, dtype, filtered)
        for num_samples, vocab_size, dtype in (
            (1, 4099, torch.float32),
            (20, 77, torch.bfloat16),
            (2, 151_936, torch.float16),
        )
        for filtered in (False, True)
    ],
    "thresholds": lambda: [
        *(
            cases.thresholds_match("cpu", num_samples, vocab_size, dtype, ties)
            for num_samples, vocab_size, dtype in (
                (60, 40, torch.float32),
                (12, 4099, torch.float32),
                (6, 9000, torch.bfloat16),
            )
            for ties in (False, True)
        ),
        cases.thresholds_match("cpu", 1, 151_936, torch.bfloat16, False),
    ],
    "edits": lambda: [
        cases.edits_match("cpu", num_samples, vocab_size)
        for num_samples, vocab_size in ((1, 4099), (16, 77), (7, 2500))
    ],
    "masks": lambda: [
        cases.masks_match("cpu", num_samples, vocab_size)
        for num_samples, vocab_size in ((1, 4099), (30, 77), (12, 2500), (5, 32), (3, 6))
    ],
    "logprobs": lambda: [
        cases.logprobs_match("cpu", num_samples, vocab_size, dtype)
        for num_samples, vocab_size, dtype in (
            (1, 77, torch.float32),
            (9, 4099, torch.bfloat16),
            (2, 151_936, torch.float32),
        )
    ],
    "sampler": lambda: [
        cases.samplers_match("cpu", 40, 12, 12),
        cases.samplers_match("cpu", 4099, 10, 4),
        cases.composition_does_not_matter("cpu", 300, 24),
    ],
    "degenerate": lambda: [cases.degenerate_logits("cpu", 77, True)],
}


def check_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's, within the 0.01 % point; impossible tokens never come."""
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = counts.sum() * probabilities[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 8


def marked(name: str) -> Any:
    launches_writes = name in ("edits", "sampler", "degenerate")
    return pytest.param(name, marks=[loops_to_a_loaded_bound] if launches_writes else [])


def check_all() -> None:
    """Print failures by case; the next fixture runs this in a process with Triton's interpreter."""
    found = {}
    for name, check in IN_THE_INTERPRETER.items():
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    program = "import test_sampling_kernels; test_sampling_kernels.check_all()"
    run = interpret(__file__, "-c", program)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", [marked(name) for name in IN_THE_INTERPRETER])
def test_in_the_interpreter(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted.get(name) is None


TYPES = {
    "row_index_ptr": "*i32",
    "positions_ptr": "*i64",
    "seeds_ptr": "*i64",
    "best_token_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "top_k_ptr": "*i32",
    "additions_ptr": "*i32",
    "prefixes_ptr": "*i32",
    "additions_start_ptr": "*i32",
    "additions_count_ptr": "*i32",
    "prefixes_start_ptr": "*i32",
    "tail_ptr": "*i32",
    "counts_ptr": "*i16",
    "above_ptr": "*i32",
    "rows_ptr": "*i32",
    "masks_ptr": "*i32",
    "mask_index_ptr": "*i32",
    "logits_stride": "i32",
    "tail_length": "i32",
    "first_token": "i32",
}


def compile_for_hopper(kernel: Any, num_warps: int = 4, types: dict[str, str] | None = None, **constants: Any) -> None:
    types = TYPES | (types or {})
    types |= {name: "*fp32" for name in kernel.arg_names if name not in types and not name.endswith("_ptr")}
    program = compiled_for_hopper(kernel, constants, types, aligned=(), pointers="*fp32", num_warps=num_warps)
    assert program.asm["cubin"]


def test_compiled_for_hopper(pytestconfig: pytest.Config) -> None:
    """Needs no GPU. Without --all, kernels that read logits are compiled for one dtype."""
    both = (("*bf16", 151_936), ("*fp32", 4099))
    for element, vocab in both if pytestconfig.getoption("--all") else both[:1]:
        logits = {"logits_ptr": element}
        large: dict[str, Any] = {"VOCAB_SIZE": vocab, "BLOCK_V": gumbel_triton.BLOCK_V}
        compile_for_hopper(gumbel_triton.block_best_kernel, types=logits, **large)
        unmasked = large | {"masks_ptr": None, "mask_index_ptr": None}
        compile_for_hopper(gumbel_triton.block_best_kernel, types=logits, **unmasked)
        compile_for_hopper(gumbel_triton.block_best_kernel, types=logits, threshold_ptr=None, **unmasked)
        large = {"VOCAB_SIZE": vocab, "BLOCK_V": filters_triton.BLOCK_V, "CANDIDATES": filters_triton.CANDIDATES}
        compile_for_hopper(filters_triton.threshold_kernel, filters_triton.NUM_WARPS, logits, **large)
        types = logits | {"token_ids_ptr": "*i32", "best_ptr": "*i64", "num_top": "i32"}
        large = {"VOCAB_SIZE": vocab, "BLOCK_V": logprobs_triton.BLOCK_V}
        compile_for_hopper(logprobs_triton.block_logprobs_kernel, 4, types, **large)
        compile_for_hopper(logprobs_triton.row_logprobs_kernel, 8, types, NUM_BLOCKS=75, TILE_B=128, **large)
    compile_for_hopper(gumbel_triton.row_best_kernel, NUM_BLOCKS=75, TILE_B=128)
    push = {"addresses_ptr": "*i64", "epochs_ptr": "*i32"}
    push |= dict.fromkeys(("rank", "num_ranks", "num_slots", "data_offset", "row_bytes"), "i32")
    compile_for_hopper(gumbel_triton.best_of_ranks_kernel, types=push, NUM_BLOCKS=38, TILE_B=64)
    for vocab in (151_936, 4099):
        compile_for_hopper(edits_triton.forbid_kernel, VOCAB_SIZE=vocab, BLOCK_V=edits_triton.BLOCK_V)
    compile_for_hopper(edits_triton.penalise_kernel, VOCAB_SIZE=151_936, BLOCK_V=edits_triton.BLOCK_V)
    compile_for_hopper(edits_triton.add_kernel, BLOCK_A=edits_triton.BLOCK_A)
    compile_for_hopper(edits_triton.add_kernel, tail_ptr=None, BLOCK_A=edits_triton.BLOCK_A)
    compile_for_hopper(edits_triton.record_kernel, VOCAB_SIZE=151_936, TILE_L=4)
    compile_for_hopper(edits_triton.record_kernel, VOCAB_SIZE=151_936, TILE_L=1, tail_ptr=None)
    compile_for_hopper(edits_triton.record_kernel, VOCAB_SIZE=0, TILE_L=64, counts_ptr=None)
    words = {"headers_ptr": "*i64", "words_ptr": "*i32"}
    compile_for_hopper(staged_writes_kernel.apply_kernel, 2, words, TILE=staged_writes_kernel.TILE)


# --- what a batch needs, and what it takes ---


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),
        ({"temperature": 0.3, "seed": 7}, True),
        ({"top_k": 5}, False),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.5}, False),
        ({"temperature": 0, "logprobs": 0}, True),
        ({"temperature": 0, "presence_penalty": 1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"min_tokens": 1}, False),
        ({"bad_words_token_ids": ((3,),)}, False),
        ({"temperature": 0, "masked": True}, False),
        ({"temperature": 0, "allowed_token_ids": [3]}, False),
    ],
)
def test_which_batches_are_plain(params: dict[str, Any], plain: bool) -> None:
    sampler = Sampler(RowFields(4, "cpu"), 40)
    sampler.add_row(1, SamplingParams(), 0, [1], 1, set())
    masked = params.pop("masked", False)
    sampler.add_row(2, SamplingParams(**params), 0, [1], 1, {EOS_ID}, edited_late=masked)
    expected = SamplerClass.TEMPERATURE_ONLY if plain else SamplerClass.GENERAL
    assert sampler.sampler_class(np.array([1, 2, -1])) is expected
    assert sampler.sampler_class(np.array([1, -1])) is SamplerClass.TEMPERATURE_ONLY
    assert sampler.sampler_class(np.array([], dtype=np.int64)) is SamplerClass.TEMPERATURE_ONLY


def test_plain_sampling_gives_the_tokens_of_sample() -> None:
    sampler = Sampler(RowFields(8, "cpu"), 40)
    for row in range(8):
        sampler.add_row(row, SamplingParams(temperature=row / 4), row, [1], 1, set())
    logits_SV = cases.strided_logits(9, 40, torch.float32, 0)
    rows = np.array([5, 0, 3, -1, 5, 1, 7, 2, -1])
    row_index_S, positions_S = torch.from_numpy(rows.astype(np.int32)), torch.arange(9)
    expected = sampler.sample(logits_SV, rows, row_index_S, positions_S)
    token_ids_S = torch.full((9,), -1)
    sampler.sample_by_temperature(logits_SV, row_index_S, positions_S, token_ids_S)
    assert torch.equal(token_ids_S, expected)
    assert token_ids_S[[3, 8]].tolist() == [0, 0]


def test_one_request_may_have_several_rows_of_logits() -> None:
    sampler = Sampler(RowFields(8, "cpu"), 40)
    sampler.add_row(3, SamplingParams(top_p=0.9, logit_bias={1: 2.0}, logprobs=1), 5, [1], 1, set())
    logits_SV = cases.strided_logits(4, 40, torch.float32, 0)
    rows, positions_S = np.full(4, 3), torch.arange(4) + 1
    together = sampler.sample(logits_SV, rows, torch.from_numpy(rows.astype(np.int32)), positions_S)
    for i in range(4):
        one = torch.tensor([3], dtype=torch.int32)
        alone = sampler.sample(logits_SV[i : i + 1], rows[:1], one, positions_S[i : i + 1])
        assert alone.tolist() == [int(together[i])]


def test_penalties_take_memory_when_they_are_first_asked_for() -> None:
    fields = RowFields(16, "cpu")
    sampler = Sampler(fields, 40)
    sampler.add_row(0, SamplingParams(bad_words_token_ids=((1, 2),)), 0, [1], 1, set())
    assert "counts" not in fields
    sampler.add_row(1, SamplingParams(presence_penalty=1), 0, [1], 1, set())
    assert fields["counts"].nbytes == penalty_bytes(16, 40) == 16 * 40 * 2


def test_longer_bad_words_leave_other_tails_alone() -> None:
    """A request with longer bad words arrives while others are running."""
    logits_V = torch.zeros(40)
    logits_V[[7, 8]] = torch.tensor([9.0, 5.0])
    sampler = Sampler(RowFields(4, "cpu"), 40)
    sampler.add_row(0, SamplingParams(temperature=0, bad_words_token_ids=((5, 7),)), 0, [1, 5], 1, set())
    sampler.add_row(
        1, SamplingParams(temperature=0, bad_words_token_ids=((3, 4, 5, 6, 7),)), 0, [1, 3, 4, 5, 6], 1, set()
    )
    rows, row_index_S = np.array([0, 1]), torch.tensor([0, 1], dtype=torch.int32)
    drawn = [
        sampler.sample(logits_V.expand(2, -1), rows, row_index_S, torch.tensor([2 + step, 5 + step])).tolist()
        for step in range(2)
    ]
    assert drawn == [[8, 8], [7, 7]]


def test_degenerate_logits_in_the_plain_forms() -> None:
    cases.degenerate_logits("cpu", 77, False)


# --- on a GPU ---

GPU_SHAPES = [(1, 151_936), (300, 4099), (64, 151_936), (7, 32_001), (33, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_samples", "vocab_size"), GPU_SHAPES)
@pytest.mark.parametrize("case", [cases.choose_matches, cases.thresholds_match])
@pytest.mark.parametrize("variant", [False, True])
def test_choice_and_thresholds_on_a_gpu(
    case: Callable[..., None], num_samples: int, vocab_size: int, dtype: torch.dtype, variant: bool
) -> None:
    case("cuda", num_samples, vocab_size, dtype, variant)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_samples", "vocab_size"), GPU_SHAPES)
def test_edits_and_logprobs_on_a_gpu(num_samples: int, vocab_size: int) -> None:
    if num_samples * vocab_size < 5_000_000:
        cases.edits_match("cuda", num_samples, vocab_size)
    cases.masks_match("cuda", num_samples, vocab_size)
    cases.logprobs_match("cuda", num_samples, vocab_size, torch.float32)
    cases.logprobs_match("cuda", num_samples, vocab_size, torch.bfloat16)


@pytest.mark.gpu
def test_memory_of_logprobs_on_their_way_is_not_given_to_others() -> None:
    """Results may be dropped at once, as on ranks that do not report, before the next step is uploaded."""
    logits_RV, token_ids_R = torch.zeros(4, 512, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    shape = logprob_rows(logits_RV, token_ids_R, 1).shape
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    place = logprob_rows(logits_RV, token_ids_R, 1).data_ptr()
    others = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(4)]
    assert place not in [other.data_ptr() for other in others]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(40, 64), (4099, 200), (151_936, 24)])
def test_the_whole_sampler_on_a_gpu(vocab_size: int, num_rows: int) -> None:
    cases.samplers_match("cuda", vocab_size, num_rows, 8)
    cases.composition_does_not_matter("cuda", vocab_size, min(num_rows, 50))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [77, 32_001])
def test_degenerate_logits_on_a_gpu(vocab_size: int) -> None:
    cases.degenerate_logits("cuda", vocab_size, True)


@pytest.mark.gpu
@pytest.mark.parametrize("params", CHI_SQUARE_PARAMS)
def test_frequencies_on_a_gpu(params: dict[str, Any]) -> None:
    check_chi_square(*cases.frequencies("cuda", params, 40_000))


@pytest.mark.gpu
def test_sampling_does_not_wait_for_the_gpu() -> None:
    vocab_size, num_rows = 4099, 24
    requests = [
        SamplingParams(),
        SamplingParams(temperature=0, logprobs=20, repetition_penalty=1.2),
        SamplingParams(top_k=50, top_p=0.9, bad_words_token_ids=((1, 2),), logit_bias={3: 1.0}),
        SamplingParams(min_p=0.1, min_tokens=5, logprobs=-1, token_mask=cases.ByLastToken(vocab_size)),
    ]
    mask = requests[3].token_mask
    assert mask is not None
    asked = [mask.allowed([]) if row % 4 == 3 else None for row in range(num_rows)]
    logits_SV = cases.strided_logits(num_rows, vocab_size, torch.bfloat16, 0).cuda()
    rows = np.arange(num_rows)
    row_index_S = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    positions_S = torch.full((num_rows,), 4, device="cuda")
    for attempt in range(2):  # what is allocated and compiled the first time may wait
        sampler = Sampler(RowFields(num_rows, "cuda"), vocab_size)
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            for row in range(num_rows):
                sampler.add_row(row, requests[row % 4], row, [1, 2, 3], 2, {EOS_ID}, edited_late=row % 4 == 3)
            for step in range(3):
                masks = step_masks(asked, "cuda")
                token_ids_S = sampler.sample(logits_SV, rows, row_index_S, positions_S + step, masks)
                num_logprobs_S = sampler.num_logprobs(rows)
                assert num_logprobs_S is not None
                logprobs = batch_logprobs(logits_SV, token_ids_S.int(), num_logprobs_S)
            sampler.remove_row(3)
            sampler.add_row(3, requests[2], 9, [1, 2, 3], 2, {EOS_ID})
            sampler.sample(logits_SV, rows, row_index_S, positions_S)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert logprobs.few_SW is not None
        assert (logprobs.few_SW[:, 0] > 0).all()  # ranks
        assert [*logprobs.many] == [*range(3, num_rows, 4)]


@pytest.mark.gpu
def test_plain_sampling_in_a_cuda_graph() -> None:
    """Captured once with only padding; replayed with other rows, parameters and positions."""
    vocab_size, size = 32_001, 16
    fields = RowFields(32, "cuda")
    sampler = Sampler(fields, vocab_size)
    logits_SV = torch.full((size, vocab_size), torch.nan, dtype=torch.bfloat16, device="cuda")
    row_index_S = torch.full((size,), -1, dtype=torch.int32, device="cuda")
    positions_S, token_ids_S = (torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(2))
    sampler.sample_by_temperature(logits_SV, row_index_S, positions_S, token_ids_S)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample_by_temperature(logits_SV, row_index_S, positions_S, token_ids_S)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for row in range(step * 8, step * 8 + 8):
            sampler.add_row(row, SamplingParams(temperature=(row % 3) / 2), row, [1], 1, set())
        rows = np.full(size, -1)
        rows[: 10 + step] = np.resize(np.arange(step * 8 + 8), 10 + step)
        logits_SV.copy_(torch.randn(size, vocab_size, generator=generator))
        row_index_S.copy_(torch.from_numpy(rows.astype(np.int32)))
        positions_S.copy_(torch.arange(size) + step)
        token_ids_S.fill_(-1)
        fields.writes.apply()
        graph.replay()
        expected = sampler.sample(logits_SV, rows, row_index_S, positions_S)
        assert token_ids_S.tolist() == expected.tolist()
        assert token_ids_S[10 + step :].tolist() == [0] * (6 - step)


@pytest.mark.gpu
def test_a_step_in_flight_keeps_its_parameters() -> None:
    """Rows are given to other requests while the GPU is still busy with earlier steps."""
    vocab_size = 4099
    logits_SV = cases.strided_logits(4, vocab_size, torch.float32, 0).cuda()
    logits_SV[:, 8:10] = 0
    rows, row_index_S = np.arange(4), torch.arange(4, dtype=torch.int32, device="cuda")
    positions_S = torch.full((4,), 5, device="cuda")
    first = SamplingParams(temperature=0.7, top_k=40, logit_bias={7: 4.0}, presence_penalty=1)
    second = SamplingParams(temperature=0, logit_bias={8: 100.0, 9: 99.0})
    expected = []
    for busy in (False, True):
        sampler = Sampler(RowFields(4, "cuda"), vocab_size)
        for row in range(4):
            sampler.add_row(row, first, row, [1, 2], 1, set())
        sampler.sample(logits_SV, rows, row_index_S, positions_S)
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(200_000_000)
        sampled = sampler.sample(logits_SV, rows, row_index_S, positions_S)
        for row in range(4):
            sampler.remove_row(row)
            sampler.add_row(row, second, row, [1, 2], 1, set())
        later = sampler.sample(logits_SV, rows, row_index_S, positions_S)
        expected.append((sampled.tolist(), later.tolist()))
    assert expected[0] == expected[1]
    assert expected[0][1] == [8] * 4
