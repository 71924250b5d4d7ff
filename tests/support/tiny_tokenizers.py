"""Small tokenizers of the kinds that checkpoints have, made in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from compiled_engine.frontend.tokenizer import Tokenizer

TEXTS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n    return a + b",
    "naïve café über 你好世界 😀",
]
SPECIALS = ["<s>", "</s>", "<|user|>"]
WORDS = ["hello", "world", "the", "a", "b", "##s", "##ing", ",", ".", "'", "do", "n't"]


def wrap(backend: Backend, **special_tokens: str) -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **special_tokens)
    return Tokenizer.of_transformers(hf)


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen: tokens are bytes, also parts of characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([AddedToken("<tool>"), AddedToken("two words")])
    return wrap(backend)


@cache
def with_bos() -> Tokenizer:
    """Return a tokenizer like that of Llama 3, with a token before every text."""
    backend = Backend.from_str(byte_level().hf.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return wrap(backend)


@cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral.

    A space is part of a token; unknown characters are runs of byte tokens.
    """
    pieces = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁hello", "▁a"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "h", "e", "l", "o", "a", "."])}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return wrap(backend)


@cache
def metaspace() -> Tokenizer:
    """Return a tokenizer like SentencePiece's Unigram models: a first token loses its space."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return wrap(backend)


@cache
def word_piece() -> Tokenizer:
    """Return a tokenizer like BERT's: a space before every token that does not continue a word."""
    vocabulary = {piece: index for index, piece in enumerate([*SPECIALS, "[UNK]", *WORDS])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIALS)
    return wrap(backend)


def bert() -> Tokenizer:
    """Return a WordPiece tokenizer with BERT's special tokens, which joins two texts by a separator."""
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: index for index, piece in enumerate([*SPECIALS, *named, *WORDS])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ids = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ids
    )
    backend.add_special_tokens([*SPECIALS, *named])
    return wrap(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def _train(pre_tokenizer: Any, decoder: Any, special: list[str], alphabet: list[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    texts = [*TEXTS, "<|im_start|>user assistant system [INST] tool"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def like_llama(*, legacy: bool = False) -> Backend:
    """Return a tokenizer like LlamaTokenizer: a space before the first word, byte tokens for unknown characters.

    legacy: also a space before each text after a special token.
    """
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = _train(pre_tokenizers.Metaspace(), decoders.Metaspace(), special, [])
    model: Any = backend.model
    model.unk_token, model.byte_fallback, model.fuse_unk = "<unk>", True, True
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if legacy else "first", split=False)
    described = json.loads(backend.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are tokens like any others
    return Backend.from_str(json.dumps(described))


def like_unigram() -> Backend:
    """Return a tokenizer like SentencePiece's Unigram models: texts of special tokens are usual words of it."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<|>[]/_:,.\n{}\"'"]
    vocabulary = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("<|im_end|>", 0.0),
        *((piece, -9.0) for piece in pieces),
    ]
    backend = Backend(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def like_gpt() -> Backend:
    """Return a byte-level tokenizer that takes words in its vocabulary whole, as Llama 3's does."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<|im_end|>"]
    backend = _train(pre_tokenizer, decoders.ByteLevel(), special, pre_tokenizers.ByteLevel.alphabet())
    model: Any = backend.model
    model.ignore_merges = True
    return backend


def like_bert() -> Backend:
    return Backend.from_str(bert().to_json())


# Raw, for tests that add special tokens of their own.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "gpt": like_gpt,
    "llama": like_llama,
    "llama, legacy": lambda: like_llama(legacy=True),
    "unigram": like_unigram,
    "bert": like_bert,
}
