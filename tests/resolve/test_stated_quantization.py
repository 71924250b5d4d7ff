"""The name of a checkpoint's format as `quantization`: it says what is the case, or is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from quantised_checkpoints import LAYOUTS

from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve

STATED: dict[str, dict[str, Any]] = {
    "compressed-tensors": LAYOUTS["compressed-tensors, channel and token"].config(["lm_head"]),
    "modelopt": LAYOUTS["modelopt"].config(["lm_head"]),
    "fp8": LAYOUTS["fp8, tensor"].config(["lm_head"]),
}
FORMATS = ("compressed-tensors", "modelopt", "mxfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, "llama")
    return path


def method(folder: Path, quantization: str | None) -> str | None:
    options = {"model": folder, "device": "cpu", "load_format": "dummy", "quantization": quantization}
    quantisation = resolve(make_options(options)).model.quantisation
    return None if quantisation is None else quantisation.method


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_checkpoint_has_no_format(folder: Path, name: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"quantization is '{name}', but .* is not quantised; allowed: None, or fp8, fp8_block or int4,",
    ):
        method(folder, name)


@pytest.mark.parametrize("stated", STATED)
def test_a_quantised_checkpoint_has_its_own(folder: Path, stated: str, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": STATED[stated]}))
    assert method(tmp_path, None) == method(tmp_path, stated) == stated
    for name in {*FORMATS, "fp8_block"} - {stated}:
        with pytest.raises(ValueError, match=f"quantization is '{name}', but .* quantised already, with {stated}"):
            method(tmp_path, name)
