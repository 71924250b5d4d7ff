"""The class that transformers chooses for a tokenizer, and the class's changes of tokenizer.json.

A class of transformers 5 either uses tokenizer.json unchanged, or keeps its vocabulary, merges and post-processor and
replaces normalizer, pre-tokenizer and decoder. This file has the replacements of the supported model families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC

SPLIT_OF_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END_OF_QWEN2 = "<|endoftext|>"
SPACE = "▁"
TAKES_THE_FILE = ("PreTrainedTokenizer", "TokenizersBackend")

Rebuild = Callable[[Tokenizer, Mapping[str, Any]], None]


@dataclass(frozen=True)
class TokenizerClass:
    """`rebuild(tokenizer, config)` gives what was read from tokenizer.json the class's own parts; None changes nothing.

    default_tokens: the class's special tokens by name, where tokenizer_config.json does not name them.
    """

    rebuild: Rebuild | None = None
    default_tokens: Mapping[str, str] = field(default_factory=dict)


def class_of(model_type: str | None, declared: str | None, has_byte_level: bool) -> TokenizerClass | None:
    """The class for a checkpoint; None if this file does not have it.

    model_type: of config.json, None where that file is missing. declared: tokenizer_class of tokenizer_config.json,
    else of config.json. has_byte_level: whether ByteLevel occurs in tokenizer.json.
    """
    takes_the_file = TokenizerClass()
    qwen2 = TokenizerClass(_rebuild_qwen2, dict.fromkeys(("eos_token", "unk_token", "pad_token"), END_OF_QWEN2))
    if model_type not in (None, "llama", "mistral", "qwen2", "qwen3"):
        return None
    if model_type == "mistral":
        return takes_the_file
    if model_type == "qwen2":
        return qwen2
    if declared is None:
        return qwen2 if model_type == "qwen3" else takes_the_file
    name = declared.removesuffix("Fast")
    if name in TAKES_THE_FILE or (name == "LlamaTokenizer" and has_byte_level):
        return takes_the_file
    if name == "LlamaTokenizer":
        return TokenizerClass(_rebuild_llama, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return qwen2 if name == "Qwen2Tokenizer" else None


def can_be_rebuilt(tokenizer: Tokenizer) -> bool:
    """Return whether the model is BPE without word-boundary marks, as the rebuilding classes need."""
    model: Any = tokenizer.model
    return isinstance(model, models.BPE) and not model.continuing_subword_prefix and not model.end_of_word_suffix


def _rebuild_qwen2(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, like_sentencepiece=False)
    prefix_space = bool(config.get("add_prefix_space"))
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_OF_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _rebuild_llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, like_sentencepiece=True)
    given = config.get("add_prefix_space")
    prefix_space = True if given is None else bool(given)
    where = "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, where if prefix_space else "never", split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)


def _set_model(tokenizer: Tokenizer, *, like_sentencepiece: bool) -> None:
    model: Any = tokenizer.model
    model.dropout, model.unk_token, model.ignore_merges = None, None, False
    model.byte_fallback = model.fuse_unk = like_sentencepiece
