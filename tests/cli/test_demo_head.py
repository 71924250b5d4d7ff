"""The demo drafts with the bundled model's head where that pays, and says the acceptance length."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import head_config, random_tensors, write_head
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.cli.demo import head_options
from compiled_engine.models.bundled import BUNDLED_HEAD_PATH, BUNDLED_MODEL_PATH

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def head(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = head_config(bundled_model_path)
    return write_head(tmp_path_factory.mktemp("head"), config, random_tensors(config))


def measured(head: Path, speed: float) -> Path:
    record = {"cpu_tokens_per_second": {"without": 100.0, "with": speed}}
    (head / "training.json").write_text(json.dumps(record))
    return head


def test_the_head_is_used_where_it_is_no_slower(head: Path, tmp_path: Path) -> None:
    drafts = {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}}
    cpu = {"device": "cpu"}
    assert head_options(cpu, None, measured(head, 99)) == {}
    assert head_options(cpu, True, head) == drafts
    assert head_options(cpu, None, measured(head, 100)) == drafts
    assert head_options(cpu, False, head) == {}
    for other in ({"model": "another"}, {"speculative_config": "{}"}):
        assert head_options(cpu | other, None, head) == {}
        with pytest.raises(ValueError, match=f"--head is given with {next(iter(other))}; allowed: the bundled model"):
            head_options(cpu | other, True, head)
    assert head_options(cpu, None, tmp_path) == {}
    with pytest.raises(ValueError, match=r"but there is no head in .*; allowed: --no-head"):
        head_options(cpu, True, tmp_path)


@pytest.mark.parametrize("options", [["--head"], []], ids=str)
def test_the_demo_says_the_acceptance_length(
    options: list[str], head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo: Any = importlib.import_module("compiled_engine.cli.demo")
    monkeypatch.setattr(demo, "BUNDLED_HEAD_PATH", head if options else tmp_path)
    arguments = ["demo", "--device=cpu", "--mode=eager", "--max-model-len=64", "--max-tokens=6"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    assert ("; mean acceptance length 1." in result.output) == bool(options)


def test_the_bundled_head_fits_the_model_and_is_off_where_it_is_slower() -> None:
    head, model = (json.loads((path / "config.json").read_text()) for path in (BUNDLED_HEAD_PATH, BUNDLED_MODEL_PATH))
    for name in ("hidden_size", "vocab_size", "head_dim"):
        assert head[name] == model[name], name
    record = json.loads((BUNDLED_HEAD_PATH / "training.json").read_text())
    for found in record["acceptance"].values():
        assert found["length"] == pytest.approx(1 + sum(found["by_position"]))
    speed = record["cpu_tokens_per_second"]
    assert bool(head_options({"device": "cpu"}, None, BUNDLED_HEAD_PATH)) == (speed["with"] >= speed["without"])
