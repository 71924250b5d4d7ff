"""`compiled-engine bench loss`: the change of a text's loss with bfloat16 and quantised linears."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from compiled_engine.cli.bench_engine import command_line
from compiled_engine.cli.errors import bad_input_is_reported, read_text
from compiled_engine.cli.output import AsJson, aligned, console, print_json


def loss(
    *,
    model: Annotated[str | None, typer.Option(help="Unquantised checkpoint. Default: the bundled model.")] = None,
    quantised: Annotated[
        str | None, typer.Option(help="Checkpoint made of the model, to compare instead of the schemes.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text in UTF-8. Without it the bundled model's held-out text.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare the loss on text: float32, bfloat16, and linears quantised in each scheme.

    It also shows how far each distribution is from that of float32 (Kullback-Leibler divergence, in nats), and for how
    many tokens the most likely one is the same. The distributions of float32 are kept in memory, so texts should have
    no more than some ten thousand tokens.

    With --quantised, a checkpoint that was made of the model is compared, in place of the schemes.

    JSON: benchmark, num_tokens, rows (name, loss, difference, divergence: mean and p99, same_best), date, machine,
    model, options, versions, command.

    Examples:

      compiled-engine bench loss

      compiled-engine bench loss --model path/to/Qwen3-0.6B --text held_out.txt --json

      compiled-engine bench loss --model path/to/Qwen3-0.6B --quantised Qwen3-0.6B-W4A16 --text held_out.txt
    """
    with bad_input_is_reported():
        from compiled_engine.models.bundled import BUNDLED_MODEL_PATH

        words = read_text("text", text or BUNDLED_MODEL_PATH / "held_out.txt")

        from compiled_engine.bench.held_out_loss import VARIANTS, compare_losses, with_folder
        from compiled_engine.options import EngineOptions
        from compiled_engine.process.progress import RichProgress
        from compiled_engine.resolve.engine import resolve

        if quantised is not None:  # the engine before it takes long
            resolve(EngineOptions(model=quantised, device=device))
        variants = VARIANTS if quantised is None else with_folder(quantised)
        result = compare_losses(model, words, {"device": device}, RichProgress(), variants)
        result |= {"command": command_line()}
    if as_json:
        print_json(result)
    else:
        console().print(loss_table(result))


def loss_table(result: dict[str, Any]) -> Table:
    headings = ["loss", "difference", "divergence", "99th percentile", "same best"]
    title = f"{result['model']['name']}, {result['num_tokens']:,} tokens, nats"
    table = aligned(Table("", *headings, title=title, box=SIMPLE_HEAD, show_edge=False), 1)
    for row in result["rows"]:
        cells = [f"{row['loss']:.4f}"]
        if "divergence" in row:
            cells += [f"{row['difference']:+.4f}", *(f"{row['divergence'][name]:.1e}" for name in ("mean", "p99"))]
            cells.append(f"{row['same_best']:.1%}")
        table.add_row(row["name"], *cells)
    return table
