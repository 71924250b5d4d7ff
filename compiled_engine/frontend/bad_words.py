"""bad_words as token ids: the forms in which a word may come out of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.frontend.tokenizer import Tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it is at the start of a text, and as it is after a space if that differs.

    As in vLLM the form after a space counts only if it has as many tokens: otherwise it begins with a token
    for the space alone, and the sequence to forbid is the first form again.

    Raises ValueError, naming the word, if it has no tokens.
    """
    encoded: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        if not plain:
            raise ValueError(f"bad_words[{index}] must have a token after leading spaces and line ends, got {word!r}")
        encoded.append(plain)
        spaced = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            encoded.append(spaced)
    return tuple(encoded)
