"""Results of `bench serve` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compiled_engine.bench.serving.notes import notes
from compiled_engine.cli.bench_text import aligned, console

LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2EL": "e2el_ms"}
HIDDEN = ("quantiles", "std")


def print_load(result: Mapping[str, Any]) -> None:
    """Throughput a row for each rate, latencies a row for each rate and metric, then what is to be said."""
    out = console()
    title = f"{result['served_model']} at {result['url']}, {result['load']['endpoint']}"
    with_goodput = any(run["goodput"] for run in result["runs"])
    headings = ["rate", "done", "failed", "s", "requests/s", "output tok/s", "total tok/s", "concurrency"]
    table = aligned(Table(*headings, *["good/s"] * with_goodput, title=title, box=SIMPLE_HEAD, show_edge=False), 1)
    for run in result["runs"]:
        row = [run["name"], str(run["completed"]), str(sum(run["errors"].values())), f"{run['duration_s']:.2f}"]
        row += [f"{run['request_throughput']:,.2f}", f"{run['output_throughput']:,.0f}"]
        row += [f"{run['total_token_throughput']:,.0f}" if run["prompt_tokens_known"] else ""]
        row += [f"{run['mean_concurrency']:.1f}"]
        row += [f"{run['goodput']['request_throughput']:,.2f}" if run["goodput"] else ""][: int(with_goodput)]
        table.add_row(*row)
    out.print(table)
    _print_latencies(result, out)
    for run in result["runs"]:
        for kind, count in run["errors"].items():
            text = f"{run['name']}: {count} x {kind}: {run['first_errors'][kind]}"
            out.print(text, style="red", highlight=False, markup=False)
    for note in notes(result["runs"]):
        out.print(note, style="dim", highlight=False, markup=False)


def _print_latencies(result: Mapping[str, Any], out: Console) -> None:
    columns: list[str] = []
    for run in result["runs"]:
        found: Mapping[str, Any] = next((run[name] for name in LATENCIES.values() if run[name] is not None), {})
        columns = columns or [name for name in found if name not in HIDDEN]
    if not columns:
        return
    table = aligned(Table("rate", "ms", *columns, box=SIMPLE_HEAD, show_edge=False), 2)
    for run in result["runs"]:
        for shown, name in LATENCIES.items():
            if run[name] is not None:
                cells = [f"{run[name][each]:,.2f}" for each in columns]
                table.add_row(run["name"] if shown == "TTFT" else "", shown, *cells)
        table.add_section()
    out.print(table)


def print_beside_offline(result: Mapping[str, Any]) -> None:
    """A row for the engine itself and for each server."""
    out = console()
    title = f"{result['model']['name']}, {result['model']['dtype']}, requests: {result['workload']['num_requests']}"
    headings = ["", "output tok/s", "of offline", "saturated,\nrequests/s", "steady,\nrequests/s"]
    headings += ["TTFT\nmedian, ms", "TTFT\np99, ms", "ITL\nmedian, ms", "ITL\np99, ms", "ready\nafter, s"]
    table = aligned(Table(*headings, title=title, box=SIMPLE_HEAD, show_edge=False), 1)
    ready = {name: f"{seconds['median']:.2f}" for name, seconds in result.get("ready_s", {}).items()}
    offline = result["offline"]["output_throughput"]["median"]
    table.add_row("offline", f"{offline:,.0f}", *[""] * 7, ready.get("offline", ""))
    for server in result["servers"]:
        steady = server["steady"]
        row = [f"{server['output_throughput']['median']:,.0f}", f"{server['ratio']:.1%}"]
        row += [f"{server['saturated']['request_throughput']:.2f}", f"{steady['request_throughput']:.2f}"]
        row += [f"{steady[name][each]:.2f}" for name in ("ttft_ms", "itl_ms") for each in ("median", "p99")]
        is_default = not server["arguments"]
        name = "server" if is_default else " ".join(server["arguments"])
        table.add_row(name, *row, ready.get("server", "") if is_default else "")
    out.print(table)
    out.print(f"A mixed step offline: {result['offline']['mixed_step_ms']:.2f} ms.", style="dim", highlight=False)
    loads = [run for server in result["servers"] for run in (*server["repeats"], server["saturated"], server["steady"])]
    for note in notes(loads):
        out.print(note, style="dim", highlight=False, markup=False)
