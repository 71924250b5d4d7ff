"""`compiled-engine bench plot`: the plots of a benchmark's JSON, drawn again."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_engine.cli.errors import bad_input_is_reported, written_to
from compiled_engine.cli.output_folder import make_folder


def plot(
    results: Annotated[Path, typer.Argument(help="JSON of `bench ablation`, or of `bench table` with curves.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the plots; an ablation's page too.")],
) -> None:
    """Make the plots of an ablation and its page, or those of a table's curves, again from JSON.

    Examples:

      compiled-engine bench plot results/ablation.json --output results

      compiled-engine bench plot table.json --output plots
    """
    with bad_input_is_reported():
        from compiled_engine.bench.result_file import read_result

        result = read_result("results", results, "ablation", "table")
        is_table = result["benchmark"] == "table"
        try:
            if not (_has_curves(result) if is_table else _has_variants(result)):
                what = "points of a curve" if is_table else "variant with figures"
                raise ValueError(f"results is {str(results)!r}, which has no {what}")
            make_plot_folder("output", output)
            with written_to(output):
                paths = write_curves(result, output) if is_table else write_ablation(result, output)
        except KeyError as error:
            raise ValueError(f"results is {str(results)!r}, which lacks {error}: another version made it") from error
    for path in paths:
        typer.echo(str(path))


def make_plot_folder(name: str, folder: Path) -> None:
    """ValueError, naming the option, where plots cannot be made."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{name} is {str(folder)!r}, but plots need matplotlib: install compiled-engine[bench], or leave it out"
        )
    make_folder(name, folder)


def write_ablation(result: Mapping[str, Any], folder: Path) -> list[Path]:
    from compiled_engine.bench.ablation_page import write_page
    from compiled_engine.bench.ablation_plots import write_plots

    return [*write_plots(result, folder), write_page(result, folder)]


def write_curves(result: Mapping[str, Any], folder: Path) -> list[Path]:
    from compiled_engine.bench.curve_plots import write_plots

    return write_plots(result, folder)


def write_serving(result: Mapping[str, Any], folder: Path) -> list[Path]:
    from compiled_engine.bench.serving.plots import write_plots

    return write_plots(result, folder)


def _has_variants(result: Mapping[str, Any]) -> bool:
    from compiled_engine.bench.ablation_subject import measured

    return any(measured(record) for record in result.get("variants", ()))


def _has_curves(result: Mapping[str, Any]) -> bool:
    from compiled_engine.bench.curve_plots import curves_of

    return bool(curves_of(result))
