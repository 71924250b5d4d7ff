"""Source code, graphs and diffs as HTML with syntax colour.

Pygments finds the tokens; only coloured tokens become elements, so that pages with megabytes of source stay small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from html import escape
from itertools import groupby

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Literal, Name, Operator, String, Token, _TokenType

# Token type -> class in the style sheet; a type without an entry has that of its parent.
_CLASSES: dict[_TokenType, str] = {
    Comment: "comment",
    Comment.Preproc: "keyword",
    Comment.PreprocFile: "string",
    Keyword: "keyword",
    Keyword.Type: "type",
    Literal: "number",
    Name.Builtin: "call",
    Name.Builtin.Pseudo: "keyword",
    Name.Class: "call",
    Name.Decorator: "call",
    Name.Function: "call",
    Operator.Word: "keyword",
    String: "string",
    String.Doc: "comment",
    Token: "",
}
# name: dtype[shape] = op(arguments), as passes/graph_text.py writes it; types are missing in a piece's own graph.
_GRAPH_LINE = re.compile(r"(?P<name>\w+)(?P<type>: [^=]+)?(?P<equals> = )(?P<op>[\w.:]+)(?P<rest>.*)", re.DOTALL)


def highlight(text: str, language: str) -> str:
    """HTML for the inside of a <pre>. language: graph, diff (of graphs), or what Pygments calls it: python, c++."""
    if language == "graph":
        return "\n".join(map(_graph_line, text.splitlines()))
    if language == "diff":
        return "".join(map(_diff_line, text.splitlines()))
    tokens = ((_class_of(token), value) for token, value in _lexer(language).get_tokens(text))
    return _html(tokens)


def _html(tokens: Iterable[tuple[str, str]]) -> str:
    """Neighbours of one class share an element."""
    parts = []
    for name, group in groupby(tokens, key=lambda token: token[0]):
        value = escape("".join(value for _, value in group), quote=False)
        parts.append(f'<b class="{name}">{value}</b>' if name else value)
    return "".join(parts)


@cache
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(language, stripnl=False)


@cache
def _class_of(token: _TokenType) -> str:
    while token not in _CLASSES:
        assert token.parent is not None  # Token is the root
        token = token.parent
    return _CLASSES[token]


def _graph_line(line: str) -> str:
    match = _GRAPH_LINE.fullmatch(line)
    if match is None:
        return escape(line, quote=False)
    value = match.groupdict(default="")
    tokens = (("", value["name"]), ("type", value["type"]), ("", value["equals"]), ("call", value["op"]))
    return _html((*tokens, ("", value["rest"])))


def _diff_line(line: str) -> str:
    sign, rest = line[:2], line[2:]
    kind = {"+ ": "added", "- ": "removed"}.get(sign, "kept")
    return f'<span class="{kind}">{sign}{_graph_line(rest)}</span>' if line != "..." else '<span class="gap">⋯</span>'
