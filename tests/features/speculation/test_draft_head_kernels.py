"""The kernels of heads: equal to their references on random batches, in the interpreter and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from draft_head_kernel_cases import ROWS, HeadCase, check
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.features.speculation.draft_head import (
    launch_begin_drafts,
    launch_following_tokens,
    launch_keep_hidden,
)
from compiled_engine.features.speculation.draft_rows import launch_keep_drafts
from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by
from compiled_engine.sampling import gumbel, gumbel_triton


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run = interpret(__file__, "-m", "draft_head_kernel_cases")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.usefixtures("hopper")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    case = HeadCase(0, torch.device("cpu"), shifted=True)
    states, buffers, count = case.states, case.buffers, case.batch.num_rows
    known_ids_V, sharpness_1 = torch.arange(50), torch.ones(1)
    logits_RV, zeros_S = torch.zeros(ROWS, 50, dtype=torch.bfloat16), torch.zeros(ROWS)
    seeds_S = torch.zeros(ROWS, dtype=torch.int64)
    with ThreadPoolExecutor(2) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        launch_following_tokens(states, case.batch, buffers, case.token_ids_T)
        launch_keep_hidden(states, buffers, count, case.hidden_TD, case.kept_SD)
        launch_begin_drafts(states, case.drafting_R, case.kept_SD, case.begun_RD, case.positions_R)
        launch_keep_drafts(states, buffers, case.room_R, case.tokens_R, 0, case.inputs)
        arguments = logits_RV, case.drafting_R, case.positions_R, zeros_S, seeds_S, None, case.tokens_R
        for known in (known_ids_V, None):
            gumbel_triton.sample(*arguments, known_ids_V=known, sharpness_1=sharpness_1)
        assert all(loading.result() is not None for loading in kernels.load())
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {
        "following_kernel",
        "keep_hidden_kernel",
        "begin_drafts_kernel",
        "keep_drafts_kernel",
        "block_best_kernel",
        "row_best_kernel",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(2))
def test_kernels_equal_their_references_on_a_gpu(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        check(seed, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("sharpness", "vocab_size"), [(1.0, 9000), (1.5, 9000), (3.0, 9000), (1e6, 9000), (1.5, 5000)])
def test_drafts_are_sampled_from_some_tokens_by_their_sharpness(sharpness: float, vocab_size: int) -> None:
    """Or from all, whose ids are then not given."""
    generator = torch.Generator().manual_seed(0)
    known_ids_V = torch.randperm(vocab_size, generator=generator)[:5000].sort().values
    logits_SV, rows_S = torch.randn(64, 5000, generator=generator) * 4, torch.arange(64, dtype=torch.int32)
    rows_S[::7] = -1
    inverse_S, seeds_S = torch.rand(64, generator=generator) * 2, torch.arange(64) * 977
    inverse_S[::5] = 0
    positions_S = torch.arange(64) * 3
    whole_SV = torch.full((64, vocab_size), -torch.inf)
    whole_SV[:, known_ids_V] = logits_SV * sharpness
    expected_S, found_S = torch.zeros(2, 64, dtype=torch.int64)
    gumbel.sample(whole_SV, rows_S, positions_S, inverse_S, seeds_S, None, expected_S)
    given = [each.cuda() for each in (logits_SV, rows_S, positions_S, inverse_S, seeds_S)]
    on_gpu = found_S.cuda()
    known = known_ids_V.cuda() if vocab_size > 5000 else None
    gumbel_triton.sample(*given, None, on_gpu, known_ids_V=known, sharpness_1=torch.tensor([sharpness]).cuda())
    assert (on_gpu.cpu() == expected_S).all()
