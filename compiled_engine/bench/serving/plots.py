"""Plots of a load test: latencies and throughput against the rate, and of each run latencies and its course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes

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

HEIGHT_INCHES = 3.6
SHOWN = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
# Left edges of panels, by how many there are, and their width.
PANELS = {2: ((0.07, 0.56), 0.4), 3: ((0.06, 0.39, 0.72), 0.26)}

Run = Mapping[str, Any]


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write NAME.png for each; their paths."""
    return write_pngs(draw_all(result, LIGHT), folder)


def draw_all(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Name -> PNG: load_by_rate, if there are several runs, and latencies and course of each that has figures."""
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
    """Runs in the order of what they completed."""
    runs = sorted(runs, key=lambda run: run["request_throughput"])
    rates = [run["request_throughput"] for run in runs]
    figure = new_figure(HEIGHT_INCHES)
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
    """How many answers, or gaps within answers, took at most how long."""
    figure = new_figure(HEIGHT_INCHES)
    edges, width = PANELS[3]
    for left, names in zip(edges, (("ttft_ms",), ("itl_ms", "tpot_ms"), ("e2el_ms",)), strict=True):
        axes = figure.add_axes((left, 0.15, width, 0.58))
        for name, colour in zip(names, (theme.strong, theme.lines[3]), strict=False):
            if run[name] is not None:
                axes.plot(run[name]["quantiles"], range(101), color=colour, linewidth=2, label=SHOWN[name])
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
        if len(names) > 1:
            _legend(axes, theme, "lower right")
        _label(axes, f"{' and '.join(SHOWN[name] for name in names)}: % within", "ms", theme)
    write_title(figure, f"Latencies, {run['name']}", subtitle, theme)
    return png_of(figure)


def _course(run: Run, subtitle: str, theme: Theme) -> bytes:
    """Throughput and requests under way over time."""
    figure = new_figure(HEIGHT_INCHES)
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
