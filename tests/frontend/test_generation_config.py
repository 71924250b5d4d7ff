from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.frontend.generation_config import read_default_sampling_params
from compiled_engine.sampling.params import SamplingParams


def defaults(folder: Path, generation_config: str = "auto", **values: Any) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_default_sampling_params(folder, generation_config)


def test_every_default_is_taken(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    params = defaults(tmp_path, do_sample=True, max_new_tokens=99, eos_token_id=1, **stated)
    assert params == SamplingParams(max_tokens=99, **stated)


def test_null_is_not_a_default(tmp_path: Path) -> None:
    assert defaults(tmp_path, temperature=None, top_k=None) == SamplingParams()


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    assert defaults(tmp_path, do_sample=False, temperature=0.6).greedy


def test_none_leaves_the_file_out(tmp_path: Path) -> None:
    assert defaults(tmp_path, "none", temperature=0.6) == SamplingParams()


def test_without_the_file(tmp_path: Path) -> None:
    assert read_default_sampling_params(tmp_path, "auto") == SamplingParams()


def test_a_value_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"generation_config.json': top_p must be .* got 7.0; generation_config='none'"
    ):
        defaults(tmp_path, top_p=7.0)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json is damaged, it is not JSON"):
        read_default_sampling_params(tmp_path, "auto")
