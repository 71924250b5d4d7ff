"""The kernels of drafts: equal to their references on random batches, in the interpreter and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from draft_kernel_cases import DraftCase, check, check_kept
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.config import SpeculationConfig
from compiled_engine.engine.input_batch import launch_prepare
from compiled_engine.features.speculation.draft_rows import launch_keep_drafts
from compiled_engine.features.speculation.ngram import Ngrams
from compiled_engine.features.speculation.verification import launch_verify
from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run = interpret(__file__, "-m", "draft_kernel_cases")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.usefixtures("hopper")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    case = DraftCase(0, torch.device("cpu"))
    batch, count = case.batch, case.batch.num_rows
    room_R = torch.zeros(count, dtype=torch.int32)
    with ThreadPoolExecutor(2) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        launch_prepare(case.states, case.buffers, count, batch.padded_tokens, batch.decodes_only)
        launch_verify(case.states, case.buffers, case.token_ids_R, count, case.acceptance, case.taken_R)
        launch_keep_drafts(case.states, case.buffers, room_R, case.token_ids_R, 0)
        Ngrams(SpeculationConfig("ngram", case.num_drafts, 3, 1), case.states, case.buffers).launch(batch)
        assert [loading.result() is not None for loading in kernels.load()] == [True] * 4
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {
        "prepare_kernel",
        "verify_kernel",
        "keep_drafts_kernel",
        "ngram_kernel",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_kernels_equal_their_references_on_a_gpu(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        check(seed, torch.device("cuda"))
        check_kept(seed, torch.device("cuda"))
