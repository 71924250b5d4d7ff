"""`compiled-engine bench plot`: redraw the plots of a benchmark's JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import make_folder, written_to

# Benchmark -> what a result needs for plots.
PLOTTED = {"ablation": "variant with figures", "table": "points of a curve", "serve": "answer"}
PAGES = {"ablation": "ablation.html", "serve": "load.html"}


def plot(
    results: Annotated[
        Path, typer.Argument(help="JSON of `bench ablation`, of `bench table` with curves, or of `bench serve`.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plots; the page of an ablation or a load test too.")
    ],
) -> None:
    """Redraw from JSON the plots and the page of an ablation or a load test, or the curves of a table.

    Examples:

      compiled-engine bench plot results/ablation.json --output results

      compiled-engine bench plot table.json --output plots
    """
    with bad_input_is_reported():
        from compiled_engine.bench.results import read_result

        result = read_result("results", results, *PLOTTED)
        require_matplotlib("output", output)
        from compiled_engine.bench.plots import LIGHT, draw, write_pngs

        try:
            drawn = draw(result, LIGHT)
            if not drawn:
                raise ValueError(f"results is {str(results)!r}, which has no {PLOTTED[result['benchmark']]}")
            make_folder("output", output)
            with written_to(output):
                paths = write_pngs(drawn, output)
                if result["benchmark"] in PAGES:
                    paths.append(write_page(result, output / PAGES[result["benchmark"]]))
        except KeyError as error:
            raise ValueError(f"results is {str(results)!r}, which lacks {error}: another version made it") from error
    for path in paths:
        typer.echo(str(path))


def make_plot_folder(name: str, folder: Path) -> None:
    """Make a folder for plots. Raises ValueError, which names the option, if plots cannot be drawn or written."""
    require_matplotlib(name, folder)
    make_folder(name, folder)


def require_matplotlib(name: str, path: Path) -> None:
    """Raise ValueError if matplotlib is missing. The error names the option that requests plots."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{name} is {str(path)!r}, but plots need matplotlib: install compiled-engine[bench], or leave it out"
        )


def write_plots(result: Mapping[str, Any], folder: Path) -> None:
    from compiled_engine.bench.plots import LIGHT, draw, write_pngs

    with written_to(folder):
        write_pngs(draw(result, LIGHT), folder)


def write_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of an ablation or a load test and return its path."""
    from compiled_engine.bench.pages import render_ablation, render_load
    from compiled_engine.bench.serving.figures import notes

    is_load = result["benchmark"] == "serve"
    page = render_load(result, notes(result["runs"])) if is_load else render_ablation(result)
    with written_to(path):
        path.write_text(page, encoding="utf-8")
    return path
