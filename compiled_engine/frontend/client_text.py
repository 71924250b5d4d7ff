"""Keeps client text from becoming special tokens, which only chat templates may produce."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken

# Unicode noncharacters. One that the client's text lacks serves as the mark.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ClientText:
    """Renders values from clients so that only the template's own special tokens are encoded as special tokens.

    Before rendering, a mark is inserted into each special token in a client's text. The mark shows after rendering that
    this text came from the client. A text that ends with the beginning of a special token is marked too, since the
    template may add the rest of the token.
    """

    def __init__(self, added_tokens: Mapping[int, AddedToken]) -> None:
        """`added_tokens` are the tokenizer's added tokens, by id."""
        added = {token_id: token for token_id, token in added_tokens.items() if token.content}
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        # With a normalizer, other texts may become special tokens too.
        self._any_text = any(token.special and token.normalized for token in added.values())
        self._whole = _pattern([(text, False) for text in self._special])
        self._longest = max(map(len, self._special), default=0)
        # Tokens that begin with a letter are excluded: many words end with their beginnings.
        self._beginnings = {
            text[:end] for text in self._special if not text[0].isalnum() for end in range(1, len(text))
        }
        self._written = _pattern([(token.content, token.single_word) for token in added.values()])

    def concerns(self, values: Any) -> bool:
        """Return whether any text in these nested values may become a special token."""
        return self._any_text or any(
            self._whole.search(text) or self._place_of_end(text) is not None for text in texts_in(values)
        )

    def _place_of_end(self, text: str) -> int | None:
        """Return the start of the longest suffix of the text that is the beginning of a special token, or None."""
        shortest = max(0, len(text) - self._longest)
        return next((place for place in range(shortest, len(text)) if text[place:] in self._beginnings), None)

    def render(self, values: Any, render: Callable[[Any], str]) -> tuple[str, list[str | int]]:
        """Return the text that `render` makes of the values, and its parts.

        The parts are texts, and the ids of the special tokens that the template produced. Raises ValueError if the
        values contain every character that could mark the client's text (NONCHARACTERS).
        """
        joined = "".join(texts_in(values))
        mark = next((each for each in NONCHARACTERS if each not in joined and _escaped(each) not in joined), None)
        if mark is None:
            raise ValueError("texts must not hold every code point from U+FDD0 to U+FDEF")

        def marked(text: str) -> str:
            return self._whole.sub(lambda match: match[0][0] + mark + match[0][1:], text)

        def marked_to_the_end(text: str) -> str:
            text = marked(text)
            place = self._place_of_end(text)
            return text if place is None else text[: place + 1] + mark + text[place + 1 :]

        def plain(text: str) -> str:
            return text.replace(mark, "").replace(_escaped(mark), "")

        text = render(_mapped(values, marked, marked_to_the_end))
        parts: list[str | int] = []
        place = 0
        for match in self._written.finditer(text):
            token_id = self._special.get(match[0])
            is_marked = len(match[0]) == 1 and text.startswith(mark, match.end())
            if token_id is not None and not is_marked:
                parts += [plain(text[place : match.start()]), token_id]
                place = match.end()
        return plain(text), [*parts, plain(text[place:])]


def _pattern(tokens: list[tuple[str, bool]]) -> re.Pattern[str]:
    """Return the pattern by which a tokenizer matches added tokens.

    tokens: the text of each token, and whether it is only matched as a whole word (`single_word`).
    """
    longest_first = sorted(tokens, key=lambda token: len(token[0]), reverse=True)
    found = [rf"(?<!\w){re.escape(text)}(?!\w)" if word else re.escape(text) for text, word in longest_first]
    return re.compile("|".join(found) or r"(?!)")


def _escaped(character: str) -> str:
    """Return a character in the escaped form that ASCII JSON and Python's repr use."""
    return f"\\u{ord(character):04x}"


def texts_in(values: Any) -> list[str]:
    """Return every string in nested lists and dicts, keys included."""
    if isinstance(values, str):
        return [values]
    if isinstance(values, Mapping):
        return [text for key, value in values.items() for text in (str(key), *texts_in(value))]
    if isinstance(values, list | tuple):
        return [text for value in values for text in texts_in(value)]
    return []


def _mapped(values: Any, of_key: Callable[[str], str], of_value: Callable[[str], str]) -> Any:
    if isinstance(values, str):
        return of_value(values)
    if isinstance(values, Mapping):
        return {of_key(str(key)): _mapped(value, of_key, of_value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_mapped(value, of_key, of_value) for value in values]
    return values
