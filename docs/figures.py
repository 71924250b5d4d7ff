"""Puts the figures of the documents in place, from the JSON in docs/measurements, and tables of options from the code.

    python docs/figures.py           rewrite README.md and docs/*.md
    python docs/figures.py --check   exit with code 1 if a document is not up to date
    python docs/figures.py --plots   draw the pictures of ablations and curves in docs/images again

Two markers stand in the documents, as HTML comments. Whatever is between a marker and its end is replaced:

    <!-- figure: FILE PATH FORMAT -->1.23<!-- /figure -->
    <!-- table: NAME FILE ... -->
    (a table, and below it the machine, versions, date and command)
    <!-- /table -->

FILE is a JSON file without its ending. PATH leads to a number: keys and list indices with slashes between them, or
key=value for the element of a list that has this value. FORMAT is Python's, with *FACTOR behind it if the number is
shown in another unit: `.1f`, `,.0f*1e-6`. NAME is a function in one of TABLES; a table of options has no FILE.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import card_tables
import family_tables
import measured_tables
import option_tables
import scaling_tables

DOCS = Path(__file__).resolve().parent
DOCUMENTS = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
MEASUREMENTS = DOCS / "measurements"
TABLES = (measured_tables, scaling_tables, family_tables, option_tables, card_tables)
CURVES = "curves"
ABLATIONS = ("ablation_qwen3-0.6b", "ablation_qwen3-8b")
FIGURE = re.compile(r"(<!-- figure: (\S+) ([^>]+) (\S+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (\w+)((?: [^>]+)?) -->)\n(.*?)(<!-- /table -->)", re.DOTALL)

Load = Callable[[str], dict[str, Any]]


class FigureError(ValueError):
    """Raised for a marker that names no measurement, or no number in it."""


def load(name: str) -> dict[str, Any]:
    path = MEASUREMENTS / f"{name}.json"
    if not path.is_file():
        raise FigureError(f"there is no measurement {name!r} in {MEASUREMENTS}")
    return json.loads(path.read_text())


def number_at(result: Any, path: str) -> float:
    """Return the number to which `path` leads in a result. Raises FigureError if there is none."""
    found = result
    for part in path.split("/"):
        key, is_choice, value = part.partition("=")
        try:
            if is_choice:
                (found,) = (element for element in found if str(element[key]) == value)
            else:
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FigureError(f"{path!r} leads nowhere: {part!r} is not there") from error
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise FigureError(f"{path!r} leads to {str(found)[:40]!r}, which is not a number")
    return found


def shown(number: float, form: str) -> str:
    spec, _, factor = form.partition("*")
    return format(number * float(factor or 1), spec)


def up_to_date(text: str, load: Load = load) -> str:
    """Return the text of a document with every figure and table replaced by its measurement's values."""

    def figure(match: re.Match[str]) -> str:
        begin, name, path, form, _, end = match.groups()
        return begin + shown(number_at(load(name), path), form) + end

    def table(match: re.Match[str]) -> str:
        begin, name, files, _, end = match.groups()
        make = next((vars(module)[name] for module in TABLES if name in vars(module)), None)
        if make is None:
            raise FigureError(f"there is no table {name!r} in {', '.join(f'{each.__name__}.py' for each in TABLES)}")
        return f"{begin}\n{make(*map(load, files.split()))}\n{end}"

    return TABLE.sub(table, FIGURE.sub(figure, text))


def draw_plots() -> None:
    from compiled_engine.bench.plots import LIGHT, draw_ablation, draw_curves, write_pngs

    write_pngs(draw_curves(load(CURVES), LIGHT), DOCS / "images")
    for name in ABLATIONS:
        drawn = draw_ablation(load(name), LIGHT)
        for plot, ending in (("step_by_batch", "by_batch"), ("step_batch_1", "batch_1")):
            (DOCS / "images" / f"{name}_{ending}.png").write_bytes(drawn[plot])


def main(arguments: list[str]) -> int:
    if "--plots" in arguments:
        draw_plots()
        return 0
    stale = []
    for document in DOCUMENTS:
        before = document.read_text()
        after = up_to_date(before)
        if after != before:
            stale.append(document.name)
            if "--check" not in arguments:
                document.write_text(after)
    if stale:
        print(f"{'not up to date' if '--check' in arguments else 'rewritten'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
