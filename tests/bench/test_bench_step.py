"""`bench step`: the split adds up, its JSON and table, the trace, wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled_engine.bench.engine_steps import LAPS, split
from compiled_engine.cli.app import app


def test_the_split_adds_up_and_idle_is_what_the_device_leaves() -> None:
    found = split({"schedule": 1e-3, "prepare": 2e-3, "launch": 3e-3, "wait": 10e-3, "output": 4e-3}, 15e-3, 10)
    assert found["step"] == pytest.approx(2000)
    assert found["host"] == pytest.approx(1000)
    assert found["device"] == pytest.approx(1500)
    assert found["device_idle"] == pytest.approx(0.25)
    without = split({"schedule": 1e-3}, None, 1)
    assert (without["device"], without["device_idle"], without["wait"]) == (None, None, 0.0)


def test_the_command(tmp_path: Path) -> None:
    arguments = "bench step --device cpu --mode eager --batch 2 --steps 4 --warm-up 0 --repeats 2 --json --profile"
    run = CliRunner().invoke(app, [*arguments.split(), str(tmp_path)])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    (record,) = result["results"]
    assert record["batch_size"] == 2
    assert sum(record[name]["median"] for name in ("host", "wait")) > 0
    assert record["device"] is None
    for name in LAPS:
        assert record[name]["median"] >= 0
    assert record["launch"]["median"] > 0  # on a CPU the model runs there
    assert record["tokens"] is None
    assert json.loads((tmp_path / "decode_2.json").read_text())["traceEvents"]


def test_a_step_with_drafts_yields_several_tokens(bundled_model_path: Path) -> None:
    """The model drafts for itself, so that every draft is right."""
    drafts = {"method": "draft_model", "model": str(bundled_model_path), "num_speculative_tokens": 3}
    arguments = "bench step --device cpu --dtype float32 --mode eager --batch 2 --steps 4 --repeats 1 --json"
    run = CliRunner().invoke(app, [*arguments.split(), "--speculative-config", json.dumps(drafts)])
    assert run.exit_code == 0, run.output
    (record,) = json.loads(run.stdout)["results"]
    assert record["tokens"]["median"] == 4
    assert record["token"]["median"] == pytest.approx(record["step"]["median"] / 4)
