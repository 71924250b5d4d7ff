"""Features of clips from samples: those of transformers' extractor, in any batch; other extractors' are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speech_models import RATE, random_clip
from transformers import WhisperFeatureExtractor

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.speech.extras import FEATURES, SAMPLES
from compiled_engine.features.speech.log_mel import ClipFeatures, LogMel, mel_filters
from compiled_engine.models.checkpoint.mel_settings import read_mel_settings
from compiled_engine.speech import MelSettings, SpeechDescription

CPU = torch.device("cpu")
# Of features. A frequency with a ten-thousandth of the loudest amplitude has few right bits in float32.
TOLERANCE = 1e-4
SPEECH = SpeechDescription(80, 3000, 1500, 6, 64)


def extracted(extractor: WhisperFeatureExtractor, clip: np.ndarray) -> torch.Tensor:
    rate = extractor.sampling_rate
    found: torch.Tensor = extractor(clip, sampling_rate=rate, return_tensors="pt")["input_features"][0]
    return found


@pytest.mark.parametrize(("num_bins", "rate", "window"), [(80, 16_000, 400), (128, 16_000, 400), (8, 22_050, 512)])
def test_filters_are_those_of_the_extractor(num_bins: int, rate: int, window: int) -> None:
    extractor = WhisperFeatureExtractor(num_bins, rate, n_fft=window)
    found = mel_filters(MelSettings(rate, rate, window, 160), num_bins)
    np.testing.assert_allclose(found.numpy(), extractor.mel_filters.T, rtol=1e-9, atol=1e-15)


@pytest.mark.usefixtures("one_thread")
@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, RATE), st.floats(1e-6, 100)), min_size=1, max_size=3),
    st.sampled_from([8, 80]),
    st.sampled_from([(400, 160), (256, 100)]),
)
def test_features_are_those_of_the_extractor(
    clips: list[tuple[int, int, float]], num_bins: int, frames: tuple[int, int]
) -> None:
    """Each clip has its own largest logarithm, and is compared alone."""
    window, hop = frames
    extractor = WhisperFeatureExtractor(num_bins, hop_length=hop, chunk_length=1, n_fft=window)
    samples = [random_clip(seed)[:count] * np.float32(factor) for seed, count, factor in clips]
    longest = max(map(len, samples))
    log_mel = LogMel(MelSettings(RATE, RATE, window, hop), num_bins, CPU)
    found_CBT = log_mel(torch.from_numpy(np.stack([np.pad(each, (0, longest - len(each))) for each in samples])))
    for found_BT, clip in zip(found_CBT, samples, strict=True):
        torch.testing.assert_close(found_BT, extracted(extractor, clip), rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("one_thread")
def test_clips_with_samples_and_with_features_keep_their_order() -> None:
    extractor = WhisperFeatureExtractor(8, chunk_length=1)
    log_mel = LogMel(MelSettings(RATE, RATE, 400, 160), 8, CPU)
    clips = [np.zeros(9, np.float32), *(random_clip(seed, seconds) for seed, seconds in ((1, 0.3), (2, 1.0), (3, 0.7)))]
    for sampled in ((0, 2), (1, 3), (0, 1, 2, 3), ()):
        inputs = [
            {SAMPLES: PlainTensor.of(torch.from_numpy(clip))}
            if number in sampled
            else {FEATURES: PlainTensor.of(extracted(extractor, clip))}
            for number, clip in enumerate(clips)
        ]
        found = ClipFeatures(log_mel, torch.bfloat16, CPU).of(inputs)
        assert found.dtype == torch.bfloat16
        expected = torch.stack([extracted(extractor, clip) for clip in clips])
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=TOLERANCE)


def save_settings(folder: Path, **changes: Any) -> None:
    WhisperFeatureExtractor().save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_settings_are_read_from_the_file_that_transformers_prefers(tmp_path: Path) -> None:
    save_settings(tmp_path)
    assert read_mel_settings(tmp_path, SPEECH) == MelSettings(16_000, 480_000, 400, 160)
    nested = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"n_fft": 512}
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": nested}))
    assert read_mel_settings(tmp_path, SPEECH).window == 512
    assert WhisperFeatureExtractor.from_pretrained(tmp_path).n_fft == 512


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"feature_extractor_type": "OwnExtractor"}, "'OwnExtractor' in the checkpoint; allowed: 'WhisperFeature"),
        ({"dither": 0.1}, "dither of the feature extractor is 0.1; allowed: 0.0"),
        ({"padding_value": 1.0}, "padding_value"),
        ({"n_fft": 0}, "n_fft of the feature extractor is 0"),
        ({"hop_length": 7}, "a multiple of hop_length"),
        ({"feature_size": 128}, r"shape \[128, 3000\]; allowed for the model: \[80, 3000\]"),
        ({"chunk_length": 15}, r"shape \[80, 1500\]"),
    ],
    ids=str,
)
def test_settings_of_other_features_are_refused(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    save_settings(tmp_path, **changes)
    with pytest.raises(ValueError, match=error):
        read_mel_settings(tmp_path, SPEECH)
