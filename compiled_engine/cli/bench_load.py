"""`compiled-engine bench load`: how fast a checkpoint loads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compiled_engine.bench.shapes import SHAPES
from compiled_engine.cli.bench_engine import command_line
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, print_json


def load(
    *,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder to load.")] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Write and load a random checkpoint of this shape: {', '.join(SHAPES)}.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for the checkpoint. Default: a temporary one.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Reads and loads.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a checkpoint loads, against reading its files from start to end in the same cache state.

    Examples:

      compiled-engine bench load --shape qwen3-8b

      compiled-engine bench load --model path/to/Qwen3-8B --json
    """
    with bad_input_is_reported(), tempfile.TemporaryDirectory() as temporary:
        if (model is None) == (shape is None):
            raise ValueError(f"model is {model} and shape is {shape}; allowed: exactly one of the two")
        result = _measure_load(model, shape, folder or Path(temporary), device, repeats)
    if as_json:
        print_json(result)
        return
    table = Table("", "", title=f"{result['bytes'] / 1e9:.1f} GB to {result['device']}")
    table.add_row("read, GB/s", ", ".join(f"{rate:.2f}" for rate in result["read_gb_per_s"]))
    table.add_row("load, GB/s", ", ".join(f"{rate:.2f}" for rate in result["load_gb_per_s"]))
    table.add_row("load / read (medians)", f"{result['load_over_read']:.0%}")
    table.add_row("peak host memory, MiB", f"{result['host_peak_bytes'] / 2**20:.0f}")
    table.add_row("largest tensor, MiB", f"{result['largest_tensor_bytes'] / 2**20:.0f}")
    Console().print(table)


def _measure_load(model: Path | None, shape: str | None, folder: Path, device: str, repeats: int) -> dict[str, Any]:
    from compiled_engine.bench.load_rate import measure, write_random_checkpoint
    from compiled_engine.bench.results import provenance
    from compiled_engine.process.progress import RichProgress
    from compiled_engine.resolve.engine import resolve_device

    progress = RichProgress()
    target = resolve_device(device, {})
    if shape is not None:
        model = write_random_checkpoint(folder, shape, target, progress)
    assert model is not None
    result = measure(model, target, progress, repeats)
    return {"benchmark": "load", "repeats": repeats, "command": command_line()} | provenance(target) | result
