from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_fallback, byte_level

from compiled_engine.frontend.tokenizer import has_tokenizer, load_tokenizer, read_eos_token_ids


def write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    byte_level().hf.save_pretrained(tmp_path)
    assert has_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == byte_level().encode("hello world")
    assert tokenizer.special_ids == byte_level().special_ids == {0, 1, 2}


def test_byte_tokens_are_known() -> None:
    assert sorted(byte_fallback().byte_ids.values()) == list(range(256))
    assert not byte_level().byte_ids


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer must be a folder, and there is none at '.*nowhere'"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer: '.*' has none of tokenizer.json, tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    byte_level().hf.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer: cannot load the one in '.*'"):
        load_tokenizer(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass OwnTokenizer: pass\n")
    write(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    with pytest.raises(ValueError, match="tokenizer: cannot load"):
        load_tokenizer(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {1, 7, 8}),
        ({"eos_token_id": [7, 9]}, {}, {1, 7, 9}),
        ({"eos_token_id": None}, {"eos_token_id": [8]}, {1, 8}),
        (None, None, {1}),
    ],
)
def test_every_end_of_sequence_token_is_found(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None, expected: set[int]
) -> None:
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            write(tmp_path / name, **values)
    assert read_eos_token_ids(tmp_path, byte_level()) == expected
    assert read_eos_token_ids(tmp_path, None) == expected - {1}


@pytest.mark.parametrize("value", ["7", 7.5, [True], {"a": 1}])
def test_an_end_of_sequence_token_that_is_no_integer(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "config.json", eos_token_id=value)
    with pytest.raises(ValueError, match=r"eos_token_id in '.*config.json' must be an integer or a list"):
        read_eos_token_ids(tmp_path, None)
