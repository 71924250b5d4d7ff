"""Options of speech models: limits of clips, and what is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from speech_models import LENGTH, MELS, RATE, SECONDS, save_config
from transformers import WhisperFeatureExtractor

from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.speech import most_slots
from compiled_engine.speech import MelSettings

OPTIONS: dict[str, Any] = {"device": "cpu", "mode": "eager", "load_format": "dummy", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize(
    ("options", "num_slots", "step_clips"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 120}, 4, 2),
        ({"max_num_seqs": 64}, 32, 32),
        ({"encoder_cache_size": 3 * LENGTH + 7}, 3, 3),
        ({"encoder_cache_size": 3 * LENGTH, "max_num_encoder_input_tokens": LENGTH}, 3, 1),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 8}, 4, 1),
    ],
)
def test_limits_of_clips(folder: Path, options: dict[str, Any], num_slots: int, step_clips: int) -> None:
    found = resolve(EngineOptions(model=folder, **OPTIONS | options)).speech
    assert found is not None
    assert (found.num_slots, found.step_clips) == (num_slots, step_clips)


def test_a_gpu_has_slots_for_as_many_clips_as_fit_into_its_share(folder: Path) -> None:
    model = resolve(EngineOptions(model=folder, **OPTIONS)).model
    turbo = replace(model, num_layers=4, num_kv_heads=20, head_dim=64, dtype=torch.bfloat16)
    assert model.speech is not None
    speech = replace(model.speech, length=1500)
    assert most_slots(turbo, speech, torch.device("cpu")) == 32
    assert most_slots(turbo, speech, torch.device("cuda", 0)) == (2 << 30) // (2 * 4 * 1500 * 1280 * 2)
    assert most_slots(replace(turbo, num_layers=32), speech, torch.device("cuda", 0)) == 32


def test_where_features_are_computed(tmp_path: Path) -> None:
    save_config(tmp_path)

    def found(asked: str) -> MelSettings | None:
        config = resolve(EngineOptions(model=tmp_path, **OPTIONS, audio_features=asked))
        assert config.speech is not None
        return config.speech.mel

    with pytest.raises(ValueError, match=r"audio_features is 'device', but .*preprocessor_config.json is missing"):
        found("device")
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS).save_pretrained(tmp_path)
    assert found("device") == MelSettings(RATE, RATE * SECONDS, 400, 160)
    assert found("workers") is None
    assert found("auto") is None  # on a CPU


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"encoder_cache_size": LENGTH - 1}, f"encoder_cache_size is 49; allowed: at least {LENGTH}"),
        ({"max_num_encoder_input_tokens": 1}, f"max_num_encoder_input_tokens is 1; allowed: at least {LENGTH}"),
        ({"enable_lora": True}, "enable_lora"),
        ({"language_model_only": True}, "language_model_only"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_config": {"method": "eagle3", "model": "x", "num_speculative_tokens": 1}}, "'eagle3', whose"),
    ],
    ids=str,
)
def test_what_a_speech_model_cannot_do_is_refused(folder: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        resolve(EngineOptions(model=folder, **OPTIONS | options))


def test_other_speech_models_are_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "moonshine", "architectures": ["MoonshineForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="MoonshineForConditionalGeneration is a speech model whose encoder"):
        resolve(EngineOptions(model=tmp_path, **OPTIONS))


def test_a_text_model_has_no_clips() -> None:
    options = {"device": "cpu", "mode": "eager", "load_format": "dummy"}
    assert resolve(EngineOptions(model=BUNDLED_MODEL_PATH, **options)).speech is None
    with pytest.raises(ValueError, match="audio_workers"):
        resolve(EngineOptions(model=BUNDLED_MODEL_PATH, **options, audio_workers=2))
    with pytest.raises(ValueError, match="audio_features"):
        resolve(EngineOptions(model=BUNDLED_MODEL_PATH, **options, audio_features="device"))
