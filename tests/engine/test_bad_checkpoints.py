"""A file of a checkpoint that is not what its name says is named, before anything is compiled or loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiled_engine.llm import LLM

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 10414000\n"
IS_POINTER = "{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"


@pytest.fixture
def checkpoint(tmp_path: Path, bundled_model_path: Path) -> Path:
    """A copy of the bundled model; its weights, which nothing should read, are a link."""
    for name in FILES:
        if name == "model.safetensors":
            (tmp_path / name).symlink_to(bundled_model_path / name)
        else:
            shutil.copy(bundled_model_path / name, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no engine: a fault of a file is found before the start, a fault of the vocabulary in parallel to it."""
    core = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("compiled_engine.llm_parts.start_cores", lambda *_: core)


def assert_refused(checkpoint: Path, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        LLM(checkpoint, device="cpu", mode="eager", progress=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_a_git_lfs_pointer_is_called_one(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).write_text(POINTER)
    assert_refused(checkpoint, IS_POINTER.format(file=checkpoint / name))


def test_one_shard_of_several_is_a_pointer(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model-2.safetensors").write_text(POINTER)
    assert_refused(checkpoint, IS_POINTER.format(file=checkpoint / "model-2.safetensors"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "", "tokenizer.json is damaged, it is not JSON: it is empty"),
        ("tokenizer.json", '{"version": ', "tokenizer.json is damaged, it is not JSON: "),
        ("tokenizer.json", "<html></html>", "tokenizer.json is damaged, it is not JSON: "),
        ("tokenizer.json", "[1]", "tokenizer.json must hold a JSON object, got a list"),
        ("tokenizer.json", "{}", "tokenizer.json: the field model is missing"),
        ("tokenizer_config.json", " \n", "tokenizer_config.json is damaged, it is not JSON: it is empty"),
        ("config.json", "", "config.json is damaged, it is not JSON: it is empty"),
        ("config.json", "hello", "config.json is damaged, it is not JSON: "),
        ("config.json", "[]", "config.json must hold a JSON object, got a list"),
        ("config.json", "{}", "config.json: the field architectures is missing"),
        ("config.json", '{"architectures": ["Qwen3ForCausalLM"]}', "config.json: the field "),
        ("generation_config.json", "", "generation_config.json is damaged, it is not JSON: it is empty"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, message: str, checkpoint: Path) -> None:
    (checkpoint / name).write_text(text)
    assert_refused(checkpoint, f"{checkpoint}/{message}")


@pytest.mark.parametrize(
    ("name", "message"), [("adapter_config.json", "merge it into its base model first"), ("a.gguf", "holds GGUF files")]
)
def test_a_folder_that_is_no_checkpoint_is_called_what_it_is(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert_refused(tmp_path, message)
