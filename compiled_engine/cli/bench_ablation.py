"""`compiled-engine bench ablation`: the gain of each part of the engine, as tables and a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import Batch, Quick, ShapeName, command_line, engine_options, print_rates
from compiled_engine.cli.bench_plot import PAGES, make_plot_folder, write_page, write_plots
from compiled_engine.cli.errors import bad_input_is_reported, read_text
from compiled_engine.cli.output import AsJson, aligned, console, print_json, write_json

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
    alone: Annotated[bool, typer.Option(help="Also measure without any pass, and with each pass alone.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Measured rounds: 3, in a quick run 1.")] = None,
    quick: Quick = False,
    text: Annotated[
        Path | None,
        typer.Option(help="Text in UTF-8, for the loss of quantised variants: the bundled model's held-out text."),
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure the gain of each part: eager, with CUDA graphs, compiled, without each pass and, with --alone, with each
    alone.

    Each variant runs in fresh processes with a warm compile cache; repeats are interleaved. The figures are the time
    per output token, a step of decodes and a prompt, prefill, start-up, kernels of a decode step, and memory. The
    variants "compiled in fp8", "compiled in fp8_block" and "compiled in int4", on a GPU "compiled + full in fp8",
    quantise linears while they are loaded; "compiled, int8 cache" and "compiled, fp8_e4m3 cache" have caches of 8 bits.
    These variants are measured only if they are named. They are compared with the whole engine on a text: the loss, and
    how far their distributions are from the whole engine's (Kullback-Leibler divergence, in nats a token).

    A model that reads images also has the time to the first token of a prompt with an image, from its pixels on, and on
    a GPU of 1,024 x 1,024 pixels; "compiled without images", on a GPU "compiled + full without images", is its text
    model alone.

    A variant that fails is marked in the result, the others are kept, and the exit code is 1. Ctrl-C ends the
    measurement in the same way, with the repeats before it.

    JSON: benchmark, variants (name, options, and the figures, each with median and spread, or error; text: num_tokens,
    loss, difference, divergence, same_best), bound, workload, repeats, notes, date, machine, model, options, versions,
    rates, command.

    Examples:

      compiled-engine bench ablation --quick

      compiled-engine bench ablation --shape qwen3-0.6b --alone --output results

      compiled-engine bench ablation --shape qwen3-0.6b --batch 1 --variant compiled --variant "compiled + full" --json

      compiled-engine bench ablation --variant compiled --variant "compiled in fp8" --variant "compiled in fp8_block"
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        from compiled_engine.bench.ablation import Asked, make_plan, run
        from compiled_engine.bench.image_rows import write_processor
        from compiled_engine.bench.shapes import SHAPES
        from compiled_engine.process.progress import RichProgress

        words = None if text is None else read_text("text", text)
        if shape is not None and "vision_config" in SHAPES[shape]:
            write_processor(Path(options["model"]))
        if output is not None:
            make_plot_folder("output", output)
        asked = Asked(
            tuple(batch) if batch else None, prompt_len, output_len, tuple(variant or ()), alone, quick, words
        )
        plan = make_plan(options, shape, asked)
        result = run(plan, repeats or (1 if quick else 3), RichProgress()) | {"command": command_line()}
        if output is not None:
            write_json(output / RESULTS, result)
            write_plots(result, output)
            write_page(result, output / PAGES["ablation"])
    if as_json:
        print_json(result)
    else:
        print_ablation(result)
    failed = [record for record in result["variants"] if "error" in record]
    for record in failed:
        typer.echo(f"compiled-engine: error: variant {record['name']!r} {record['error']}", err=True)
    if failed:
        raise typer.Exit(1)


def ablation_table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row of medians for each variant, and the bounds last."""
    from compiled_engine.bench.results import has_figures

    batches = list(result["bound"]["tpot_ms"])
    with_kernels = any(record.get("kernels") for record in result["variants"])
    with_memory = any(record.get("memory_bytes") for record in result["variants"])
    with_image = any(record.get("image_ms") for record in result["variants"])
    with_text = any(record.get("text") for record in result["variants"])
    headings = [f"{name}\nB={batch}, ms" for name in ("step", "TPOT") for batch in batches]
    headings += ["mixed\nstep, ms", "prefill,\ntok/s", "start-up,\ns"]
    headings += ["image,\nms"] * with_image
    headings += ["kernels"] * with_kernels + ["MiB\nwithout KV", "graphs MiB\n(predicted)"] * with_memory
    headings += ["loss", "KL"] * with_text
    model = result["model"]
    device = result["machine"].get("gpu") or result["machine"]["processor"]
    title = f"{model['name']}, {model['dtype']}, {device}"
    table = aligned(Table("variant", *headings, title=title, box=SIMPLE_HEAD, show_edge=False), 1)
    for record in result["variants"]:
        if not has_figures(record):
            table.add_row(record["name"], "failed")
            continue
        row = [_median(record[name][batch], 3) for name in ("step_ms", "tpot_ms") for batch in batches]
        row += [_median(record["mixed_step_ms"], 2), _median(record["prefill_tokens_per_s"], 0)]
        row += [_median(record["start_up_s"], 1)]
        row += [_median(record.get("image_ms"), 1)] * with_image
        row += [_median(record["kernels"], 0)] * with_kernels
        row += _memory(record["memory_bytes"]) * with_memory
        row += _on_text(record.get("text")) * with_text
        table.add_row(record["name"], *row)
    bound = result["bound"]
    row = [f"{bound[name][batch]:.3f}" for name in ("step_ms", "tpot_ms") for batch in batches]
    table.add_section()
    table.add_row("bound", *row, f"{bound['mixed_step_ms']:.2f}", f"{bound['prefill_tokens_per_s']:,.0f}")
    return table


def print_ablation(result: Mapping[str, Any]) -> None:
    out = console()
    out.print(ablation_table(result))
    print_rates(result["rates"], out)
    for note in result["notes"]:
        out.print(note, highlight=False)


def _median(measured: Mapping[str, Any] | None, digits: int) -> str:
    return "" if measured is None else f"{measured['median']:,.{digits}f}"


def _memory(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return ["", ""]
    mebibytes = {name: figures["median"] / 2**20 for name, figures in measured.items()}
    graphs = f"{mebibytes['graphs_used']:,.0f} ({mebibytes['graphs_predicted']:,.0f})"
    return [f"{mebibytes['without_kv_cache']:,.0f}", graphs]


def _on_text(figures: Mapping[str, Any] | None) -> list[str]:
    """Return a variant's table cells for the loss and the mean divergence on a text; "" for a figure not measured."""
    if figures is None:
        return ["", ""]
    return [f"{figures['loss']:.4f}", f"{figures['divergence']['mean']:.1e}" if "divergence" in figures else ""]
