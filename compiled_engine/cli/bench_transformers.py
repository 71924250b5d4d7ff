"""`compiled-engine bench transformers`: the engine's speed compared with transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compiled_engine.bench.shapes import SHAPES
from compiled_engine.cli.bench_engine import Repeats, command_line
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, aligned, console, print_json

ModelFolder = Annotated[Path | None, typer.Option(help="Checkpoint folder. Without it: the bundled model.")]


def transformers(
    *,
    model: ModelFolder = None,
    shape: Annotated[
        str | None,
        typer.Option(help=f"Write and use a random checkpoint of this shape: {', '.join(SHAPES)}."),
    ] = None,
    mode: Annotated[str, typer.Option(help="eager, compiled, graphed or auto.")] = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 32,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 128,
    way: Annotated[
        list[str] | None,
        typer.Option(help="generate, static, compiled or continuous, instead of all; may be repeated."),
    ] = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Measure output tokens per second against the fastest way of transformers, for one request and for many.

    Its ways are generate with a growing cache, with a static one, with a static one and torch.compile (compiled), and
    continuous batching; on a CPU each with one thread and with all. Decoding is greedy, without stop tokens.

    JSON: benchmark, results (one, many: engine, bandwidth_share, transformers, fastest, ratio), rates, workload,
    repeats, date, machine, model, options, versions, command.

    Examples:

      compiled-engine bench transformers

      compiled-engine bench transformers --shape qwen2.5-0.5b --way generate

      compiled-engine bench transformers --requests 8 --way generate --way continuous --json
    """
    with bad_input_is_reported(), tempfile.TemporaryDirectory() as temporary:
        from compiled_engine.process.progress import RichProgress

        progress = RichProgress()
        if model is not None and shape is not None:
            raise ValueError(f"model is {model} and shape is {shape}; allowed: one of the two, or neither")
        if shape is not None:
            from compiled_engine.bench.load_rate import write_random_checkpoint
            from compiled_engine.resolve.engine import resolve_device

            model = write_random_checkpoint(Path(temporary), shape, resolve_device("auto", {}), progress)
        from compiled_engine.bench.against_transformers import compare

        result = compare(model, mode, requests, prompt_len, output_len, repeats, way or (), progress)
        result["command"] = command_line()
    if as_json:
        print_json(result)
        return
    print_beside_transformers(result, console())


def print_beside_transformers(result: Mapping[str, Any], out: Console) -> None:
    """Print a table for one request and one for many, with transformers' fastest way."""
    repeats, model = result["repeats"], result["model"]
    for name, requests in (("one", 1), ("many", result["workload"]["requests"])):
        found = result["results"][name]
        title = f"{model['name']}, {model['dtype']}, {result['machine']['device']}, requests: {requests}"
        table = Table("", "threads", "tok/s", *_spread_headings(repeats), title=title)
        table.add_row("engine", "", *_with_spread(found["engine"], repeats))
        for record in found["transformers"]:
            row = _with_spread(record["tokens_per_s"], repeats)
            table.add_row(f"transformers {record['way']}", str(record["threads"]), *row)
        out.print(aligned(table, 1))
        out.print(
            f"share of the memory bandwidth that the engine reads at: {found['bandwidth_share']:.0%}", highlight=False
        )
        fastest = found["fastest"]
        if fastest is not None:
            out.print(
                f"{found['ratio']:.2f} times the fastest way of transformers: {fastest['way']}, threads:"
                f" {fastest['threads']}",
                highlight=False,
            )


def _spread_headings(repeats: int) -> list[str]:
    """Return the headings of the columns for the least and the largest value; none for a single repeat."""
    return ["from", "to"] if repeats > 1 else []


def _with_spread(measured: Mapping[str, Any], repeats: int) -> list[str]:
    values = [measured["median"], *(measured["spread"] if repeats > 1 else ())]
    return [f"{value:,.0f}" for value in values]
