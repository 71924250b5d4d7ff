"""`compiled-engine bench ablation`: what each part of the engine is worth, as tables and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import (
    AsJson,
    Batch,
    Quick,
    ShapeName,
    command_line,
    engine_options,
    print_json,
)
from compiled_engine.cli.bench_plot import make_plot_folder, write_ablation
from compiled_engine.cli.errors import bad_input_is_reported, written_to

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder for ablation.json, the plots and a page, ablation.html."),
]
RESULTS = "ablation.json"


@takes_engine_options
def ablation(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    batch: Batch = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Measure this variant, instead of all; may be repeated.")
    ] = None,
    prompt_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a decode's prompt: 128.")] = None,
    output_len: Annotated[int | None, typer.Option(min=2, help="Tokens to generate for TPOT: 65.")] = None,
    alone: Annotated[bool, typer.Option(help="Measure also without all passes, and with each pass alone.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Measured rounds: 3, in a quick run 1.")] = None,
    quick: Quick = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """What each part is worth: eager, with CUDA graphs, compiled, without each pass and, if asked for, with each alone.

    Each variant runs in fresh processes with a warm compile cache; repeats are interleaved. Measured are the time per
    output token, a step of decodes and a prompt, prefill, start-up, kernels of a decode step, and memory.

    A variant that fails is marked in the result, the others are kept, and the exit code is 1.

    JSON: benchmark, variants (name, options, and the figures, each with median and spread, or error), bound, workload,
    repeats, notes, date, machine, model, options, versions, rates, command.

    Examples:

      compiled-engine bench ablation --quick

      compiled-engine bench ablation --shape qwen3-0.6b --alone --output results

      compiled-engine bench ablation --shape qwen3-0.6b --batch 1 --variant compiled --variant "compiled + full" --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        from compiled_engine.bench.ablation_report import Asked, make_plan, run
        from compiled_engine.process.progress import RichProgress

        if output is not None:
            make_plot_folder("output", output)
        asked = Asked(tuple(batch) if batch else None, prompt_len, output_len, tuple(variant or ()), alone, quick)
        plan = make_plan(options, shape, asked)
        result = run(plan, repeats or (1 if quick else 3), RichProgress()) | {"command": command_line()}
        if output is not None:
            with written_to(output):
                (output / RESULTS).write_text(json.dumps(result, indent=2) + "\n")
                write_ablation(result, output)
    if as_json:
        print_json(result)
    else:
        from compiled_engine.cli.bench_text import print_ablation

        print_ablation(result)
    failed = [record for record in result["variants"] if "error" in record]
    for record in failed:
        typer.echo(f"compiled-engine: error: variant {record['name']!r} {record['error']}", err=True)
    if failed:
        raise typer.Exit(1)
