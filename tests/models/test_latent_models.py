"""Models with multi-head latent attention: right in chunks, beside others, preempted, and with drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import family, write_checkpoint
from family_comparison import difference_after_passes, difference_of, fused_model
from greedy_engines import expected_in_company, generated

# Of the families that differ little from the first two one runs without --all.
DRAWN = pytest.mark.product(one_in=1000)
OTHERS = ("sarvam_mla", "glm4_moe_lite", "axk1", "minicpm3", "youtu")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", *(pytest.param(name, marks=DRAWN) for name in OTHERS)])
def test_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In eager code, and in the graph after all passes."""
    oracle = write_checkpoint(tmp_path, family(name))
    eager = difference_of(tmp_path, oracle, {"mode": "eager", "device": "cpu"})
    assert eager.is_right(torch.float32), eager
    model = fused_model(tmp_path, {"device": "cpu"})
    fused = difference_after_passes(model, oracle)
    assert fused.is_right(torch.float32), fused
    reports = {report.name: report for report in model.reports}
    assert reports["foreign_attention"].matches == model.config.model.num_layers
    # DeepSeek-V2 rotates by products of complex numbers.
    assert reports.keys() & {"complex_numbers"} == ({"complex_numbers"} if name == "deepseek_v2" else set())
    assert all(reports[each].matches == reports[each].contract > 0 for each in reports.keys() & {"complex_numbers"})


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_transformers_whatever_runs_beside_them(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, family("youtu"))
    expected = expected_in_company(tmp_path, oracle)
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafted, metrics = generated(tmp_path, mode="eager", max_num_seqs=5, speculative_config=ngrams)
    assert drafted == expected
    assert metrics["draft_tokens"] > 0
