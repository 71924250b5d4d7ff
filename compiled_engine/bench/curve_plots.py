"""Time and throughput against batch, context and queue, from the rows of a table that are points of curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from compiled_engine.bench.ablation_lines import apart
from compiled_engine.bench.plot_style import (
    LIGHT,
    Theme,
    finish,
    log_ticks,
    new_figure,
    png_of,
    short,
    write_pngs,
    write_title,
)
from compiled_engine.bench.table_rows import BY_BATCH, BY_CONTEXT, BY_QUEUE, CONTEXT_BATCH

TITLES = {
    BY_BATCH: ("Decodes by batch size", "batch size"),
    BY_CONTEXT: (f"Decodes of {CONTEXT_BATCH} requests by context", "tokens of context"),
    BY_QUEUE: ("Short requests by their number", "requests that are there at the start"),
}
HEIGHT_INCHES = 4.2

Row = Mapping[str, Any]


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write curve_MODEL_NAME.png for each model and curve that has points; their paths."""
    return write_pngs(draw_all(result, LIGHT), folder)


def curves_of(result: Mapping[str, Any]) -> dict[tuple[str, str], list[Row]]:
    """(model, curve) -> its points. Points without figures are left out, and so are curves with less than two."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        if "curve" in row and "measured" in row:
            curves.setdefault((row["model"], row["curve"]), []).append(row)
    return {key: rows for key, rows in curves.items() if len(rows) > 1}


def draw_all(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Name -> PNG."""
    machine = result["machine"]
    device = machine.get("gpu") or machine["processor"]
    return {
        f"curve_{model.lower().replace(' ', '_')}_{curve}": _draw(curve, rows, f"{model}, {device}", theme)
        for (model, curve), rows in curves_of(result).items()
    }


def _draw(curve: str, rows: Sequence[Row], subtitle: str, theme: Theme) -> bytes:
    """Two panels: time on the left, tokens per second on the right."""
    rows = sorted(rows, key=lambda row: row["place"])
    figure = new_figure(HEIGHT_INCHES)
    title, label = TITLES[curve]
    time = "seconds until all are done" if curve == BY_QUEUE else "ms per output token"
    for left, convert, heading in ((0.065, _time, time), (0.555, _rate, "output tokens per second")):
        axes = figure.add_axes((left, 0.13, 0.31, 0.64))
        _draw_panel(axes, [_converted(row, convert) for row in rows], theme)
        axes.set_title(heading, loc="left", color=theme.muted, fontsize=9.5)
        axes.set_xlabel(label, color=theme.muted, fontsize=9)
        finish(axes, theme)
    write_title(figure, title, subtitle, theme)
    return png_of(figure)


def _converted(row: Row, convert: Any) -> tuple[int, float, list[float], float]:
    """Place, median, spread and bound."""
    measured = row["measured"]
    spread = sorted(convert(row, value) for value in measured["spread"])
    return row["place"], convert(row, measured["median"]), spread, convert(row, row["bound"])


def _time(row: Row, value: float) -> float:
    if row["curve"] == BY_QUEUE:
        return _tokens(row) / value
    return value


def _rate(row: Row, value: float) -> float:
    if row["curve"] == BY_QUEUE:
        return value
    return row["workload"]["batch"] / value * 1e3


def _tokens(row: Row) -> int:
    """Of all outputs: the lengths of a queue's requests are equal."""
    return row["workload"]["requests"] * row["workload"]["output"][0]


def _draw_panel(axes: Axes, points: Sequence[tuple[int, float, list[float], float]], theme: Theme) -> None:
    """The engine's line with its spreads, the bound below or above it, both axes logarithmic."""
    places = [place for place, *_ in points]
    medians = [median for _, median, *_ in points]
    bounds = [bound for *_, bound in points]
    axes.plot(places, medians, color=theme.strong, linewidth=2.4, marker="o", markersize=4, zorder=3)
    for place, _, spread, _ in points:
        axes.plot([place, place], spread, color=theme.ink, linewidth=1.1)
    axes.plot(places, bounds, color=theme.bound, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
    axes.minorticks_off()
    low, high = min(*medians, *bounds) / 1.4, max(*medians, *bounds) * 1.4
    axes.set_ylim(low, high)
    ticks = log_ticks(low, high)
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    ends = sorted([(bounds[-1], "bound", theme.bound), (medians[-1], "engine", theme.strong)])
    shares = [math.log(value / low) / math.log(high / low) for value, *_ in ends]
    for (value, name, colour), share in zip(ends, apart(shares), strict=True):
        text = f"{name} {short(value)}"
        axes.text(1.02, share, text, color=colour, transform=axes.transAxes, va="center", fontsize=9)
