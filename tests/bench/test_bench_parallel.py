"""The benchmarks of executors and layouts: what they refuse before anything starts, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_engine.bench import family_comparison
from compiled_engine.bench.executor import options_for
from compiled_engine.bench.family_comparison import Difference
from compiled_engine.cli.app import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; allowed: 1"),
        ({"distributed_executor": "multiprocess"}, "distributed_executor is 'multiprocess'; allowed: none"),
    ],
)
def test_executors_are_compared_on_one_device(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_for({"device": "cpu", **options}, 2, 4)


def test_both_engines_have_room_for_every_request() -> None:
    given = options_for({"device": "cpu", "block_size": 16}, 3, 4)
    assert given["max_num_seqs"] == 3
    assert given["num_blocks"] == 1 + 3 * -(-(128 + 4 * 4 + 16) // 16)


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
