"""The program that compares families of models with transformers: refusals, and results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_families
import family_comparison
import pytest
from family_comparison import Difference


def test_a_layout_that_is_refused_says_why_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    options = [part for name in names for part in ("--layout", name)]
    compare_families.main(["layouts", "--family", "qwen3", "--output", str(output), *options])
    (row,) = json.loads(output.read_text())["results"]
    assert row["TP 2, eager"] == {"largest": 1e-5, "mean": 1e-6, "right": True}
    assert row["PP 2, compiled"] == {"refused": "ValueError: no stages"}
    assert [options.get("strict_passes", False) for options in asked] == [False, True]
    verdicts = "TP 2, eager: 1e-05 right · PP 2, compiled: refused"
    assert f"qwen3 {verdicts}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words", [["layouts", "--layout", "TP 3"], ["families", "--family", "other"], ["families", "--mode", "verified"]]
)
def test_a_wrong_option_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_families.main(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err.splitlines()[-1]
