"""How pages of benchmarks look, and the parts that they share."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from compiled_engine.bench.plot_style import DARK, LIGHT, Theme

STYLE = """
:root { --paper: #fbfbf9; --ink: #1f2328; --muted: #646c76; --line: #e3e3de; --accent: #0a6c74; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #dfe3e7; --muted: #949ca6; --line: #2c3238; --accent: #63c3c9; --bad: #f0857c; }
}
body { margin: 0 auto; padding: 2rem 1.2rem 5rem; max-width: 86rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.02em; }
h2 { margin: 2.6rem 0 0.6rem; font-size: 1.15rem; }
p { max-width: 46rem; }
.muted { color: var(--muted); } .bad { color: var(--bad); } .whole { font-weight: 650; color: var(--accent); }
figure { margin: 1.4rem 0; } img { display: block; width: 100%; max-width: 58rem; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.32rem 0 0.32rem 1.4rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 0.8rem; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td.bad { text-align: left; }
td small { display: block; color: var(--muted); }
tr.bound td { color: var(--bad); border-bottom: none; }
pre { padding: 0.7rem 0.9rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.4rem; margin: 0; font-size: 0.9rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def pictures(draw: Callable[[Theme], Mapping[str, bytes]]) -> list[dict[str, str]]:
    """Each plot once for light and once for dark pages, as text that stands in the page; `text` says what it is."""
    light, dark = draw(LIGHT), draw(DARK)
    return [
        {"text": name.replace("_", " "), "light": _base64(light[name]), "dark": _base64(dark[name])} for name in light
    ]


def facts(result: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Headings with the names and values below them, of those parts of a result that say something."""
    return [
        (name.capitalize(), {key: _shown(value) for key, value in result[name].items()})
        for name in names
        if result[name]
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
