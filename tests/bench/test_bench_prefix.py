"""`bench prefix`: a prefix comes back from host memory, or from files, and the figures say which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled_engine.cli.app import app

COMMAND = "bench prefix --device cpu --mode eager --max-model-len 512 --num-blocks 60 --block-size 16 --prefix-len 400"
COMMAND += " --max-num-seqs 4 --decodes 2 --warm-up 0 --repeats 2"


@pytest.mark.parametrize("from_files", [False, True])
def test_the_command(from_files: bool, tmp_path: Path) -> None:
    size = ["--kv-offloading-size", "0.004" if from_files else "0.1"]  # 43 blocks, a prefix and a half
    more = ["--kv-offloading-folder", str(tmp_path)] if from_files else []
    run = CliRunner().invoke(app, [*COMMAND.split(), *size, *more, "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    for figures in (result["first_token"], result["others"]):
        assert [*figures] == ["computed", "cached", "returned"]
        assert min(figure["median"] for figure in figures.values()) > 0
    assert result["others_alone"]["median"] > 0
    assert result["loaded_blocks"] >= 2 * 16
    assert result["read_blocks"] == (result["loaded_blocks"] if from_files else 0)


def test_the_table_and_what_is_missing() -> None:
    run = CliRunner().invoke(app, [*COMMAND.split(), "--kv-offloading-size", "0.1"])
    assert run.exit_code == 0, run.output
    for words in ("400 tokens", "computed", "returned", "blocks came from host memory"):
        assert words in run.output
    run = CliRunner().invoke(app, COMMAND.split())
    assert run.exit_code != 0
    assert "kv_offloading_size is None; allowed" in run.output


TRAFFIC = "bench prefix --traffic --device cpu --mode eager --max-model-len 512 --num-blocks 60 --block-size 16"
TRAFFIC += " --prefix-len 400 --max-num-seqs 2 --requests 24 --clients 2 --kv-offloading-size 0.004"


def test_traffic_finds_in_tiers_what_the_kv_cache_has_lost(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, [*TRAFFIC.split(), "--kv-offloading-folder", str(tmp_path), "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    without, with_tiers = result["engines"]["without_tiers"], result["engines"]["with_tiers"]
    assert result["documents"] == 5 * 60 * 16 // 400
    assert without["hit_rate"]["host"] == without["hit_rate"]["files"] == 0
    assert without["hit_rate"]["all"] < with_tiers["hit_rate"]["all"] <= result["repeated"]
    for engine in (without, with_tiers):
        rates = engine["hit_rate"]
        assert rates["all"] == pytest.approx(rates["device"] + rates["host"] + rates["files"])
        assert 0 < engine["ttft_ms"]["p50"] <= engine["ttft_ms"]["p99"]
    assert with_tiers["hit_rate"]["files"] > 0


def test_the_table_of_traffic_and_a_cache_that_is_too_small() -> None:
    run = CliRunner().invoke(app, [*TRAFFIC.split(), "--requests", "4"])
    assert run.exit_code == 0, run.output
    for words in ("4 requests about 12 documents of 400 tokens", "hit rate, host", "TTFT p99, ms", "of an earlier"):
        assert words in run.output
    run = CliRunner().invoke(app, [*TRAFFIC.split(), "--num-blocks", "20"])
    assert run.exit_code != 0
    assert "the KV cache holds 320 tokens; allowed: at least 448" in run.output
