"""Reads the settings of a checkpoint's feature extractor, and checks that the engine can compute its features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.speech import MelSettings, SpeechDescription

EXTRACTOR = "WhisperFeatureExtractor"
# Files with the settings: WHOLE_FILE has them among the settings of the whole processor, under one of WHOLE_NAMES;
# SETTINGS_FILE has only them.
WHOLE_FILE, SETTINGS_FILE = "processor_config.json", "preprocessor_config.json"
WHOLE_NAMES = ("feature_extractor", "audio_processor")
# transformers' defaults of the extractor's fields, which the file may leave out.
DEFAULTS = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
ZERO = ("dither", "padding_value")  # noise, and padding other than silence, are left to the extractor


def read_mel_settings(folder: Path, speech: SpeechDescription) -> MelSettings:
    """Return the settings of the feature extractor of the checkpoint in `folder`.

    speech: states the shape of the features that the encoder reads. Raises ValueError with the reason if the extractor
    computes features that `features/speech/log_mel.py` does not compute, or features of another shape.
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
    """Return the extractor's settings as JSON values.

    They are in processor_config.json or, if it has none, in preprocessor_config.json. Raises ValueError if there is no
    such file.
    """
    path = folder / WHOLE_FILE
    if path.is_file():
        whole = JsonFields.from_file(path).values
        if isinstance(nested := next((whole[name] for name in WHOLE_NAMES if name in whole), None), Mapping):
            return nested
    return JsonFields.from_file(folder / SETTINGS_FILE).values
