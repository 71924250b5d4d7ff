"""Which starts are known to find all their kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.config import EngineConfig
from compiled_engine.engine.warm_up import stamp_of_start, write_stamp
from compiled_engine.kernels.cache_folder import damaged_kernels, kernel_folder
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve


def config_of(**options: Any) -> EngineConfig:
    return resolve(EngineOptions(**{"device": "cpu", "max_model_len": 64} | options))


def ngrams(count: int = 3, **options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": count} | options}


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    folder = kernel_folder(tmp_path)
    assert folder is not None
    return folder


def test_only_a_start_like_one_that_ended_well_is_known(kernels: Path) -> None:
    stamp = stamp_of_start(kernels, "entry", config_of())
    assert not stamp.exists()
    write_stamp(stamp)
    write_stamp(stamp)
    elsewhere = replace(config_of(), model=replace(config_of().model, path=Path("/elsewhere")), reasons={})
    assert stamp_of_start(kernels, "entry", elsewhere).exists()
    sizes = config_of(max_num_seqs=3, num_blocks=77, gpu_memory_utilization=0.5)
    assert stamp_of_start(kernels, "entry", sizes).exists()  # they choose few kernels, if any
    assert not stamp_of_start(kernels, "entry", config_of(), share=1).exists()
    assert not stamp_of_start(kernels, "other", config_of()).exists()
    assert [path.stat().st_mode & 0o077 for path in kernels.iterdir()] == [0]
    stamp.unlink()
    assert not stamp_of_start(kernels, "entry", config_of()).exists()


@pytest.mark.parametrize(
    "options",
    [
        ngrams(),
        ngrams(4),
        ngrams(enable_adaptive_verification=True),
        {"block_size": 64},
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_other_options_are_another_start(options: dict[str, Any], kernels: Path) -> None:
    """Their compiled model may be the same."""
    for known in (config_of(), config_of(**ngrams(5))):
        write_stamp(stamp_of_start(kernels, "entry", known))
    assert not stamp_of_start(kernels, "entry", config_of(**options)).exists()
    write_stamp(stamp_of_start(kernels, "entry", config_of(**options)))
    assert stamp_of_start(kernels, "entry", config_of(**options)).exists()


def test_tuned_tiles_are_another_start(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stamp(stamp_of_start(kernels, "entry", config_of()))
    monkeypatch.setenv("COMPILED_ENGINE_DEVICE_PROFILES", str(tmp_path))
    (tmp_path / "a_device.json").write_text("{}")
    assert not stamp_of_start(kernels, "entry", config_of()).exists()


def test_a_mark_that_cannot_be_left_is_no_error_and_no_mark_is_a_damaged_kernel(kernels: Path, tmp_path: Path) -> None:
    stamp = stamp_of_start(kernels, "entry", config_of())
    write_stamp(stamp)
    assert damaged_kernels(tmp_path) == []
    write_stamp(tmp_path / "missing" / stamp.name)
