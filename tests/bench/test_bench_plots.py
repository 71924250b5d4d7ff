"""An ablation's plots and page from a result that was made by hand."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_engine.bench.pages import render_ablation
from compiled_engine.bench.worker_workloads import AblationWorkload
from compiled_engine.cli.app import app

PNG = b"\x89PNG\r\n"
EVIL = "<script>alert($1^2$)</script> without $x_$"
VOID = {"meta", "img", "source", "br"}


def figure(value: float) -> dict[str, Any]:
    return {"median": value, "spread": [value * 0.9, value * 1.1]}


def record(name: str, value: float) -> dict[str, Any]:
    return {
        "name": name,
        "options": {"mode": "graphed"},
        "repeats": 3,
        "tpot_ms": {"1": figure(value), "64": None},
        "step_ms": {"1": figure(value), "64": figure(value * 3)},
        "mixed_step_ms": figure(value * 4),
        "prefill_tokens_per_s": figure(1e5 / value),
        "start_up_s": figure(4.0),
        "start_up_stages_s": {"capture": 0.5},
        "kernels": figure(200.0),
        "memory_bytes": {
            name: figure(2.0**30) for name in ("kv_cache", "without_kv_cache", "graphs_predicted", "graphs_used")
        },
        "compiles_after_start": 0,
        "preemptions": 0,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    failed = {"name": "compiled + piecewise", "options": {}, "error": "ended with exit code 1\n<b>boom</b>"}
    return {
        "benchmark": "ablation",
        "variants": [record("eager", 9.0), failed, record("compiled + full", 0.7), record(EVIL, 0.9)],
        "bound": {
            "tpot_ms": {"1": 0.3, "64": 0.8},
            "step_ms": {"1": 0.3, "64": 0.8},
            "mixed_step_ms": 1.0,
            "prefill_tokens_per_s": 6e5,
        },
        "workload": AblationWorkload().as_record(),
        "repeats": 3,
        "notes": ["a <note>"],
        "rates": {"bytes_per_s": 4.3e12, "flops_per_s": 7.9e14, "source": "known for H200"},
        "machine": {"device": "cuda:0", "gpu": "GPU & Co", "processor": "p", "cores": 2},
        "model": {"name": "a<b>model", "dtype": "bfloat16"},
        "options": {"shape": "qwen3-0.6b"},
        "versions": {"torch": "2.13"},
        "command": "compiled-engine bench ablation --model '<x>'",
    }


class Page(HTMLParser):
    """Tags that are open, and all that there were; text outside of style."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_plots_and_page_are_made_from_json(result: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    source.write_text(json.dumps(result))
    output = tmp_path / "new" / "folder"
    done = CliRunner().invoke(app, ["bench", "plot", str(source), "--output", str(output)])
    assert done.exit_code == 0, done.stderr
    names = ["ablation.html", "step_batch_1.png", "step_batch_64.png", "step_by_batch.png"]
    assert sorted(path.name for path in output.iterdir()) == names
    assert sorted(Path(line).name for line in done.stdout.splitlines()) == names
    for name in names[1:]:
        assert (output / name).read_bytes().startswith(PNG)


def test_the_page_parses_needs_nothing_else_and_escapes_names(result: dict[str, Any]) -> None:
    page = Page()
    page.feed(render_ablation(result))
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags
    assert "b" not in tags
    for text in (EVIL, "a<b>model", "<b>boom</b>", "a <note>", "GPU & Co", "--model '<x>'", "bound"):
        assert text in page.text
    addresses = [value for _, found in page.tags for key, value in found.items() if key in ("src", "srcset", "href")]
    assert len(addresses) == 6
    for address in addresses:
        prefix, data = str(address).split(",")
        assert prefix == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)


def test_without_any_figures_there_is_a_page_without_plots(result: dict[str, Any]) -> None:
    result["variants"] = [found for found in result["variants"] if "error" in found]
    page = Page()
    page.feed(render_ablation(result))
    assert "img" not in [tag for tag, _ in page.tags]
    assert "compiled + piecewise failed" in page.text


def test_json_that_is_no_ablation_is_refused(result: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    for content, said in (
        ({"benchmark": "latency"}, "allowed: a JSON file of bench ablation"),
        ([1], "allowed: a JSON file of bench ablation"),
        ({key: value for key, value in result.items() if key != "bound"}, "lacks 'bound'"),
    ):
        source.write_text(json.dumps(content))
        done = CliRunner().invoke(app, ["bench", "plot", str(source), "--output", str(tmp_path / "out")])
        assert done.exit_code == 2
        assert said in done.stderr
