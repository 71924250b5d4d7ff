"""`compiled-engine bench serve`: load-test an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compiled_engine.bench.results import LATENCIES, require_httptools
from compiled_engine.cli.bench_engine import command_line
from compiled_engine.cli.bench_plot import make_plot_folder, write_page, write_plots
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, aligned, console, make_room, print_json, write_json

# Separate help panels: long names would cut off other options' in the same panel.
TWO_NAMES = "Options with vLLM's name as well"
ON_OR_OFF = "Options: on or off"

HIDDEN = ("quantiles", "std")

# Options that a published result must not contain.
SECRETS = ("--api-key", "--header")


def serve(
    *,
    url: Annotated[str, typer.Option("--url", "--base-url", help="The server.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(help="Model name in requests. Default: the server's first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key for the server.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Header of each request, as NAME=VALUE; may be repeated.")
    ] = None,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests per second; inf: all at once. Several, with commas or repeated, make a sweep; 70% is a share"
            " of what an earlier inf completed."
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    ramp: Annotated[
        str | None, typer.Option(help="START:END or exponential:START:END: a rate that changes, instead of one.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "--max-concurrency", min=1, help="Most requests at a time.", rich_help_panel=TWO_NAMES
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            "--num-prompts",
            "--num-prompt",
            min=1,
            help="Requests of each rate. Default: 100, or all of the dataset.",
            rich_help_panel=TWO_NAMES,
        ),
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Uncounted requests before the measurement.")] = 1,
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len",
            "--random-input-len",
            "--random-input",
            help="Tokens of a random prompt.",
            rich_help_panel=TWO_NAMES,
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len",
            "--random-output-len",
            "--random-output",
            help="Tokens to ask for.",
            rich_help_panel=TWO_NAMES,
        ),
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(
            "--shared-prefix",
            "--random-prefix-len",
            min=0,
            help="Common tokens before each prompt.",
            rich_help_panel=TWO_NAMES,
        ),
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(min=1, help="Number of different shared prefixes.")] = 1,
    vocab_size: Annotated[int, typer.Option(min=1, help="Token ids of random prompts are below it.")] = 1000,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            "--dataset-path",
            help="JSONL instead of random prompts: prompt (text or token ids) or messages, and output_len.",
            rich_help_panel=TWO_NAMES,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for answers of full length, with a field that not all servers support.", rich_help_panel=ON_OR_OFF
        ),
    ] = True,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of all requests. Default: the server's.")
    ] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of further fields for every request.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and times.")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Bounds of a good answer, in ms: ttft=200,tpot=20; may be repeated."),
    ] = None,
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report in addition to the median.")] = "90,99",
    ready_timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server.")] = 0.0,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a request.")] = 600.0,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send and read.")] = 1,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Keep the figures of each request.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for a page with plots, figures and conditions.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Load-test an OpenAI-compatible server, and measure what its streaming clients see.

    Times are those of vLLM's benchmark: TTFT to the first token, TPOT for each further one, ITL between two parts of an
    answer, E2EL until the last token. Tokens are counted by the server's usage. A part may hold several tokens; then
    ITL is the time between parts, and the result has the mean number of tokens a part.

    Lengths are a number, uniform:LEAST:MOST, normal:MEAN:DEVIATION:LEAST:MOST or lognormal:MEDIAN:SIGMA:LEAST:MOST.

    The result has the client's own load and delay. If they are high, use more --client-processes.

    If a request fails, the others go on, errors are counted by kind, and the exit code is 1.

    JSON: benchmark, url, served_model, load, runs (name, rate, asked; requests, completed, errors; throughputs,
    goodput; ttft_ms, tpot_ms, itl_ms, e2el_ms, each with mean, median and percentiles; timeline; client), date, machine
    (of the client), versions, command.

    Examples:

      compiled-engine bench serve --request-rate 4 --num-requests 200

      compiled-engine bench serve --input-len uniform:128:1024 --concurrency 64 --goodput ttft=200,tpot=20

      compiled-engine bench serve --url http://host:8000 --endpoint chat --request-rate inf,25%,50%,75% --html load.html
    """
    with bad_input_is_reported():
        require_httptools()
        from compiled_engine.bench.serving.load import measure
        from compiled_engine.bench.serving.plan import Asked, make_plan
        from compiled_engine.process.progress import RichProgress, SilentProgress

        _check_outputs(output, plots, html)
        plan = make_plan(
            Asked(
                url=url,
                endpoint=endpoint,
                model=model,
                api_key=api_key,
                header=header or (),
                request_rate=request_rate or (),
                burstiness=burstiness,
                ramp=ramp,
                concurrency=concurrency,
                num_requests=num_requests,
                num_warmups=num_warmups,
                input_len=input_len,
                output_len=output_len,
                shared_prefix=shared_prefix,
                num_prefixes=num_prefixes,
                vocab_size=vocab_size,
                dataset=dataset,
                ignore_eos=ignore_eos,
                temperature=temperature,
                extra_body=extra_body,
                seed=seed,
                goodput=goodput or (),
                metric_percentiles=metric_percentiles,
                ready_timeout=ready_timeout,
                request_timeout=request_timeout,
                client_processes=client_processes,
                save_detailed=save_detailed,
            )
        )
        result = measure(plan, SilentProgress() if quiet else RichProgress()) | {"command": command_line(SECRETS)}
        write_json(output, result)
        if plots is not None:
            write_plots(result, plots)
        if html is not None:
            write_page(result, html)
    if as_json:
        print_json(result)
    else:
        print_load(result)
    if any(run["errors"] for run in result["runs"]):
        raise typer.Exit(1)


def _check_outputs(output: Path | None, plots: Path | None, html: Path | None) -> None:
    """Make the output folders, so that unwritable ones are reported before the work."""
    make_room("output", output)
    make_room("html", html)
    if html is not None:
        make_plot_folder("html", html.absolute().parent)
    if plots is not None:
        make_plot_folder("plots", plots)


def print_load(result: Mapping[str, Any]) -> None:
    """Print throughput for each rate, latencies for each rate and metric, and notes."""
    from compiled_engine.bench.serving.figures import notes

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
        found: Mapping[str, Any] = next((run[name] for name in LATENCIES if run[name] is not None), {})
        columns = columns or [name for name in found if name not in HIDDEN]
    if not columns:
        return
    table = aligned(Table("rate", "ms", *columns, box=SIMPLE_HEAD, show_edge=False), 2)
    for run in result["runs"]:
        for name, shown in LATENCIES.items():
            if run[name] is not None:
                cells = [f"{run[name][each]:,.2f}" for each in columns]
                table.add_row(run["name"] if shown == "TTFT" else "", shown, *cells)
        table.add_section()
    out.print(table)
