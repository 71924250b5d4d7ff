"""Time of a steady decode step of each variant as bars, against the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compiled_engine.bench.ablation_subject import WITHOUT, subtitle_of, whole_name
from compiled_engine.bench.plot_style import Theme, finish, new_figure, short, write_title

ROW_INCHES, PANEL_INCHES, TITLE_INCHES = 0.34, 0.8, 0.6


def draw_bars(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], batch: str, theme: Theme) -> Figure:
    """Bars of the parts of the engine and, on a scale of their own, of the engine without each pass."""
    whole = whole_name(result["variants"])
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
    axes: Axes, records: Sequence[Mapping[str, Any]], batch: str, bound: float, whole: str | None, theme: Theme
) -> None:
    """A bar for each variant with its spread and the figure at its end; the bound as a line over all."""
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
    # A name whose beginning the bold one has already said.
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
