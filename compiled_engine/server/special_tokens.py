"""Special tokens within a user's text are text: only those that the chat template writes are tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.server.errors import bad_request

# Code points that no text has: one of them is put into special tokens that come from the user.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class SpecialTokenGuard:
    """Renders conversations so that no text in them becomes a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = {tokenizer.decode([token_id]): token_id for token_id in tokenizer.special_ids}
        self._ids = {text: token_id for text, token_id in ids.items() if len(text) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def literal(self, text: str) -> str:
        """A text as a grammar in Lark has it: a special token by its id, any other in quotes."""
        token_id = self._ids.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def is_special(self, text: str) -> bool:
        """Whether it is that of a special token."""
        return text in self._ids

    def concerns(self, values: Any) -> bool:
        """Whether a special token stands in any text of these lists, dicts and strings."""
        return any(self._special.search(text) for text in _texts(values))

    def render(self, values: Any, render: Callable[[Any], str]) -> tuple[str, tuple[int, ...]]:
        """The text that `render` makes of the values, and its token ids."""
        joined = "".join(_texts(values))
        mark = next((each for each in NONCHARACTERS if each not in joined), None)
        if mark is None:
            raise bad_request("messages", "messages must not hold every code point from U+FDD0 to U+FDEF")

        def marked(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        text = render(_mapped(values, lambda each: self._special.sub(marked, each)))
        ids: list[int] = []
        place = 0
        for match in self._special.finditer(text):
            ids += self._tokenizer.encode_as_text(text[place : match.start()].replace(mark, ""))
            ids.append(self._ids[match[0]])
            place = match.end()
        ids += self._tokenizer.encode_as_text(text[place:].replace(mark, ""))
        return text.replace(mark, ""), tuple(ids)


def _texts(values: Any) -> list[str]:
    """Every string in lists and dicts, keys included."""
    if isinstance(values, str):
        return [values]
    if isinstance(values, Mapping):
        return [text for key, value in values.items() for text in (str(key), *_texts(value))]
    if isinstance(values, list | tuple):
        return [text for value in values for text in _texts(value)]
    return []


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {change(str(key)): _mapped(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_mapped(value, change) for value in values]
    return values
