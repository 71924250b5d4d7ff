"""Renders the inspector's report as a single HTML page without external files or network access."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Literal, Name, Operator, String, Token, _TokenType

from compiled_engine.graphs.inspection.kernels import kernels_of, without_kernel_sources
from compiled_engine.graphs.inspection.report import Report
from compiled_engine.graphs.inspection.sections import facts, sections

# Syntax highlighting of source code, graphs and diffs.
#
# Pygments finds the tokens; only coloured ones become elements, so pages with megabytes of source stay small.

# Token type -> class in the style sheet; types without an entry inherit their parent's.
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
# name: dtype[shape] = op(arguments), as graph_text.py writes it; a piece's own graph has no types.
_GRAPH_LINE = re.compile(r"(?P<name>\w+)(?P<type>: [^=]+)?(?P<equals> = )(?P<op>[\w.:]+)(?P<rest>.*)", re.DOTALL)


def highlight(text: str, language: str) -> str:
    """Return the text as HTML with highlighted syntax, to be put into a <pre> element.

    language: graph, diff (of two graphs), or a language that Pygments knows, such as python or c++.
    """
    if language == "graph":
        return "\n".join(map(_graph_line, text.splitlines()))
    if language == "diff":
        return "".join(map(_diff_line, text.splitlines()))
    tokens = ((_class_of(token), value) for token, value in _lexer(language).get_tokens(text))
    return _html(tokens)


def _html(tokens: Iterable[tuple[str, str]]) -> str:
    """Return HTML for tokens (class, text). Consecutive tokens of the same class become one element.

    A token of the class "" becomes plain text.
    """
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


# Folding of repetitions: a model's steps are the same for every layer.

T = TypeVar("T")


@dataclass(frozen=True)
class Repeat(Generic[T]):
    """A sequence that consists of `items`, in this order, `count` times."""

    items: tuple[T, ...]
    count: int


def fold(items: Sequence[T], longest: int = 6) -> list[Repeat[T]]:
    """Return a sequence as a list of repetitions: A B B B becomes A once and B three times.

    The repeated part has at most `longest` items. From the start on, the repetition that covers the most items is taken
    at each point.
    """
    folded: list[Repeat[T]] = []
    start = 0
    while start < len(items):
        best = Repeat(tuple(items[start : start + 1]), 1)
        for period in range(1, longest + 1):
            unit = tuple(items[start : start + period])
            count = 1
            while tuple(items[start + count * period : start + (count + 1) * period]) == unit:
                count += 1
            if count > 1 and count * period > best.count * len(best.items):
                best = Repeat(unit, count)
        folded.append(best)
        start += best.count * len(best.items)
    return folded


TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Bar:
    """A bar of the page's time chart, for one timed stage.

    depth: the number of stages that contain this one. start_s: seconds since the first stage's start. left, width: in
    percent of the chart's time.
    """

    name: str
    depth: int
    start_s: float
    seconds: float
    left: float
    width: float


def render_html(report: Report) -> str:
    """Return the report as an HTML page, which contains its style sheet, script and all texts."""
    data, texts = report.data, report.texts
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": _seconds, "bytes": _bytes, "short": lambda key: key[:8]}
    environment.globals |= {
        "text": lambda name, language: highlight(texts[name], language),
        "code": highlight,
        "kernels_of": lambda piece: [asdict(kernel) for kernel in kernels_of(texts[piece["source"]])],
        "launcher": lambda piece: without_kernel_sources(texts[piece["source"]]),
        "fold": fold,
        "embedded": lambda name: (TEMPLATES / name).read_text(encoding="utf-8"),
    }
    piece_names = {piece["key"]: piece["name"] for piece in data["pieces"]}
    return environment.get_template("report.html").render(
        report=data,
        texts=texts,
        config_rows=list(_rows("", _shown_config(data["config"]))),
        factor_rows=list(_rows("", data["cache"].get("factors", {}))),
        waterfalls={name: _waterfall(spans, piece_names) for name, spans in data["phases"].items()},
        piece_names=piece_names,
        guards=_by_reason(data["guards"]),
        sections=sections(data),
        facts=facts(data),
        start_up_title=(
            "This process, which looked the entry up"
            if data["metrics"] is None
            else "This start-up, up to the first token"
        ),
        kernel_kinds=list(
            dict.fromkeys(kind for counts in data["kernels_per_step"].values() for kind in counts["by_kind"])
        ),
        measured_kernels=(data["metrics"] or {}).get("kernels_per_decode_step"),
    )


def _shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as the page shows it: for a CPU, the settings of CUDA graphs ("graph") are left out."""
    return {name: value for name, value in config.items() if name != "graph" or config["device"] != "cpu"}


def _waterfall(spans: list[Mapping[str, Any]], piece_names: Mapping[str, str]) -> list[Bar]:
    """Return a bar for each timed stage, ordered by start. All bars have the same time scale.

    spans: records of a Timeline. piece_names: piece key -> short name.
    """
    if not spans:
        return []
    first = min(span["start_s"] for span in spans)
    whole = max(span["start_s"] + span["seconds"] for span in spans) - first or 1.0
    parents = {span["name"]: span["parent"] for span in spans}

    def depth(name: str) -> int:
        parent = parents[name]
        return 1 + depth(parent) if parent in parents else 0

    return [
        Bar(
            name=_stage_name(span["name"], piece_names),
            depth=depth(span["name"]),
            start_s=span["start_s"] - first,
            seconds=span["seconds"],
            left=100 * (span["start_s"] - first) / whole,
            width=100 * span["seconds"] / whole,
        )
        for span in sorted(spans, key=lambda span: span["start_s"])
    ]


def _by_reason(guards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group guards that have the same subject and hold for the same reason ("discharged").

    Returns a dict for each group, with the group's guards as "kinds" and the sum of their counts.
    """
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for guard in guards:
        together.setdefault((guard["subject"], guard["discharged"]), []).append(guard)
    return [
        {"subject": subject, "discharged": discharged, "kinds": kinds, "count": sum(kind["count"] for kind in kinds)}
        for (subject, discharged), kinds in together.items()
    ]


def _stage_name(name: str, piece_names: Mapping[str, str]) -> str:
    """Return a span's name as the page shows it: a piece's key is replaced by the piece's short name, such as B."""
    key = name.removeprefix("piece ")
    return f"piece {piece_names[key]}" if key in piece_names else name


def _rows(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the entries of a nested dict as (dotted name, text).

    prefix: put before each name; "" at the top level. A dict "reasons" at the top level is left out: it explains the
    other entries and is not a setting itself.
    """
    for name, item in value.items():
        if isinstance(item, Mapping):
            if prefix or name != "reasons":
                yield from _rows(f"{prefix}{name}.", item)
        else:
            yield prefix + name, _value(item)


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and all(item == value[0] for item in value):
        return f"{value[0]} ({len(value)} times)"
    return ", ".join(map(str, value)) or "none"


def _seconds(value: float) -> str:
    """Return a time as text with three digits and unit, such as 1.23 s or 45.6 ms. value: the time in seconds."""
    scaled, unit = (value, "s") if value >= 1 else (value * 1000, "ms")
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"


def _bytes(value: int) -> str:
    scaled, unit = (value / (1 << 20), "MiB") if value < 1 << 30 else (value / (1 << 30), "GiB")
    return f"{scaled:.1f} {unit}"
