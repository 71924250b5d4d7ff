"""Read a call in Python syntax, such as `add(a=1, b="x")`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from compiled_engine.server.parsers.call_object import WHITESPACE, decoded
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Piece

KEY = re.compile(r"[\w.-]+")
# JSON literals that models write.
WORDS = {"true": True, "false": False, "null": None}
# Characters that models write into Python strings, which cannot contain them unescaped.
ESCAPED = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}


class PythonCall:
    """Reads one call whose arguments are named literals, or JSON written as `**{...}`.

    The fields have the same meaning as in `CallObject`. `begun` is set only when the call is complete, since it may
    turn out to be invalid until then.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the names of the tools that may be called."""
        self.begun = self.closed = self.failed = False
        self.raw = ""
        self._names = names
        self._seen = ""  # the name so far
        self._name: str | None = None  # None until its bracket was read
        self._arguments = [""]
        self._depth = 0
        self._quote = ""  # quote of the current string
        self._escaped = False

    def read(self, text: str, index: int, pieces: list[Piece]) -> str:
        for place, character in enumerate(text):
            if self._name is None:
                if not self._in_name(character):
                    self.failed = True
                    return text[place:]
            elif self._ends_with(character):
                arguments = _joined(self._arguments)
                if arguments is None:
                    self.failed = True
                    return text[place:]
                pieces += [CallStart(index, self._name), CallArguments(index, arguments)]
                self.begun = self.closed = True
                return text[place + 1 :]
            self.raw += character
        return ""

    def _in_name(self, character: str) -> bool:
        """Read a character before the opening parenthesis. Return whether it may be part of a name."""
        if character == "(" and self._seen in self._names:
            self._name = self._seen
            return True
        if character in WHITESPACE and not self._seen:
            return True
        self._seen += character
        return any(name.startswith(self._seen) for name in self._names)

    def _ends_with(self, character: str) -> bool:
        """Read a character of the arguments. Return whether it is the call's closing parenthesis."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            elif character in ESCAPED:
                character = ESCAPED[character]
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if self._depth < 0:
                return True
        elif character == "," and not self._depth:
            self._arguments.append("")
            return False
        self._arguments[-1] += character
        return False


def _joined(arguments: list[str]) -> str | None:
    """Return a call's arguments as one JSON object, or None if they are invalid. `arguments`: their Python text."""
    if not arguments[-1].strip():  # no arguments, or a trailing comma
        arguments = arguments[:-1]
    if len(arguments) == 1 and (text := arguments[0].strip()).startswith("**"):
        text = text.removeprefix("**").strip()
        return text if isinstance(decoded(text), dict) else None
    found: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not KEY.fullmatch(key.strip()):
            return None
        try:
            found.setdefault(key.strip(), _value_of(value.strip()))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    try:
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # surrogate pairs, which Python does not join
        return json.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return None
    return text


def _value_of(text: str) -> Any:
    """Return the value of a Python or JSON literal. Raises the errors of `ast.literal_eval` for other text."""
    if text in WORDS:
        return WORDS[text]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes
        return ast.literal_eval(_WithoutWords().visit(ast.parse(text, mode="eval")))


class _WithoutWords(ast.NodeTransformer):
    """Replaces JSON's literals true, false and null with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(WORDS[node.id]), node) if node.id in WORDS else node
