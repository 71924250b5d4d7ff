"""Benchmarks of drafts: rows of the table, and variants of an ablation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.bench.ablation import Asked
from compiled_engine.bench.ablation import make_plan as make_ablation
from compiled_engine.bench.drafts import LENGTH
from compiled_engine.bench.table import make_plan, measure
from compiled_engine.process.progress import SilentProgress

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_of_the_table_measure_drafts(tmp_path: Path) -> None:
    given = {"device": "cpu", "mode": "eager", "max_model_len": 64, "max_num_seqs": 2}
    plan = make_plan(given, ["bundled-tpot-1-eagle3", "bundled-tpot-1-ngram"], with_curves=False, folder=tmp_path)
    assert [engine.config.speculation.method for engine in plan.engines] == ["eagle3", "ngram"]
    result = measure(plan, 1, SilentProgress(), lambda result: None)
    head, ngram = sorted(result["rows"], key=lambda row: row["workload"]["drafts"])
    assert head["measured"]["median"] > 0 < ngram["measured"]["median"]
    assert head["what"].endswith(f"drafts of a head, {LENGTH:.2f} tokens a step at random")
    assert head["bound"] == pytest.approx(ngram["bound"] / LENGTH)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize("as_json", [True, False])
def test_an_ablation_leaves_the_drafts_out(as_json: bool) -> None:
    options: dict[str, Any] = {"device": "cpu", "speculative_config": json.dumps(DRAFTS) if as_json else DRAFTS}
    plan = make_ablation(options, None, Asked(quick=True))
    others = {each.name: each.options["speculative_config"] for each in plan.variants if "drafts" in each.name}
    assert others == {
        "compiled without drafts": None,
        "compiled with as many drafts as pay": DRAFTS | {"enable_adaptive_verification": True},
    }
    assert plan.workload.max_new_tokens_per_step == 3


def test_an_ablation_adds_drafts_by_name() -> None:
    plan = make_ablation({"device": "cpu"}, None, Asked(quick=True, variants=("compiled with drafts of n-grams",)))
    (variant,) = plan.variants
    assert variant.options["speculative_config"]["method"] == "ngram"
    assert plan.workload.max_new_tokens_per_step == 4
    assert "drafts" not in " ".join(
        each.name for each in make_ablation({"device": "cpu"}, None, Asked(quick=True)).variants
    )
