"""Write a tokenizer as large as those of current models, for measurements of start-up: byte-level BPE with real merges.

Loading it takes as long as loading a real model's tokenizer with a vocabulary of this size. Tokens are generated rather
than learnt: each merge joins two earlier tokens. As in learnt vocabularies, nearly all tokens are text, not parts of
characters. No corpus is needed, and the result is the same on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# Vocabulary size of the known shapes' checkpoints, without special tokens.
NUM_TOKENS = 151_643
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's pre-tokenizer: contractions, words, single digits, punctuation, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LONGEST_TOKEN = 10
# Characters of tokens: printable ASCII, with a space in byte-level notation.
MERGED = (*map(chr, range(33, 127)), "Ġ")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, num_tokens: int = NUM_TOKENS, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`.

    The vocabulary has num_tokens tokens, single bytes and merges, and then special_tokens.
    """
    vocabulary, merges = _vocabulary(num_tokens)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _vocabulary(num_tokens: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary, token -> id, and the merges.

    The vocabulary has all bytes, then tokens that each join two earlier ones, most often short ones.
    """
    generator = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    parts = list(MERGED)
    while len(tokens) < num_tokens:
        left, right = (parts[int(len(parts) * generator.random() ** 2)] for _ in range(2))
        merged = left + right
        if len(merged) <= LONGEST_TOKEN and merged not in vocabulary:
            vocabulary[merged] = len(tokens)
            tokens.append(merged)
            parts.append(merged)
            merges.append((left, right))
    return vocabulary, merges
