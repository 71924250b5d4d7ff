"""A tokenizer read from its files is the one that transformers makes of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import BOS, FOLDERS, TYPED, Folder
from transformers import AutoTokenizer

from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.tokenizer import Tokenizer, load_tokenizer
from compiled_engine.frontend.tokenizer_files import NotReadHere, class_of, read_tokenizer

SPECIAL = [
    "<s>",
    "</s>",
    "<|user|>",
    "<tool>",
    "two words",
    "<image>",
    "<one>",
    "<x>",
    "<begin>",
    "<|endoftext|>",
    "hello",
    "[CLS]",
    "[MASK]",
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, " ", "  ", "\n", "the", "don't", " hello ,", "12345", "é", "é", "好", "😀", "▁"]),
        st.text(max_size=6),
    ),
    max_size=8,
).map("".join)


@cache
def both(name: str) -> tuple[Tokenizer, Any]:
    """The tokenizer of a folder, read here and by transformers."""
    path = FOLDERS[name].write(Path(mkdtemp()))
    read_tokenizer(path)
    return load_tokenizer(path), AutoTokenizer.from_pretrained(str(path), local_files_only=True)


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_texts_have_the_same_tokens(name: str, text: str) -> None:
    tokenizer, hf = both(name)
    for special in (True, False):
        expected = hf(text, add_special_tokens=special)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("bert")])
def test_pairs_are_joined_alike(name: str) -> None:
    tokenizer, hf = both(name)
    texts = ("hello world", "Do the A's")
    pair = tokenizer.join(*(tokenizer.encode(text, add_special_tokens=False) for text in texts))
    expected = hf(*texts)
    assert pair.token_ids == expected["input_ids"]
    assert pair.second == expected["token_type_ids"].index(1)


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_have_the_same_texts(name: str, data: st.DataObject) -> None:
    tokenizer, hf = both(name)
    ids = data.draw(st.lists(st.integers(0, len(hf) + 1), max_size=20))
    assert tokenizer.decode(ids) == hf.decode(ids, clean_up_tokenization_spaces=False)
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        text = detokenizer.push(ids) + detokenizer.flush()
        assert text == hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_facts_of_a_vocabulary_are_the_same(name: str) -> None:
    tokenizer, hf = both(name)
    expected = Tokenizer.of_transformers(hf)
    assert tokenizer.special_ids == expected.special_ids
    assert tokenizer.byte_ids == expected.byte_ids
    assert tokenizer.special_tokens == dict(hf.special_tokens_map)
    assert tokenizer.eos_token_id == hf.eos_token_id
    for index in range(len(hf) + 2):
        assert tokenizer.knows(index) == (hf.convert_ids_to_tokens(index) is not None)
        assert tokenizer.decode_token(index) == expected.decode_token(index)
    assert tokenizer.hf.get_vocab() == hf.get_vocab()


LEFT_TO_TRANSFORMERS: dict[str, tuple[Folder, dict[str, Any], str]] = {
    "another class": (Folder("word_piece", "BertTokenizer", None), {}, "tokenizer_class is BertTokenizer"),
    "another model": (Folder("byte_level", model_type="gpt2"), {}, "with model_type gpt2"),
    "no kind of model": (Folder("byte_level"), {"config.json": {}}, "config.json has no model_type"),
    "a field": (Folder("byte_level", config={"fix_mistral_regex": True}), {}, "has fix_mistral_regex"),
    "older files": (Folder("byte_level"), {"added_tokens.json": {"<new>": 500}}, "but there is added_tokens.json"),
    "a list of older special tokens": (
        Folder("byte_level"),
        {"special_tokens_map.json": {"additional_special_tokens": ["<new>"]}},
        "special_tokens_map.json has more than bos_token",
    ),
    "a vocabulary without the class's tokens": (Folder("word_piece", "BertTokenizer", "bert"), {}, r"lacks \[CLS\]"),
    "not of the kind": (Folder("word_piece", "Qwen2Tokenizer", "qwen3"), {}, "does not match its tokenizer_class"),
    "other added tokens": (
        Folder("byte_fallback", "LlamaTokenizer", config=BOS | {"added_tokens_decoder": {"2": TYPED}}),
        {},
        "does not match its tokenizer_class",
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_TRANSFORMERS)
def test_what_is_left_to_transformers_is_named(name: str, tmp_path: Path) -> None:
    folder, files, why = LEFT_TO_TRANSFORMERS[name]
    folder.write(tmp_path)
    for file, fields in files.items():
        (tmp_path / file).write_text(json.dumps(fields))
    with pytest.raises(NotReadHere, match=why):
        read_tokenizer(tmp_path)
    try:
        hf = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    except Exception:
        with pytest.raises(ValueError, match="tokenizer: cannot load the one in"):
            load_tokenizer(tmp_path)
    else:
        text = "<s>hello world, don't <|user|> é"
        assert load_tokenizer(tmp_path).encode(text) == hf(text)["input_ids"]


def test_a_tokenizer_without_tokenizer_json_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(NotReadHere, match=r"there is no tokenizer\.json"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "declared", "has_byte_level", "expected"),
    [
        ("bert", "BertTokenizer", False, "bert"),
        ("bert", "BertTokenizerFast", False, "bert"),
        ("bert", "PreTrainedTokenizerFast", False, None),
        (None, "BertTokenizer", False, None),
        ("gpt2", "PreTrainedTokenizerFast", True, None),
        ("mistral", "LlamaTokenizer", False, "file"),
        ("qwen2", "LlamaTokenizer", True, "qwen2"),
        ("qwen3", None, True, "qwen2"),
        ("llama", None, True, "file"),
        (None, None, True, "file"),
        ("qwen3", "PreTrainedTokenizerFast", True, "file"),
        ("llama", "TokenizersBackend", False, "file"),
        ("llama", "LlamaTokenizerFast", True, "file"),
        ("llama", "LlamaTokenizerFast", False, "llama"),
        (None, "LlamaTokenizer", False, "llama"),
        ("qwen3", "Qwen2TokenizerFast", True, "qwen2"),
        ("llama", "GPT2Tokenizer", True, None),
    ],
)
def test_the_class_of_a_tokenizer(
    model_type: str | None, declared: str | None, has_byte_level: bool, expected: str | None
) -> None:
    found = class_of(model_type, declared, has_byte_level)
    tokens = {"bert": "[CLS]", "qwen2": "<|endoftext|>", "llama": "<s>"}
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.rebuild is None) == (expected == "file")
    assert expected == "file" or tokens[expected] in found.default_tokens.values()
