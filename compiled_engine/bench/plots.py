"""Draw plots from JSON results: bars and lines of an ablation, curves of a table, latencies and rates of a load test.

`draw` and the functions for each benchmark return PNGs by name.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from compiled_engine.bench.results import LATENCIES, WHOLE, has_figures

DOTS_PER_INCH = 160
WIDTH_INCHES = 9.0


@dataclass(frozen=True)
class Theme:
    """Colours of a plot."""

    name: str
    paper: str
    ink: str
    muted: str
    line: str
    strong: str  # the whole engine
    bar: str  # other variants
    bound: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "light",
    *("#fbfbf9", "#1f2328", "#646c76", "#e3e3de", "#0a6c74", "#a9cfd2", "#b3261e"),
    ("#8a5a00", "#b0568f", "#7a4fc0", "#c0572b", "#1b5fa8"),
)
DARK = Theme(
    "dark",
    *("#14171a", "#dfe3e7", "#949ca6", "#2c3238", "#63c3c9", "#2b5a5f", "#f0857c"),
    ("#e0a458", "#dd8fc0", "#b79cf0", "#e88b62", "#82b7ee"),
)


def new_figure(height_inches: float) -> Figure:
    """Return an empty figure, without a window and outside of pyplot's state."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    return figure


def write_title(figure: Figure, title: str, subtitle: str, theme: Theme) -> None:
    height = figure.get_figheight()
    figure.patch.set_facecolor(theme.paper)
    place: dict[str, Any] = {"x": 0.02, "ha": "left", "va": "top", "parse_math": False}
    figure.text(y=1 - 0.12 / height, s=title, color=theme.ink, fontsize=13, fontweight="bold", **place)
    figure.text(y=1 - 0.38 / height, s=subtitle, color=theme.muted, fontsize=9.5, **place)


def finish(axes: Axes, theme: Theme) -> None:
    """Style `axes` in the theme: its background, no frame, no tick marks, muted tick labels, grid behind the data."""
    axes.set_facecolor(theme.paper)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="both", colors=theme.muted, labelsize=9.5, length=0)


def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def write_pngs(drawn: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write each plot to `folder` as NAME.png and return the paths."""
    paths = []
    for name, png in drawn.items():
        path = folder / f"{name}.png"
        path.write_bytes(png)
        paths.append(path)
    return paths


def short(value: float) -> str:
    """Return a value as text with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between low and high."""
    return [digit * 10.0**power for power in range(-6, 8) for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


# Part of the names of variants that disable a pass.
WITHOUT = " without "


def whole_name(result: Mapping[str, Any]) -> str:
    """Return the name of the variant with all parts of the engine on the result's device."""
    return WHOLE["cuda" if "gpu" in result["machine"] else "cpu"]


def subtitle_of(result: Mapping[str, Any]) -> str:
    model, machine, workload = result["model"], result["machine"], result["workload"]
    device = machine.get("gpu") or machine["processor"]
    return f"{model['name']}, {model['dtype']}, {device}; prompts of {workload['prompt_len']} tokens"


def draw_ablation(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Return PNGs by name: step_batch_N for the smallest and the largest batch, and step_by_batch.

    Failed variants are left out.
    """
    batches = sorted(result["bound"]["step_ms"], key=int)
    records = [record for record in result["variants"] if has_figures(record)]
    drawn: dict[str, bytes] = {}
    if not records:
        return drawn
    for batch in dict.fromkeys((batches[0], batches[-1])):
        drawn[f"step_batch_{batch}"] = png_of(draw_bars(result, records, batch, theme))
    if len(batches) > 1:
        drawn["step_by_batch"] = png_of(draw_lines(result, records, batches, theme))
    return drawn


ROW_INCHES, PANEL_INCHES, TITLE_INCHES = 0.34, 0.8, 0.6


def draw_bars(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], batch: str, theme: Theme) -> Figure:
    """Return a figure with two panels of bars: variants by the parts of the engine that are on, and by a disabled pass.

    The second panel has its own scale and also shows the whole engine. Panels without variants are left out.
    """
    whole = whole_name(result)
    parts = [record for record in records if WITHOUT not in record["name"]]
    without = [record for record in records if WITHOUT in record["name"]]
    compared = [record for record in parts if record["name"] == whole] + without if without else []
    panels = [panel for panel in (parts, compared) if panel]
    heights = [ROW_INCHES * len(panel) + PANEL_INCHES for panel in panels]
    figure = new_figure(TITLE_INCHES + sum(heights))
    top = sum(heights)
    for panel, height in zip(panels, heights, strict=True):
        share = figure.get_figheight()
        size = ((top - height + 0.5) / share, (height - PANEL_INCHES) / share)
        axes = figure.add_axes((0.235, size[0], 0.735, size[1]))
        _bar_panel(axes, panel, batch, result["bound"]["step_ms"][batch], whole, theme)
        top -= height
    write_title(figure, f"Decode step, batch {batch}", subtitle_of(result), theme)
    return figure


def _bar_panel(
    axes: Axes, records: Sequence[Mapping[str, Any]], batch: str, bound: float, whole: str, theme: Theme
) -> None:
    """Draw a bar for each variant with its spread and median, and the bound as a line."""
    for row, record in enumerate(records):
        measured = record["step_ms"][batch]
        median, (low, high) = measured["median"], measured["spread"]
        is_whole = record["name"] == whole
        axes.barh(row, median, height=0.66, color=theme.strong if is_whole else theme.bar)
        if high > low:
            axes.plot([low, high], [row, row], color=theme.ink, linewidth=1.1, solid_capstyle="butt")
        axes.annotate(
            f"{short(median)} ms",
            (max(median, high, bound), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=theme.ink,
            fontweight="bold" if is_whole else "normal",
        )
    axes.axvline(bound, color=theme.bound, linewidth=1.4, linestyle=(0, (4, 2)))
    most = max(record["step_ms"][batch]["spread"][1] for record in records)
    axes.set_xlim(0, max(most, bound) * 1.13)
    axes.set_ylim(len(records) - 0.45, -0.55)
    names = [str(record["name"]) for record in records]
    # The common beginning of names with a disabled pass is left out.
    shown = [name[name.index(WITHOUT) + 1 :] if WITHOUT in name else name for name in names]
    axes.set_yticks(range(len(names)), shown, parse_math=False)
    axes.annotate(
        f"bound {short(bound)} ms",
        (bound, -0.55),
        xytext=(0, 4),
        textcoords="offset points",
        color=theme.bound,
        fontsize=9,
        ha="center" if bound > 0.12 * axes.get_xlim()[1] else "left",
    )
    axes.grid(axis="x", color=theme.line, linewidth=0.8)
    axes.set_xlabel("ms; thin line: spread of the repeats", color=theme.muted, fontsize=9)
    finish(axes, theme)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(theme.ink)
        label.set_fontweight("bold" if name == whole else "normal")


# Least distance between the labels of lines, as a share of the axis.
LABEL_GAP = 0.052


def draw_lines(
    result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], batches: Sequence[str], theme: Theme
) -> Figure:
    """Return a figure with a line for each variant: the time of a decode step by batch size.

    Lines of variants that disable a pass are thin, since they are near the whole engine's line.
    """
    figure = new_figure(5.2)
    axes = figure.add_axes((0.075, 0.115, 0.585, 0.735))
    xs = [int(batch) for batch in batches]
    bound = [result["bound"]["step_ms"][batch] for batch in batches]
    whole = whole_name(result)
    main = [record for record in records if WITHOUT not in record["name"]]
    shade = dict(zip([r["name"] for r in main if r["name"] != whole], theme.lines, strict=False))
    ends: list[tuple[float, str, str, bool]] = [(bound[-1], "bound", theme.bound, False)]
    values = list(bound)
    for record in records:
        name = record["name"]
        ys = [record["step_ms"][batch]["median"] for batch in batches]
        values += ys
        is_main = record in main
        colour = theme.strong if name == whole else shade.get(name, theme.muted)
        axes.plot(
            xs,
            ys,
            color=colour,
            linewidth=2.6 if name == whole else 1.7 if is_main else 0.8,
            alpha=1.0 if is_main else 0.55,
            marker="o" if is_main else None,
            markersize=4,
            zorder=3 if name == whole else 2,
        )
        if is_main:
            ends.append((ys[-1], name, colour, name == whole))
    without = [record for record in records if record not in main]
    if without:
        text = f"without one pass ({len(without)})"
        highest = max(record["step_ms"][batches[-1]]["median"] for record in without)
        ends.append((highest, text, theme.muted, False))
    axes.plot(xs, bound, color=theme.bound, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(xs[0] / 1.1, xs[-1] * 1.04)
    axes.set_ylim(min(values) / 1.2, max(values) * 1.2)
    axes.set_xticks(xs, list(batches))
    axes.minorticks_off()
    ticks = log_ticks(min(values) / 1.2, max(values) * 1.2)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    _label_ends(axes, ends)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_xlabel("batch size", color=theme.muted, fontsize=9)
    axes.set_ylabel("ms, logarithmic", color=theme.muted, fontsize=9)
    write_title(figure, "Decode step by batch size", subtitle_of(result), theme)
    finish(axes, theme)
    return figure


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str, bool]]) -> None:
    """Write names and values at the right ends of the lines, moved apart where they would overlap.

    ends: (last value, name, colour, whether the text is bold) of each line.
    """
    to_share = axes.transAxes.inverted()
    ordered = sorted(ends)
    shares = [to_share.transform(axes.transData.transform((1, value)))[1] for value, *_ in ordered]
    for (value, name, colour, is_bold), share, place in zip(ordered, shares, apart(shares), strict=True):
        axes.annotate(
            f"{name}  {short(value)}",
            (1.0, share),
            xytext=(1.035, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if is_bold else "normal",
            va="center",
            parse_math=False,
            arrowprops={
                **{"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
                "relpos": (0, 0.5),
            },
        )


def apart(places: Sequence[float]) -> list[float]:
    """Return ascending positions in [0, 1] moved apart, so that each is at least LABEL_GAP above the one below."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + LABEL_GAP) if moved else place)
    ceiling = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - LABEL_GAP
    return moved


# Curve of a table -> title and x axis.
QUEUE = "queue"
TITLES = {
    "batch": ("Decodes by batch size", "batch size"),
    "context": ("Decodes of {batch} requests by context", "tokens of context"),
    QUEUE: ("Short requests by their number", "requests that are there at the start"),
}
CURVE_INCHES = 4.2

Row = Mapping[str, Any]


def draw_curves(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Return PNGs by name: curve_MODEL_CURVE for each model and curve with at least two measured points."""
    machine = result["machine"]
    device = machine.get("gpu") or machine["processor"]
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        if "curve" in row and "measured" in row:
            curves.setdefault((row["model"], row["curve"]), []).append(row)
    return {
        f"curve_{model.lower().replace(' ', '_')}_{curve}": _draw_curve(curve, rows, f"{model}, {device}", theme)
        for (model, curve), rows in curves.items()
        if len(rows) > 1
    }


def _draw_curve(curve: str, rows: Sequence[Row], subtitle: str, theme: Theme) -> bytes:
    """Return a PNG with two panels: time on the left, tokens per second on the right."""
    rows = sorted(rows, key=lambda row: row["place"])
    figure = new_figure(CURVE_INCHES)
    title, label = TITLES[curve]
    title = title.format(batch=rows[0]["workload"].get("batch"))
    time = "seconds until all are done" if curve == QUEUE else "ms per output token"
    for left, convert, heading in ((0.065, _time, time), (0.555, _rate, "output tokens per second")):
        axes = figure.add_axes((left, 0.13, 0.31, 0.64))
        _curve_panel(axes, [_converted(row, convert) for row in rows], theme)
        axes.set_title(heading, loc="left", color=theme.muted, fontsize=9.5)
        axes.set_xlabel(label, color=theme.muted, fontsize=9)
        finish(axes, theme)
    write_title(figure, title, subtitle, theme)
    return png_of(figure)


def _converted(row: Row, convert: Any) -> tuple[int, float, list[float], float]:
    """Return the x value of a row of the table, and its median, spread and bound for the y axis.

    convert: converts each of the last three, given the row and the value.
    """
    measured = row["measured"]
    spread = sorted(convert(row, value) for value in measured["spread"])
    return row["place"], convert(row, measured["median"]), spread, convert(row, row["bound"])


def _time(row: Row, value: float) -> float:
    if row["curve"] == QUEUE:
        return _tokens(row) / value
    return value


def _rate(row: Row, value: float) -> float:
    if row["curve"] == QUEUE:
        return value
    return row["workload"]["batch"] / value * 1e3


def _tokens(row: Row) -> int:
    """Return the number of output tokens of all requests of a row, which have equal lengths."""
    return row["workload"]["requests"] * row["workload"]["output"][0]


def _curve_panel(axes: Axes, points: Sequence[tuple[int, float, list[float], float]], theme: Theme) -> None:
    """Draw the engine's line with spreads and the bound's line, both axes logarithmic."""
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


LOAD_INCHES = 3.6
# Number of panels -> their left edges and width.
PANELS = {2: ((0.07, 0.56), 0.4), 3: ((0.06, 0.39, 0.72), 0.26)}

Run = Mapping[str, Any]


def draw_load(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Return PNGs by name: load_by_rate if there are several runs, and load_latencies and load_course of each run.

    Runs without completed answers are left out.
    """
    runs = [run for run in result["runs"] if run["completed"]]
    subtitle = f"{result['served_model']}, {result['load']['requests']} requests a run"
    drawn = {}
    if len(runs) > 1:
        drawn["load_by_rate"] = _by_rate(runs, subtitle, theme)
    for number, run in enumerate(runs):
        name = "" if len(runs) == 1 else f"_{number + 1}"
        drawn[f"load_latencies{name}"] = _latencies(run, subtitle, theme)
        drawn[f"load_course{name}"] = _course(run, subtitle, theme)
    return drawn


def _by_rate(runs: Sequence[Run], subtitle: str, theme: Theme) -> bytes:
    runs = sorted(runs, key=lambda run: run["request_throughput"])
    rates = [run["request_throughput"] for run in runs]
    figure = new_figure(LOAD_INCHES)
    edges, width = PANELS[3]
    for left, (name, heading) in zip(edges, (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms")), strict=False):
        axes = figure.add_axes((left, 0.15, width, 0.58))
        points = [(rate, run[name]) for rate, run in zip(rates, runs, strict=True) if run[name] is not None]
        for key, colour, line in (("median", theme.strong, "-"), ("p99", theme.lines[3], "--")):
            found = [(rate, latency[key]) for rate, latency in points if key in latency]
            axes.plot(*zip(*found, strict=True) if found else ((), ()), line, color=colour, linewidth=2, marker="o",
                      markersize=4, label=key)  # fmt: skip
        axes.set_yscale("log")
        _plain_log_ticks(axes)
        _legend(axes, theme)
        _label(axes, heading, "requests completed per second", theme)
    axes = figure.add_axes((edges[2], 0.15, width, 0.58))
    axes.plot(
        rates, [run["output_throughput"] for run in runs], color=theme.strong, linewidth=2, marker="o", markersize=4
    )
    axes.set_ylim(bottom=0)
    _label(axes, "output tokens per second", "requests completed per second", theme)
    write_title(figure, "Load against latency", subtitle, theme)
    return png_of(figure)


def _latencies(run: Run, subtitle: str, theme: Theme) -> bytes:
    """Return a PNG with a curve for each latency: the percentage of answers that had at most the latency on the x axis.

    ITL counts the gaps between an answer's parts instead of answers.
    """
    figure = new_figure(LOAD_INCHES)
    edges, width = PANELS[3]
    for left, names in zip(edges, (("ttft_ms",), ("itl_ms", "tpot_ms"), ("e2el_ms",)), strict=True):
        axes = figure.add_axes((left, 0.15, width, 0.58))
        for name, colour in zip(names, (theme.strong, theme.lines[3]), strict=False):
            if run[name] is not None:
                axes.plot(run[name]["quantiles"], range(101), color=colour, linewidth=2, label=LATENCIES[name])
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
        if len(names) > 1:
            _legend(axes, theme, "lower right")
        _label(axes, f"{' and '.join(LATENCIES[name] for name in names)}: % within", "ms", theme)
    write_title(figure, f"Latencies, {run['name']}", subtitle, theme)
    return png_of(figure)


def _course(run: Run, subtitle: str, theme: Theme) -> bytes:
    figure = new_figure(LOAD_INCHES)
    edges, width = PANELS[2]
    timeline = run["timeline"]
    for left, name, heading in (
        (edges[0], "output_throughput", "output tokens per second"),
        (edges[1], "concurrency", "requests under way"),
    ):
        axes = figure.add_axes((left, 0.15, width, 0.58))
        axes.plot(timeline["seconds"], timeline[name], color=theme.strong, linewidth=1.8)
        axes.set_ylim(bottom=0)
        _label(axes, heading, "seconds", theme)
    write_title(figure, f"Course, {run['name']}", subtitle, theme)
    return png_of(figure)


def _label(axes: Axes, heading: str, below: str, theme: Theme) -> None:
    axes.set_title(heading, loc="left", color=theme.muted, fontsize=9.5)
    axes.set_xlabel(below, color=theme.muted, fontsize=9)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    finish(axes, theme)


def _legend(axes: Axes, theme: Theme, place: Literal["upper left", "lower right"] = "upper left") -> None:
    axes.legend(loc=place, frameon=False, fontsize=8.5, labelcolor=theme.muted)


def _plain_log_ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    ticks = log_ticks(low, high)
    axes.set_yticks(ticks, [short(tick) for tick in ticks])
    axes.minorticks_off()


def draw(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Return all plots of a result as PNGs by name; {} if the result has no figures."""
    by_benchmark = {"ablation": draw_ablation, "table": draw_curves, "serve": draw_load}
    return by_benchmark[result["benchmark"]](result, theme)
