"""Transcriptions as text, JSON and subtitles, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile
from checkpoints import CONFIGS, TINY
from speech_models import RATE, random_clip, transcribing_oracle
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.features.speech.frontend.formats import FORMATS
from compiled_engine.features.speech.frontend.transcription import Segment, Transcription

SEGMENTS = (
    Segment(0.0, 29.5, " One --> two.", (5, 6), 0.0, -0.25, 1.5, 0),
    Segment(29.5, 31.0, " ", (7,), 0.2, -0.5, 0.5, 0),
    Segment(31.0, 3661.0075, " Three.", (8,), 0.0, -0.125, 1.0, 3100),
)
RESULT = Transcription("One --> two.  Three.", "en", 3661.0075, SEGMENTS)


def test_each_format() -> None:
    made = {name: write(RESULT, "transcribe") for name, write in FORMATS.items()}
    assert made["text"] == "One --> two.  Three.\n"
    assert json.loads(made["json"]) == {"text": RESULT.text}
    whole = json.loads(made["verbose_json"])
    assert (whole["task"], whole["language"], whole["duration"]) == ("transcribe", "en", 3661.0075)
    assert [segment["tokens"] for segment in whole["segments"]] == [[5, 6], [7], [8]]
    assert whole["segments"][1]["start"] == 29.5
    assert [segment["seek"] for segment in whole["segments"]] == [0, 0, 3100]
    times = ("00:00:00,000 --> 00:00:29,500", "00:00:31,000 --> 01:01:01,008")
    assert made["srt"] == f"1\n{times[0]}\nOne -> two.\n\n2\n{times[1]}\nThree.\n\n"
    first, second = (each.replace(",", ".") for each in times)
    assert made["vtt"] == f"WEBVTT\n\n{first}\nOne -> two.\n\n{second}\nThree.\n\n"


@pytest.mark.usefixtures("one_thread")
def test_the_command_prints_files(tmp_path: Path) -> None:
    transcribing_oracle(tmp_path / "model")
    file = tmp_path / "clip.wav"
    soundfile.write(file, random_clip(0), RATE)
    options = [
        "--model",
        str(tmp_path / "model"),
        "--mode",
        "eager",
        "--device",
        "cpu",
        "--num-blocks",
        "64",
        "--quiet",
    ]
    asked = [
        "--format",
        "verbose_json",
        "--language",
        "en",
        "--task",
        "translate",
        "--prompt",
        "a",
        "--temperature",
        "0",
    ]
    run = CliRunner().invoke(app, ["transcribe", *options, *asked, str(file)])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert (found["language"], found["task"]) == ("en", "translate")
    assert found["segments"][0]["temperature"] == 0
    assert found["duration"] == 1.0


def test_the_command_refuses_before_weights_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "clip.wav"
    soundfile.write(file, random_clip(0), RATE)
    speech, text = tmp_path / "speech", tmp_path / "text"
    transcribing_oracle(speech)
    CONFIGS["qwen3"](architectures=["Qwen3ForCausalLM"], **TINY).save_pretrained(text)
    for folder in (speech, text):
        (folder / "model.safetensors").write_bytes(b"cannot be loaded")

    def refused(folder: Path, *options: str) -> str:
        given = ["--model", str(folder), "--device", "cpu", "--mode", "eager", "--quiet", *options]
        run = CliRunner().invoke(app, ["transcribe", *given, str(file)])
        assert run.exit_code == 2
        return run.output.strip()

    assert refused(speech, "--format", "lrc").endswith("--format is 'lrc'; allowed: text, json, verbose_json, srt, vtt")
    assert refused(speech, "--task", "sing").endswith("task is 'sing'; allowed: transcribe, translate")
    assert "language is 'xx'; allowed: " in refused(speech, "--language", "xx")
    assert refused(text).endswith("but the model takes none; allowed: a speech model, such as Whisper")
