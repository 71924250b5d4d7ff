"""`compiled-engine bench table` and `bench compare`: the main performance table, and comparison of two tables."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import command_line, print_rates
from compiled_engine.cli.bench_plot import make_plot_folder, write_plots
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, aligned, console, make_room, print_json, write_json

# Wide enough for every column if there is no terminal.
WIDTH = 200


@takes_engine_options
def table(
    *,
    engine: dict[str, Any],
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="Id of a row, or a pattern such as '8b-*', instead of all; may be repeated."),
    ] = None,
    show_rows: Annotated[bool, typer.Option("--list", help="List all rows, and measure none.")] = False,
    peer: Annotated[
        Path | None, typer.Option(help="JSON with figures of other engines, to compare the rows with.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Repeats of each row. Default: 3 to 7, more for faster rows; 2 for starts."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(help="Folder for plots against batch, context and queue; their points take as long as the rest."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the JSON, written anew after each row.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the main table, each row with its bound: minutes on a GPU.

    On a GPU: times per token, throughput, prefill, mixed steps and starts of the shapes qwen3-0.6b and qwen3-8b, with
    random weights. On a CPU: smaller workloads of the bundled model. With --model: the same workloads of that
    checkpoint. Faster rows are repeated more often. The first run on a machine compiles, and takes longer.

    A row that fails is marked in the result, the others are kept, and the exit code is 1.

    JSON: benchmark, rows (id, model, what, unit, better, options, workload, bound, and measured: median, spread, n,
    values; share_of_bound; or error; peers), date, machine, models, options, versions, rates, notes, seconds, command.

    Examples:

      compiled-engine bench table --output table.json

      compiled-engine bench table --rows 'bundled-tpot-*' --rows bundled-T --json

      compiled-engine bench table --rows 'curve-*' --plots plots
    """
    with bad_input_is_reported(), tempfile.TemporaryDirectory() as folder:
        from compiled_engine.bench.table import make_plan, measure
        from compiled_engine.bench.table_comparison import read_peers, with_peers
        from compiled_engine.process.progress import RichProgress

        if show_rows:
            _list_rows(engine)
            return
        peers = {} if peer is None else read_peers(peer)
        if plots is not None:
            make_plot_folder("plots", plots)
        make_room("output", output)
        plan = make_plan(engine, rows or (), with_curves=plots is not None, folder=Path(folder))

        def complete(result: Mapping[str, Any]) -> dict[str, Any]:
            return {**result, "rows": [with_peers(row, peers) for row in result["rows"]], "command": command_line()}

        def keep(result: Mapping[str, Any]) -> None:
            write_json(output, complete(result))

        result = complete(measure(plan, repeats, RichProgress(), keep))
        if plots is not None:
            write_plots(result, plots)
    if as_json:
        print_json(result)
    else:
        print_table(result)
    failed = [row for row in result["rows"] if "error" in row]
    for row in failed:
        typer.echo(f"compiled-engine: error: row {row['id']}: {row['error']}", err=True)
    if failed:
        raise typer.Exit(1)


def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A.json", help="JSON of `bench table`: before a change, or of one machine.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The same after the change, or of the other machine.")],
    *,
    noise: Annotated[
        float,
        typer.Option(min=0.0, help="Medians that differ by at most this share are the same, whatever spreads say."),
    ] = 0.01,
    fail_on_slower: Annotated[
        bool, typer.Option("--fail-on-slower", help="Exit with code 1 if a row of B is slower, or failed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Judge two tables: which rows of B are faster or slower than A's by more than their spreads.

    A row is the same if the intervals from its smallest to its largest repeat overlap, or if its medians differ by at
    most --noise.

    JSON: rows (id, what, unit, a, b, gain, overlap, verdict), notes, noise, counts.

    Example:

      compiled-engine bench compare before.json after.json --fail-on-slower
    """
    with bad_input_is_reported():
        from compiled_engine.bench.results import read_result
        from compiled_engine.bench.table_comparison import compare as judged
        from compiled_engine.bench.table_comparison import is_slower

        before, after = (read_result(name, path, "table") for name, path in (("A.json", a), ("B.json", b)))
        try:
            comparison = judged(before, after, noise)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{a} or {b} lacks {error}: another version made it") from error
    if as_json:
        print_json(comparison)
    else:
        print_comparison(comparison, str(a), str(b))
    if fail_on_slower and is_slower(comparison):
        raise typer.Exit(1)


def _list_rows(engine: Mapping[str, Any]) -> None:
    from compiled_engine.bench.table_rows import known_rows
    from compiled_engine.resolve.engine import resolve_device

    on_gpu = resolve_device(engine.get("device", "auto"), {}).type == "cuda"
    rows, _ = known_rows(on_gpu=on_gpu, own_model="model" in engine)
    for row in rows:
        typer.echo(f"{row.id:28} {row.subject.title}, {row.workload.what()}, {row.workload.unit}")


def figure(value: float, unit: str) -> str:
    digits = {"ms": 3, "s": 1}.get(unit, 0)
    return f"{value:,.{digits}f}"


def print_table(result: Mapping[str, Any]) -> None:
    """Print each row with its spread, bound and peers, then the assumptions of the bounds and notes."""
    out = console(WIDTH)
    peers = list(dict.fromkeys(name for row in result["rows"] for name in row.get("peers", ())))
    headings = ["row", "", "unit", "median", "from", "to", "n", "bound", "share\nof bound"]
    headings += [heading for name in peers for heading in (name.replace(" ", "\n", 1), "times\nbetter")]
    machine = result["machine"]
    table = Table(*headings, title=f"{machine.get('gpu') or machine['processor']}, {result['date']}", box=SIMPLE_HEAD)
    for row in result["rows"]:
        table.add_row(*_line(row, peers))
    out.print(aligned(table, 3))
    for rates in {rates["source"]: rates for rates in result["rates"].values()}.values():
        print_rates(rates, out)
    for note in result["notes"]:
        out.print(note, highlight=False)
    out.print(f"{result['seconds']:.0f} s in all", style="dim", highlight=False)


def _line(row: Mapping[str, Any], peers: list[str]) -> list[str]:
    unit, bound = row["unit"], row["bound"]
    start = [row["id"], row["what"], unit]
    if "error" in row:
        return [*start, "failed"]
    measured = row["measured"]
    cells = [figure(value, unit) for value in (measured["median"], *measured["spread"])]
    cells += [str(measured["n"]), figure(bound, unit), f"{row['share_of_bound']:.0%}"]
    for name in peers:
        peer = row.get("peers", {}).get(name)
        shown = " to ".join(dict.fromkeys(figure(value, unit) for value in peer["figure"])) if peer else ""
        cells += [shown, f"{peer['ratio']:.2f}" if peer else ""]
    return [*start, *cells]


def print_comparison(comparison: Mapping[str, Any], a: str, b: str) -> None:
    """Print each row with both medians and spreads, the gain and the verdict, then a summary."""
    from compiled_engine.bench.table_comparison import FAILED, FASTER, REPAIRED, SAME, SLOWER

    colours = {FASTER: "green", SLOWER: "red", FAILED: "red", REPAIRED: "green", SAME: ""}
    out = console(WIDTH)
    table = Table("row", "", "unit", "A", "A from - to", "B", "B from - to", "gain", "B is", box=SIMPLE_HEAD)
    for row in comparison["rows"]:
        cells = [row["id"], row["what"], row["unit"]]
        for name in ("a", "b"):
            found = row.get(name)
            spread = " - ".join(figure(value, row["unit"]) for value in found["spread"]) if found else ""
            cells += [figure(found["median"], row["unit"]) if found else "", spread]
        cells += [f"{row['gain']:.3f}" if "gain" in row else "", row["verdict"]]
        table.add_row(*cells, style=colours[row["verdict"]])
    out.print(aligned(table, 3))
    for note in comparison["notes"]:
        out.print(note, highlight=False)
    counts = comparison["counts"]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in colours if verdict in counts)
    out.print(f"B ({b}) against A ({a}): {said or 'no row to compare'}", style="bold", highlight=False)
