"""`compiled-engine bench embed`: texts and tokens per second of a pooling model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from compiled_engine.bench.serving.embedding import BESIDE, WORKLOADS
from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import Repeats, ShapeName, command_line, engine_options
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, aligned, console, make_room, print_json, write_json


@takes_engine_options
def embed(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"TEXTSxTOKENS; may be repeated. Without it: {', '.join(WORKLOADS)}."),
    ] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Texts of 1 to TOKENS tokens.")] = False,
    beside: Annotated[
        list[str] | None, typer.Option(help=f"Compare with the engine, in this process: {', '.join(BESIDE)}.")
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible server to compare with the engine, as NAME=URL; may be repeated."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Compare with a variant of the engine, named as in bench ablation; may be repeated."),
    ] = None,
    repeats: Repeats = 5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure embeddings: the engine, transformers and servers embed the same token ids in turn.

    Servers get requests of 32 texts, 16 at a time. Their model must have at least the engine's vocabulary. The ratio is
    the engine's best rate divided by the best rate of all others. Variants, such as "eager" or "compiled without
    layer_norm" (on a GPU "compiled + full without layer_norm"), show the gain of each part, and do not count for the
    ratio.

    JSON: benchmark, results (workload, texts, tokens, ratio, contenders: texts_per_s and tokens_per_s), repeats,
    servers, date, machine, model, options, versions, command.

    Examples:

      compiled-engine bench embed --shape minilm --workload 32x16 --beside transformers

      compiled-engine bench embed --model FOLDER --address peer=http://127.0.0.1:8001 --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        from compiled_engine.bench.serving.embedding import EmbedWorkload, measure
        from compiled_engine.bench.serving.target import parse_target
        from compiled_engine.process.progress import RichProgress

        make_room("output", output)
        targets = {}
        for given in address or ():
            name, equals, url = given.partition("=")
            if not equals or name == "engine" or name in BESIDE:
                raise ValueError(f"address is {given!r}; allowed: NAME=URL, with a name of its own")
            targets[name] = parse_target(url, None, ())
        workloads = [EmbedWorkload.of(name, ragged=ragged) for name in workload or WORKLOADS]
        result = measure(options, shape, workloads, beside or (), targets, repeats, RichProgress(), variant or ())
        result["command"] = command_line()
    write_json(output, result)
    if as_json:
        print_json(result)
    else:
        print_embeddings(result)


def print_embeddings(result: Mapping[str, Any]) -> None:
    """Print a row for each workload and contender."""
    title = f"{result['model']['name']}, {result['model']['dtype']}, {result['machine']['device']}"
    table = Table("workload", "", "texts/s", "from", "to", "tokens/s", "ratio", title=title)
    for each in result["results"]:
        for name, rates in each["contenders"].items():
            texts = rates["texts_per_s"]
            figures = [f"{value:,.1f}" for value in (texts["median"], *texts["spread"])]
            ratio = "" if name != "engine" or each["ratio"] is None else f"{each['ratio']:.2f}"
            table.add_row(each["workload"], name, *figures, f"{rates['tokens_per_s']['median']:,.0f}", ratio)
    console().print(aligned(table, 2))
