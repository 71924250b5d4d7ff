"""Reads the settings of a checkpoint's feature extractor, if the engine can compute its features from samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.speech import MelSettings, SpeechDescription

EXTRACTOR = "WhisperFeatureExtractor"
# Files with the settings: within those of the whole processor, or alone; and their names there.
WHOLE_FILE, SETTINGS_FILE = "processor_config.json", "preprocessor_config.json"
WHOLE_NAMES = ("feature_extractor", "audio_processor")
# Of the extractor, in this version of transformers: defaults of fields that the file may leave out.
DEFAULTS = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
ZERO = ("dither", "padding_value")  # noise, and padding other than silence, are left to the extractor


def read_mel_settings(folder: Path, speech: SpeechDescription) -> MelSettings:
    """Return the settings in a checkpoint's folder.

    Raises ValueError with the reason if the features are not those that `features/speech/log_mel.py` computes, or do
    not have the shape that the encoder reads.
    """
    values = _settings(folder)
    if (kind := values.get("feature_extractor_type")) != EXTRACTOR:
        raise ValueError(f"feature_extractor_type is {kind!r} in the checkpoint; allowed: {EXTRACTOR!r}")
    for name in ZERO:
        if values.get(name, 0.0) != 0.0:
            raise ValueError(f"{name} of the feature extractor is {values[name]!r}; allowed: 0.0")
    sizes = {name: values.get(name, default) for name, default in DEFAULTS.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} of the feature extractor is {size!r}; allowed: a whole number above 0")
    rate, window, hop = sizes["sampling_rate"], sizes["n_fft"], sizes["hop_length"]
    num_samples = sizes["chunk_length"] * rate
    if num_samples % hop or num_samples <= window // 2:
        raise ValueError(
            f"a clip of the feature extractor has {num_samples} samples; allowed: a multiple of hop_length ({hop}), "
            f"and more than half of n_fft ({window})"
        )
    found, wanted = [sizes["feature_size"], num_samples // hop], [speech.num_mel_bins, speech.num_frames]
    if found != wanted:
        raise ValueError(f"the features have the shape {found}; allowed for the model: {wanted}")
    return MelSettings(rate, num_samples, window, hop)


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings from the file that transformers prefers. Raises ValueError if there is none."""
    path = folder / WHOLE_FILE
    if path.is_file():
        whole = JsonFields.from_file(path).values
        if isinstance(nested := next((whole[name] for name in WHOLE_NAMES if name in whole), None), Mapping):
            return nested
    return JsonFields.from_file(folder / SETTINGS_FILE).values
