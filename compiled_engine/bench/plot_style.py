"""How plots look: colours for light and dark pages, titles, no frames; figures that no window knows."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOTS_PER_INCH = 160
WIDTH_INCHES = 9.0


@dataclass(frozen=True)
class Theme:
    """Colours on paper: of text, of what is secondary, of the whole engine, of other variants, of the bound."""

    name: str
    paper: str
    ink: str
    muted: str
    line: str
    strong: str
    bar: str
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
    """A figure that no window and no state of pyplot knows."""
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
    """No frame, quiet ticks, the grid behind."""
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
    """Write each as NAME.png; their paths."""
    paths = []
    for name, png in drawn.items():
        path = folder / f"{name}.png"
        path.write_bytes(png)
        paths.append(path)
    return paths


def short(value: float) -> str:
    """Three digits, as far as they are there."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between low and high."""
    return [digit * 10.0**power for power in range(-6, 8) for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
