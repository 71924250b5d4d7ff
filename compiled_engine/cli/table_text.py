"""The table, and two of them beside each other, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from compiled_engine.bench.table_comparison import FAILED, FASTER, REPAIRED, SAME, SLOWER
from compiled_engine.cli.bench_text import aligned, console, print_rates

# For every column, where no terminal says how wide it is.
WIDTH = 200
COLOURS = {FASTER: "green", SLOWER: "red", FAILED: "red", REPAIRED: "green", SAME: ""}


def figure(value: float, unit: str) -> str:
    digits = {"ms": 3, "s": 1}.get(unit, 0)
    return f"{value:,.{digits}f}"


def print_table(result: Mapping[str, Any]) -> None:
    """A row a line, with its spread, bound and peers; what the bounds assume; what was left out."""
    out = console(WIDTH)
    peers = list(dict.fromkeys(name for row in result["rows"] for name in row.get("peers", ())))
    headings = ["row", "", "unit", "median", "from", "to", "n", "bound", "share\nof bound"]
    headings += [heading for name in peers for heading in (name.replace(" ", "\n", 1), "times\nbetter")]
    machine = result["machine"]
    table = Table(*headings, title=f"{machine.get('gpu') or machine['processor']}, {result['date']}", box=SIMPLE_HEAD)
    for row in result["rows"]:
        table.add_row(*_line(row, peers))
    out.print(aligned(table, 3))
    for rates in {rates["source"]: rates for rates in result["rates"].values()}.values():
        print_rates(rates, out)
    for note in result["notes"]:
        out.print(note, highlight=False)
    out.print(f"{result['seconds']:.0f} s in all", style="dim", highlight=False)


def _line(row: Mapping[str, Any], peers: list[str]) -> list[str]:
    unit, bound = row["unit"], row["bound"]
    start = [row["id"], row["what"], unit]
    if "error" in row:
        return [*start, "failed"]
    measured = row["measured"]
    cells = [figure(value, unit) for value in (measured["median"], *measured["spread"])]
    cells += [str(measured["n"]), figure(bound, unit), f"{row['share_of_bound']:.0%}"]
    for name in peers:
        peer = row.get("peers", {}).get(name)
        shown = " to ".join(dict.fromkeys(figure(value, unit) for value in peer["figure"])) if peer else ""
        cells += [shown, f"{peer['ratio']:.2f}" if peer else ""]
    return [*start, *cells]


def print_comparison(comparison: Mapping[str, Any], a: str, b: str) -> None:
    """A row a line, with both medians and spreads, how many times better B is, and the verdict; then a summary."""
    out = console(WIDTH)
    table = Table("row", "", "unit", "A", "A from - to", "B", "B from - to", "gain", "B is", box=SIMPLE_HEAD)
    for row in comparison["rows"]:
        cells = [row["id"], row["what"], row["unit"]]
        for name in ("a", "b"):
            found = row.get(name)
            spread = " - ".join(figure(value, row["unit"]) for value in found["spread"]) if found else ""
            cells += [figure(found["median"], row["unit"]) if found else "", spread]
        cells += [f"{row['gain']:.3f}" if "gain" in row else "", row["verdict"]]
        table.add_row(*cells, style=COLOURS[row["verdict"]])
    out.print(aligned(table, 3))
    for note in comparison["notes"]:
        out.print(note, highlight=False)
    counts = comparison["counts"]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLOURS if verdict in counts)
    out.print(f"B ({b}) against A ({a}): {said or 'no row to compare'}", style="bold", highlight=False)
