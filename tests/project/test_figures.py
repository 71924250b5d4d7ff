"""Figures in the documents come from docs/measurements, and from nowhere else."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from folders import REPOSITORY

DOCS = REPOSITORY / "docs"
UNITS = (
    r"(?:ms|milliseconds?|microseconds?|us|µs|s|seconds?|minutes?|tok/s|tokens (?:per|a) second|[kMGT]i?B(?:/s)?"
    r"|TFLOP/s|%|times (?:as|faster|slower))"
)
FIGURE = re.compile(rf"(?<![\w.`])\d[\d,.]*\s?{UNITS}(?![\w`])")
# What commands print is an example, and says so.
EXAMPLE = re.compile(r"^<!-- fragment: .*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
# Limits, defaults and sizes that the code decides: facts, but not measured.
LIMITS = {
    "96 KiB",  # shared memory that the triton backend needs
    "4 GiB",  # most of a KV cache on a CPU
    "256 MiB",  # room that the compile cache wants
    "64 MiB",  # most of an audio file
    "16 GB",  # a checkpoint's size
    "10 seconds",  # in which an image must be fetched
    "2 GiB",  # of a GPU that received weights leave
    "5 minutes",  # for which a trainer's message is awaited
    "30 seconds",  # in which those of a prompt must be
}


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(DOCS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS))
    return module


def test_every_document_has_the_figures_of_its_measurements(figures: ModuleType) -> None:
    stale = [path.name for path in figures.DOCUMENTS if figures.up_to_date(path.read_text()) != path.read_text()]
    assert stale == [], "run python docs/figures.py"


def test_no_figure_is_typed_in(figures: ModuleType) -> None:
    typed = []
    for path in figures.DOCUMENTS:
        if path.name != "decisions.md":  # dated figures
            text = figures.TABLE.sub("", figures.FIGURE.sub("", path.read_text()))
            for left_out in (EXAMPLE, CODE):
                text = left_out.sub("", text)
            typed += [f"{path.name}: {match[0]}" for match in FIGURE.finditer(text) if match[0] not in LIMITS]
    assert typed == []


def test_every_measurement_says_where_and_when_and_is_shown(figures: ModuleType) -> None:
    documents = "".join(path.read_text() for path in figures.DOCUMENTS)
    for path in figures.MEASUREMENTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert {"machine", "versions", "date"} <= result.keys(), path.name
        if path.stem.startswith("gpu_tests"):  # a user's own run writes it again, and no document changes
            continue
        assert re.search(rf"<!-- (figure|table): [^>]*\b{re.escape(path.stem)} ", documents), path.name


def result_of() -> dict[str, Any]:
    return {"rows": [{"name": "a b", "us": 1234.5}, {"name": "c", "us": 2}], "share": 0.25, "text": "no", "yes": True}


def test_figures_are_put_in_place_and_stay(figures: ModuleType) -> None:
    before = (
        "It took <!-- figure: x rows/name=a b/us ,.1f -->?<!-- /figure --> us, <!-- figure: x rows/1/us .0f*1e3 -->\n"
    )
    before += "<!-- /figure --> ns, <!-- figure: x share .0% -->9%<!-- /figure -->."
    after = figures.up_to_date(before, lambda name: result_of())
    assert re.sub("<!--.*?-->", "", after) == "It took 1,234.5 us, 2000 ns, 25%."
    assert figures.up_to_date(after, lambda name: result_of()) == after


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("rows/name=d/us", "'name=d' is not there"),
        ("rows/5/us", "'5' is not there"),
        ("rows/a/us", "'a' is not there"),
        ("share/more", "'more' is not there"),
        ("text", "'no', which is not a number"),
        ("yes", "'True', which is not a number"),
    ],
)
def test_a_path_to_nowhere_is_named(figures: ModuleType, path: str, said: str) -> None:
    with pytest.raises(figures.FigureError, match=re.escape(said)):
        figures.number_at(result_of(), path)


def test_a_document_that_is_not_up_to_date_is_named_and_kept(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "a.md"
    stale = "<!-- figure: peers rows/0/vllm .2f -->0<!-- /figure -->"
    document.write_text(stale)
    monkeypatch.setattr(figures, "DOCUMENTS", (document,))
    assert figures.main(["--check"]) == 1
    assert "not up to date: a.md" in capsys.readouterr().out
    assert document.read_text() == stale
    assert figures.main([]) == 0
    assert figures.main(["--check"]) == 0
    assert document.read_text() == stale.replace("-->0<", "-->1.64<")
