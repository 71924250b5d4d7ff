"""Time of a steady decode step against the batch size, a line for each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compiled_engine.bench.ablation_subject import WITHOUT, subtitle_of, whole_name
from compiled_engine.bench.plot_style import Theme, finish, log_ticks, new_figure, short, write_title

# Between the labels at the ends of lines, as a share of the axis.
LABEL_GAP = 0.052


def draw_lines(
    result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], batches: Sequence[str], theme: Theme
) -> Figure:
    """A line for each variant, with its name at its end. Those without a pass are thin: they are near the whole."""
    figure = new_figure(5.2)
    axes = figure.add_axes((0.075, 0.115, 0.585, 0.735))
    xs = [int(batch) for batch in batches]
    bound = [result["bound"]["step_ms"][batch] for batch in batches]
    whole = whole_name(records)
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
    """Names at the right of the lines' ends, moved apart where they would overlap."""
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
    """Ascending places in [0, 1], each LABEL_GAP above the one below, as near as can be to where they were."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + LABEL_GAP) if moved else place)
    ceiling = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - LABEL_GAP
    return moved
