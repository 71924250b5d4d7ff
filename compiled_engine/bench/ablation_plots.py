"""An ablation as plots: the decode step of each variant against its bound, and against the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.bench.ablation_bars import draw_bars
from compiled_engine.bench.ablation_lines import draw_lines
from compiled_engine.bench.ablation_subject import measured
from compiled_engine.bench.plot_style import LIGHT, Theme, png_of, write_pngs


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write step_batch_N.png for the least and the largest batch, and step_by_batch.png; their paths."""
    return write_pngs(draw_all(result, LIGHT), folder)


def draw_all(result: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """Name -> PNG. Variants without figures are left out."""
    batches = sorted(result["bound"]["step_ms"], key=int)
    records = [record for record in result["variants"] if measured(record)]
    drawn: dict[str, bytes] = {}
    if not records:
        return drawn
    for batch in dict.fromkeys((batches[0], batches[-1])):
        drawn[f"step_batch_{batch}"] = png_of(draw_bars(result, records, batch, theme))
    if len(batches) > 1:
        drawn["step_by_batch"] = png_of(draw_lines(result, records, batches, theme))
    return drawn
