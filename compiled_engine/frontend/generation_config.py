"""Reads default sampling parameters from the checkpoint's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_engine.frontend.tokenizer import read_json_if_there
from compiled_engine.sampling.params import SamplingParams

# Name in generation_config.json -> field of SamplingParams.
FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_default_sampling_params(model_path: Path, generation_config: str) -> SamplingParams:
    """Return the sampling defaults of generation_config.json, or SamplingParams() if `generation_config` is "none".

    Fields that the file lacks keep the defaults of SamplingParams; `do_sample: false` means greedy. Raises ValueError
    with the file's path for an unusable value.
    """
    if generation_config == "none":
        return SamplingParams()
    path = model_path / "generation_config.json"
    stated = read_json_if_there(path)
    values: dict[str, Any] = {field: stated[name] for name, field in FIELDS.items() if stated.get(name) is not None}
    if stated.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {error}; generation_config='none' leaves the file out") from error
