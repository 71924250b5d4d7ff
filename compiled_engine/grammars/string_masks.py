"""Masks within a string of which nothing but the length is bounded, from the one at its beginning.

What a token takes of the string, and what comes after its end, does not depend on what was written before. So a token
is allowed as long as it was allowed at the beginning, where the string could have ended, and takes no more characters
than there is room for. To find this out by walking all tokens takes long, and each step waits for its longest mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compiled_engine.sampling.token_mask import num_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f]+')
_OF_STRING = re.compile(rb'(?:[^"\\]|\\u[0-9A-Fa-f]{0,4}|\\.)*\\?', re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,4}|.)?", re.DOTALL)
# A string with room for so many characters more than the longest token takes is looked at again when they are written.
_FURTHER = 64


class StringTokens:
    """What the tokens of a vocabulary are within a JSON string.

    lengths: of each token, its characters if it goes on with the string and needs no escape, else 0.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
        self.lengths = [_plain_length(token) for token in tokens]
        taken = [length or _taken(token) for length, token in zip(self.lengths, tokens, strict=True)]
        self._taken_V = np.zeros(32 * num_words(vocab_size), np.int32)
        self._taken_V[: len(taken)] = taken
        self.longest = max(taken)
        self._within: dict[int, np.ndarray] = {}

    def within(self, room: int) -> np.ndarray:
        """A mask of the tokens that take at most so many characters of the string that they begin in."""
        room = min(room, self.longest)
        if room not in self._within:
            self._within[room] = np.packbits(self._taken_V <= room, bitorder="little").view(np.int32)
        return self._within[room]


@dataclass
class _Open:
    """A string that is being written: the mask at its beginning, or since, and how many characters may follow.

    at_least: there may be room for more.
    """

    words_W: np.ndarray
    room: int
    at_least: bool


class StringMasks:
    """Of one request. probe: a character that may come next only in such a string."""

    def __init__(self, tokens: StringTokens, probe: str) -> None:
        self._tokens = tokens
        self._probe = tokens.tokenizer.greedy_tokenize(probe)
        (self._quote,) = tokens.tokenizer.greedy_tokenize('"')
        self._open: _Open | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in what was generated."""
        for token_id in token_ids:
            if self._open is None:
                return
            length = self._tokens.lengths[token_id]
            self._open.room -= length
            if not length or self._open.room < (self._tokens.longest if self._open.at_least else 0):
                self._open = None

    def fill(self, words_W: np.ndarray) -> bool:
        """Write the mask if it is known."""
        if self._open is None:
            return False
        np.bitwise_and(self._open.words_W, self._tokens.within(self._open.room), out=words_W)
        return True

    def note(self, words_W: np.ndarray, matcher: LLMatcher) -> None:
        """Keep a mask that the matcher has made, if it is one of such a string, and the string may end here."""
        word, bit = divmod(self._probe[0], 32)
        if not words_W[word] >> bit & 1 or not matcher.validate_tokens([self._quote]):
            return
        most = self._tokens.longest + _FURTHER
        room = matcher.validate_tokens(self._probe * most) // len(self._probe)
        if room:
            self._open = _Open(words_W.copy(), room, room == most)


def _plain_length(token: bytes) -> int:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if _PLAIN.fullmatch(text) else 0


def _taken(token: bytes) -> int:
    """Characters of the string that a token begins in; one that it begins to write counts."""
    found = _OF_STRING.match(token)
    assert found is not None
    text = _ESCAPE.sub(b"x", found[0])
    return sum(byte & 0xC0 != 0x80 for byte in text)
