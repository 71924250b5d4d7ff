"""Transcriptions: tokens are those of transformers' generate; windows, fall-back and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from speech_models import (
    IDS,
    RATE,
    SpeechOracle,
    check_segments,
    random_clip,
    segments_of_generate,
    text_of_generate,
    transcribing_oracle,
)

from compiled_engine import LLM
from compiled_engine.features.speech.frontend.audio import decoded_audio, resampled
from compiled_engine.features.speech.frontend.decoding import Wanted, WindowDecoder
from compiled_engine.features.speech.frontend.quiet_windows import windows_of
from compiled_engine.features.speech.frontend.transcription import Transcription
from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.speech import SpeechRules

OPTIONS: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_blocks": 64,
    "block_size": 4,
    "audio_workers": 1,
    "progress": False,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return transcribing_oracle(tmp_path_factory.mktemp("transcribing"))


@pytest.fixture(scope="module")
def llm(oracle: SpeechOracle) -> Iterator[LLM]:
    with LLM(oracle.folder, **OPTIONS) as made:
        yield made


def said(result: Transcription) -> tuple[Any, ...]:
    """A transcription without its probabilities, whose last bits depend on the batch."""
    return result.text, result.language, result.duration, [(each.start, each.token_ids) for each in result.segments]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("given", [{}, {"language": "de", "task": "translate"}, {"language": "en"}], ids=str)
def test_tokens_are_those_of_generate(oracle: SpeechOracle, llm: LLM, given: dict[str, Any]) -> None:
    for seed in range(3):
        clip = random_clip(seed)
        found = llm.transcribe((clip, RATE), temperature=0.0, **given)
        (segment,) = found.segments
        expected = text_of_generate(oracle, clip, **{"task": "transcribe"} | given)
        assert [token for token in segment.token_ids if token not in IDS.values()] == expected
        assert (segment.start, segment.end, found.duration) == (0.0, 1.0, 1.0)
        if not given:
            with torch.no_grad():
                detected = oracle.model.detect_language(oracle.features(clip))
            assert IDS[f"<|{found.language}|>"] == int(detected[0])


@pytest.mark.usefixtures("one_thread")
def test_long_audio_is_cut_at_quiet_places(llm: LLM) -> None:
    audio = np.concatenate([random_clip(5, 0.9), np.zeros(800, np.float32), random_clip(6, 1.3)])
    found = llm.transcribe((audio, RATE), language="en", temperature=0.0)
    assert [segment.start for segment in found.segments][:2] == [0.0, 0.95]
    assert found.segments[-1].end == found.duration == pytest.approx(len(audio) / RATE)
    for segment in found.segments:  # each is the transcription of its samples alone
        part = audio[round(segment.start * RATE) : round(segment.end * RATE)]
        (alone,) = llm.transcribe((part, RATE), language="en", temperature=0.0).segments
        assert alone.token_ids == segment.token_ids
    assert found.text == "".join(segment.text for segment in found.segments).strip()


@pytest.mark.usefixtures("one_thread")
def test_an_improbable_text_is_decoded_at_the_next_temperature(llm: LLM) -> None:
    """The texts of a random model are improbable."""
    (first,) = llm.transcribe((random_clip(1), RATE), language="en", temperature=0.0).segments
    assert first.avg_logprob < -1.0
    before = llm.metrics()["clips_encoded"]
    (last,) = llm.transcribe((random_clip(1), RATE), language="en", temperature=[0.0, 0.3, 1.0]).segments
    assert last.temperature == 1.0
    assert llm.metrics()["clips_encoded"] == before


@pytest.mark.usefixtures("one_thread")
def test_a_prompt_and_files_are_read(oracle: SpeechOracle, llm: LLM, tmp_path: Path) -> None:
    clip = random_clip(2)
    plain = llm.transcribe((clip, RATE), language="en", temperature=0.0)
    prompted = llm.transcribe((clip, RATE), language="en", temperature=0.0, prompt="names")
    assert prompted.segments[0].token_ids != plain.segments[0].token_ids
    path = tmp_path / "clip.wav"
    soundfile.write(path, clip, RATE, subtype="FLOAT")
    for given in (path, str(path), path.read_bytes()):
        assert said(llm.transcribe(given, language="en", temperature=0.0)) == said(plain)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("seconds", "given", "prompt"),
    [
        (0.4, {"language": "en"}, None),
        (1.0, {"language": "de", "task": "translate"}, None),
        (2.5, {}, None),
        (2.5, {"language": "de"}, "names"),
    ],
    ids=str,
)
def test_timed_segments_are_those_of_generate(
    oracle: SpeechOracle, llm: LLM, seconds: float, given: dict[str, Any], prompt: str | None
) -> None:
    """A clip has one second: audio that is shorter, as long, and longer."""
    clip, theirs = random_clip(len(given) + 7, seconds), {"task": "transcribe"} | given
    if prompt is not None:
        theirs["prompt_ids"] = torch.tensor([IDS["<|startofprev|>"], *llm.get_tokenizer().encode(f" {prompt}")])
    found = llm.transcribe((clip, RATE), **given, prompt=prompt, temperature=0.0, timestamps=True)
    check_segments(found.segments, segments_of_generate(oracle, clip, **theirs), seconds)
    assert len(found.segments) > 2 or seconds < 2
    assert all(0 <= each.seek <= 100 * each.start + 1e-9 for each in found.segments)
    assert not any("<|" in each.text for each in found.segments)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"language": "xx"}, "language is 'xx'; allowed: de, en"),
        ({"task": "sing"}, "task is 'sing'; allowed: transcribe, translate"),
        ({"temperature": 3}, "temperature is 3; allowed: a number from 0 to 2"),
        ({"temperature": []}, "temperature is"),
        ({"audio": b"text"}, "it is no audio file"),
    ],
    ids=str,
)
def test_bad_input_is_refused(llm: LLM, given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        llm.transcribe(**{"audio": (random_clip(0), RATE)} | given)


@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (8_000, 16_000), (48_000, 16_000), (16_000, 16_000)])
def test_samples_at_another_rate_are_the_same_sound(rate: int, wanted: int) -> None:
    def tone(rate: int) -> np.ndarray:
        times = np.arange(rate) / rate
        return (np.sin(2 * np.pi * 440 * times) * np.hanning(rate)).astype(np.float32)

    found = resampled(tone(rate), rate, wanted)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, tone(wanted), atol=2e-3)


def test_long_audio_at_another_rate_has_no_seams() -> None:
    """Pieces of a minute are converted one after the other."""
    rate, wanted, seconds = 1_000, 1_600, 130.5
    times, expected_times = (np.arange(round(seconds * each)) / each for each in (rate, wanted))
    found = resampled(np.sin(700 * times).astype(np.float32), rate, wanted)
    assert len(found) == len(expected_times)
    inner = slice(wanted, -wanted)
    np.testing.assert_allclose(found[inner], np.sin(700 * expected_times)[inner], atol=2e-3)


def test_channels_are_averaged_and_long_files_refused() -> None:
    left, right = random_clip(1, 0.1), random_clip(2, 0.1)
    file = io.BytesIO()
    soundfile.write(file, np.stack([left, right], 1), RATE, format="FLAC")
    samples, rate = decoded_audio(file.getvalue(), 1.0)
    assert rate == RATE
    np.testing.assert_allclose(samples, (left + right) / 2, atol=1e-3)
    with pytest.raises(ValueError, match=r"has 0\.1 s; allowed: more than 0, at most 0\.05"):
        decoded_audio(file.getvalue(), 0.05)


def test_windows_cover_the_audio_once() -> None:
    samples = random_clip(4, 3.3)
    windows = windows_of(samples, RATE, 1.0)
    assert np.array_equal(np.concatenate([window.samples_N for window in windows]), samples)
    assert all(0 < len(window.samples_N) <= RATE for window in windows)
    starts = [round(window.start * RATE) for window in windows]
    assert starts == [sum(len(window.samples_N) for window in windows[:number]) for number in range(len(windows))]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_window_that_does_not_come_to_its_end_is_an_error(reason: str) -> None:
    rules = SpeechRules(1, 9, 2, 50, {"en": 3}, {"transcribe": 4}, (), (), None, None)
    decoder = WindowDecoder(rules, Wanted("en", "transcribe", (), (0.0,), False), lambda token_ids: "")
    failed: Any = SimpleNamespace(outputs=[CompletionOutput(0, "", [], None, None, reason, "logits are NaN")])
    for decoding in (decoder.window(None, "en"), replace(decoder, wanted=Wanted()).language(None)):
        next(decoding)
        with pytest.raises(RuntimeError, match="window of the audio was not transcribed to its end: logits are NaN"):
            decoding.send(failed)
