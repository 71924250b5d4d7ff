"""Folders with a tokenizer, of the kinds that checkpoints have: files alone, as the hub holds them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_tokenizers import bert, byte_fallback, byte_level, metaspace, with_bos, word_piece
from tokenizers import Tokenizer as Backend

BACKENDS = {
    "byte_level": byte_level,
    "with_bos": with_bos,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "bert": bert,
}
BOS = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
TYPED = {"__type": "AddedToken", "content": "<|user|>", "lstrip": True, "rstrip": False, "single_word": False}


@dataclass(frozen=True)
class Folder:
    """The content of a folder with a tokenizer's files."""

    kind: str  # a key of BACKENDS
    tokenizer_class: str | None = "PreTrainedTokenizerFast"
    model_type: str | None = "llama"  # None: no config.json
    config: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # of tokenizer.json
    lists_added_tokens: bool = False
    special_tokens_map: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        backend: Backend = BACKENDS[self.kind]().hf.backend_tokenizer
        content = json.loads(backend.to_str()) | self.changes
        (path / "tokenizer.json").write_text(json.dumps(content))
        config: dict[str, Any] = {"eos_token": "</s>"} | self.config
        if self.tokenizer_class is not None:
            config["tokenizer_class"] = self.tokenizer_class
        if self.lists_added_tokens:
            config["added_tokens_decoder"] = {
                str(token["id"]): {name: value for name, value in token.items() if name != "id"}
                for token in content["added_tokens"]
            }
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        if self.special_tokens_map:
            (path / "special_tokens_map.json").write_text(json.dumps(self.special_tokens_map))
        if self.model_type is not None:
            (path / "config.json").write_text(json.dumps({"model_type": self.model_type}))
        return path


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    **{"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": None},
    **{"pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"},
}
CASED = {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}
# Those that are read without transformers.
FOLDERS = {
    "llama 3": Folder("with_bos", config=BOS, lists_added_tokens=True),
    "llama 3, by its older class": Folder("with_bos", "LlamaTokenizer"),
    "qwen 3": Folder("byte_level", "Qwen2Tokenizer", "qwen3", lists_added_tokens=True),
    "qwen 3, nothing said": Folder("byte_level", None, "qwen3", {"unk_token": None, "add_prefix_space": True}),
    "qwen 2, whatever it says": Folder("byte_level", "PreTrainedTokenizerFast", "qwen2"),
    "qwen, of sentencepiece": Folder("byte_fallback", "Qwen2TokenizerFast", "qwen3"),
    "llama 2": Folder("byte_fallback", "LlamaTokenizer", config=BOS, lists_added_tokens=True),
    "llama 2, legacy": Folder("byte_fallback", "LlamaTokenizerFast", config=BOS | {"legacy": True}),
    "llama 2, no prefix": Folder("byte_fallback", "LlamaTokenizer", config={"add_prefix_space": False}),
    "llama 2, no config.json": Folder("byte_fallback", "LlamaTokenizer", None),
    "mistral": Folder("byte_fallback", "LlamaTokenizer", "mistral", BOS),
    "metaspace": Folder("metaspace", config=BOS),
    "word piece": Folder("word_piece", config={"clean_up_tokenization_spaces": True, "unk_token": "[UNK]"}),
    "bert": Folder("bert", "BertTokenizer", "bert", {"unk_token": "[UNK]", "model_max_length": 512}),
    "bert, cased": Folder("bert", "BertTokenizerFast", "bert", CASED, lists_added_tokens=True),
    "bert, other tokens": Folder("bert", "BertTokenizer", "bert", {"cls_token": "</s>", "sep_token": TYPED}),
    "an older file": Folder(
        "bert",
        "BertTokenizer",
        "bert",
        {"cls_token": "</s>", "mask_token": "<new>"},
        special_tokens_map={"cls_token": {"content": "[CLS]", "lstrip": False}, "pad_token": "[PAD]"},
    ),
    "an older file of another kind": Folder("with_bos", special_tokens_map={"bos_token": "<s>", "pad_token": "<pad>"}),
    "nothing said": Folder("byte_level", None, None),
    "tokens of its own": Folder(
        "byte_level",
        config={
            "bos_token": "<begin>",
            "pad_token": "hello",
            "image_token": "<image>",
            "additional_special_tokens": ["<one>", TYPED],
        },
    ),
    "named tokens": Folder("byte_level", config={"extra_special_tokens": {"tool_token": "<tool>", "x": "<x>"}}),
    "special tokens are split": Folder("byte_level", config={"split_special_tokens": True}),
    "cut and padded": Folder("byte_level", changes={"truncation": TRUNCATION, "padding": PADDING}),
}
