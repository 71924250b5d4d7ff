"""The loss on a text: of the engine, of what `quantise` writes, and beside float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bundled_training.held_out import held_out_windows, mean_nats_per_token, scored_tokens
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from compiled_engine.bench.held_out_loss import BASE, VARIANTS, compare_losses, with_folder
from compiled_engine.cli.app import app
from compiled_engine.cli.bench_loss import loss_table
from compiled_engine.llm import LLM
from compiled_engine.process.progress import SilentProgress

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(bundled_model_path: Path) -> str:
    return (bundled_model_path / "held_out.txt").read_text()[:2500]


@pytest.fixture(scope="module")
def expected(bundled_model_path: Path, text: str) -> tuple[float, int]:
    """The loss and the number of tokens, as the bundled model's are defined."""
    windows = held_out_windows(AutoTokenizer.from_pretrained(bundled_model_path), text)
    plain = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32)
    assert len(windows) > 1
    return mean_nats_per_token(lambda ids: plain(ids).logits, windows), scored_tokens(windows)


class Quantised(NamedTuple):
    """A folder that the command `quantise` has written, and the result that it has printed."""

    folder: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def fp8(bundled_model_path: Path, text: str, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """The command's engines are eager here: compiled ones take long to compile."""
    folder = tmp_path_factory.mktemp("quantised")
    (folder / "text").write_text(text)
    command = ["quantise", str(bundled_model_path), str(folder / "fp8"), "--scheme", "fp8", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_engine.llm.LLM", lambda path, **options: LLM(path, **options | {"mode": "eager"}))
        done = CliRunner().invoke(app, [*command, "--text", str(folder / "text"), "--json"])
    assert done.exit_code == 0, done.output
    return Quantised(folder / "fp8", json.loads(done.stdout))


def test_quantise_tells_the_loss_before_and_after(fp8: Quantised, expected: tuple[float, int]) -> None:
    assert fp8.result["num_tokens"] == expected[1]
    assert fp8.result["loss_before"] == pytest.approx(expected[0], abs=1e-4)
    assert 1e-5 < abs(fp8.result["loss_after"] - expected[0]) < 0.05


def test_rows_are_compared_with_float32(text: str, expected: tuple[float, int], fp8: Quantised) -> None:
    """All engines are eager here: the compiled bundled model's loss is that of test_cache_format_loss.py."""
    chosen: dict[str, Any] = {BASE: VARIANTS[BASE], "fp8": {"model": str(fp8.folder)}}
    options = {"device": "cpu", "progress": False, "mode": "eager"}
    result = compare_losses(None, text, options, SilentProgress(), chosen)
    base, quantised = result["rows"]
    assert result["num_tokens"] == expected[1]
    assert base == {"name": BASE, "loss": pytest.approx(expected[0], abs=1e-4)}
    assert quantised["loss"] == pytest.approx(fp8.result["loss_after"], abs=1e-4)
    assert quantised["difference"] == pytest.approx(quantised["loss"] - base["loss"])
    assert 1e-5 < quantised["divergence"]["mean"] < quantised["divergence"]["p99"] < 0.2
    assert 0.9 < quantised["same_best"] < 1
    assert loss_table(result).row_count == 2
    with pytest.raises(ValueError, match="text must have at least two tokens, got 1"):
        compare_losses(None, "a", options, SilentProgress(), chosen)


def test_a_written_checkpoint_is_compared_with_its_model(bundled_model_path: Path, text: str, tmp_path: Path) -> None:
    """Beside bfloat16. A model with other tokens is refused."""
    command = ["quantise", str(bundled_model_path), str(tmp_path / "int4"), "--scheme", "int4"]
    assert CliRunner().invoke(app, command).exit_code == 0
    eager = {"device": "cpu", "progress": False, "mode": "eager"}
    rows = compare_losses(None, text[:600], eager, SilentProgress(), with_folder(str(tmp_path / "int4")))["rows"]
    assert [row["name"] for row in rows] == [BASE, "bfloat16", str(tmp_path / "int4")]
    assert 0 < rows[1]["divergence"]["mean"] < 1e-3 < rows[2]["divergence"]["mean"] < 0.2
    make_checkpoint(tmp_path / "other", "qwen3", vocab_size=5000)
    shutil.copy(bundled_model_path / "tokenizer.json", tmp_path / "other")
    with pytest.raises(ValueError, match="other has other tokens than the model; allowed: a checkpoint made of"):
        compare_losses(None, text[:600], eager, SilentProgress(), with_folder(str(tmp_path / "other")))


def test_a_wrong_checkpoint_is_told_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_engine.bench.held_out_loss.LLM", None)
    run = CliRunner().invoke(app, ["bench", "loss", "--quantised", "/nowhere", "--device", "cpu"])
    assert run.exit_code == 2
    assert "got '/nowhere', which is neither" in " ".join(run.output.split())
