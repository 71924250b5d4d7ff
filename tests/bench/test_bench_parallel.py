"""The benchmark of layouts: refusals, and results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_engine.bench import family_comparison
from compiled_engine.bench.family_comparison import Difference
from compiled_engine.cli.app import app


def test_a_layout_that_is_refused_says_why_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def difference(folder: Path, oracle: Any, options: dict[str, Any]) -> Difference:
        asked.append(options)
        if "pipeline_parallel_size" in options:
            raise ValueError("no stages")
        return Difference(1e-5, 1e-6, 0.0)

    monkeypatch.setattr(family_comparison, "difference_of", difference)
    output = tmp_path / "layouts.json"
    names = ("TP 2, eager", "PP 2, compiled")
    arguments = ["bench", "layouts", "--family", "qwen3", "--output", str(output), "--json"]
    result = CliRunner().invoke(app, [*arguments, *(part for name in names for part in ("--layout", name))])
    (row,) = json.loads(output.read_text())["results"]
    assert result.exit_code == 0
    assert json.loads(result.stdout)["results"] == [row]
    assert row["TP 2, eager"] == {"largest": 1e-5, "mean": 1e-6, "right": True}
    assert row["PP 2, compiled"] == {"refused": "ValueError: no stages"}
    assert [options.get("strict_passes", False) for options in asked] == [False, True]
    assert CliRunner().invoke(app, ["bench", "layouts", "--layout", "TP 3"]).exit_code == 2
