"""Options of speech models: limits of clips, and what is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from speech_models import LENGTH, save_config

from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

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
