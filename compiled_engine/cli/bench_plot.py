"""`compiled-engine bench plot`: the plots of a benchmark's JSON, drawn again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from compiled_engine.cli.errors import bad_input_is_reported, make_folder, written_to


def plot(
    results: Annotated[
        Path, typer.Argument(help="JSON of `bench ablation`, of `bench table` with curves, or of `bench serve`.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plots; the page of an ablation or a load test too.")
    ],
) -> None:
    """Draw the plots and the page of an ablation or a load test, or the curves of a table, again from JSON.

    Examples:

      compiled-engine bench plot results/ablation.json --output results

      compiled-engine bench plot table.json --output plots
    """
    with bad_input_is_reported():
        from compiled_engine.bench.results import read_result

        result = read_result("results", results, *KINDS)
        kind = KINDS[result["benchmark"]]
        try:
            if not kind.has_any(result):
                raise ValueError(f"results is {str(results)!r}, which has no {kind.what}")
            make_plot_folder("output", output)
            with written_to(output):
                paths = kind.write(result, output)
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


def write_ablation_and_page(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write an ablation's plots and its page, ablation.html; their paths."""
    from compiled_engine.bench.pages import render_ablation
    from compiled_engine.bench.plots import write_ablation

    paths = write_ablation(result, folder)
    return [*paths, write_page(folder / "ablation.html", render_ablation(result))]


def write_load_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write a load test's page; its path."""
    from compiled_engine.bench.pages import render_load
    from compiled_engine.bench.serving.figures import notes

    return write_page(path, render_load(result, notes(result["runs"])))


def write_page(path: Path, page: str) -> Path:
    path.write_text(page, encoding="utf-8")
    return path


def _write_curves(result: Mapping[str, Any], folder: Path) -> list[Path]:
    from compiled_engine.bench.plots import write_curves

    return write_curves(result, folder)


def _write_load_and_page(result: Mapping[str, Any], folder: Path) -> list[Path]:
    from compiled_engine.bench.plots import write_load

    return [*write_load(result, folder), write_load_page(result, folder / "load.html")]


def _has_variants(result: Mapping[str, Any]) -> bool:
    from compiled_engine.bench.results import has_figures

    return any(has_figures(record) for record in result.get("variants", ()))


def _has_curves(result: Mapping[str, Any]) -> bool:
    from compiled_engine.bench.plots import curves_of

    return bool(curves_of(result))


def _has_answers(result: Mapping[str, Any]) -> bool:
    return any(run["completed"] for run in result["runs"])


class _Kind(NamedTuple):
    """A benchmark with plots that can be drawn again. what: the fields that it needs."""

    what: str
    has_any: Callable[[Mapping[str, Any]], bool]
    write: Callable[[Mapping[str, Any], Path], list[Path]]


KINDS = {
    "ablation": _Kind("variant with figures", _has_variants, write_ablation_and_page),
    "table": _Kind("points of a curve", _has_curves, _write_curves),
    "serve": _Kind("answer", _has_answers, _write_load_and_page),
}
