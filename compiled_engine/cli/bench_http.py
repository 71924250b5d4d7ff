"""`compiled-engine bench http`: the same requests through the engine's API and through its server."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from compiled_engine.bench.results import require_httptools
from compiled_engine.cli.arguments import ENGINE_ARGUMENTS, as_written, takes_engine_options
from compiled_engine.cli.bench_engine import ShapeName, command_line, engine_options, resolved
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, aligned, console, make_room, print_json, write_json


@takes_engine_options
def http(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    server: Annotated[
        list[str] | None,
        typer.Option(help="Options of a server to compare with the default one, in quotes; may be repeated."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the saturating rate at which latencies are measured.")
    ] = 0.7,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the workload, offline and through each server.")] = 3,
    starts: Annotated[
        int, typer.Option(min=0, help="Starts of the engine and of its server, with a warm compile cache.")
    ] = 2,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send and read.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the JSON, written anew after each part.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of HTTP: a workload offline and through the server, latencies under constant load, and the
    starts of both.

    On a GPU workload T of the table, on a CPU a small one. Every answer is streamed, each token as an event. Then
    requests of the same kind come at random times, at a share of the saturating rate.

    Engine and servers run in fresh processes. With --shape the checkpoint has a tokenizer of 151,000 tokens.

    JSON: benchmark, workload, repeats, offline (output_throughput, mixed_step_ms), servers (arguments,
    output_throughput, ratio to offline, saturated and steady: as a run of `bench serve`), ready_s, date, machine,
    model, versions, command.

    Examples:

      compiled-engine bench http --repeats 2

      compiled-engine bench http --shape qwen3-0.6b --max-model-len 4096 --output http.json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        require_httptools()
        from compiled_engine.bench.large_tokenizer import write_tokenizer
        from compiled_engine.bench.results import plain_options
        from compiled_engine.bench.serving.beside_offline import HttpPlan, compare
        from compiled_engine.bench.worker_workloads import ON_CPU, ON_GPU
        from compiled_engine.process.progress import RichProgress

        make_room("output", output)
        if shape is not None:
            write_tokenizer(Path(options["model"]))
        on_gpu = resolved(options).device.type == "cuda"
        plain = plain_options(options)
        plan = HttpPlan(
            options=plain,
            arguments=as_written(ENGINE_ARGUMENTS, options),
            workload=ON_GPU if on_gpu else ON_CPU,
            servers=[(), *(shlex.split(each) for each in server or ())],
            share=share,
            repeats=repeats,
            starts=starts,
            processes=client_processes,
        )

        def complete(result: Mapping[str, Any]) -> dict[str, Any]:
            model = {**result["model"], "name": shape or result["model"]["name"]}
            return {**result, "model": model, "command": command_line()}

        def keep(result: Mapping[str, Any]) -> None:
            write_json(output, complete(result))

        result = complete(compare(plan, RichProgress(), keep))
    if as_json:
        print_json(result)
    else:
        print_beside_offline(result)


def print_beside_offline(result: Mapping[str, Any]) -> None:
    """Print a row for the engine without a server, and one for each server."""
    from compiled_engine.bench.serving.figures import notes

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
