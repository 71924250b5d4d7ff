"""A voice's signal, from a file, through features and windows of 30 seconds, to segments and subtitles.

Needs the package espeakng-loader (GPL, 20 MB), which the extra "test" leaves out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from speech_models import RATE, check_segments, segments_of_generate, transcribing_oracle

from compiled_engine import LLM
from compiled_engine.features.speech.frontend.audio import resampled
from compiled_engine.features.speech.frontend.formats import FORMATS

pytest.importorskip("espeakng_loader", reason="needs espeakng-loader")

TEXT = (
    "The captain read the letter twice, folded it, and put it back into his coat. Nobody spoke. "
    "Outside, rain ran down the windows, and the last boat had left an hour ago. "
)


@pytest.mark.usefixtures("one_thread")
def test_a_voice_of_75_seconds(tmp_path: Path) -> None:
    from voice import spoken

    samples, rate = spoken(TEXT * 8)
    samples = samples[: 75 * rate]
    assert len(samples) == 75 * rate
    assert 200 < np.abs(samples.astype(np.float32)).mean() < 8000
    file = tmp_path / "voice.flac"
    soundfile.write(file, samples, rate)
    oracle = transcribing_oracle(tmp_path / "model", seconds=30)
    options = {"mode": "eager", "device": "cpu", "num_blocks": 64, "block_size": 4, "audio_workers": 1}
    with LLM(oracle.folder, **options, progress=False) as llm:
        found = llm.transcribe(file, language="en", temperature=0.0, timestamps=True)
        windows = llm.transcribe(file, language="en", temperature=0.0)
    signal = resampled((samples / 32768).astype(np.float32), rate, RATE)
    expected = segments_of_generate(oracle, signal, language="en", task="transcribe")
    check_segments(found.segments, expected, 75.0)
    assert found.duration == 75.0
    assert len({each.seek for each in found.segments}) >= 3
    assert len(windows.segments) == 3
    assert windows.segments[0].seek == 0
    for each in windows.segments[:-1]:  # between two sentences, or words
        border = round(each.end * rate)
        assert np.abs(samples[border - rate // 20 : border].astype(np.float32)).mean() < 200
    assert FORMATS["srt"](found, "transcribe").count(" --> ") == sum(bool(each.text.strip()) for each in found.segments)
