"""`compiled-engine tune`: measure kernels and passes on this GPU, and save the result as its profile."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import make_room, written_to


def tune(
    *,
    shape: Annotated[list[str] | None, typer.Option(help="qwen3-0.6b or qwen3-8b; may be repeated.")] = None,
    model: Annotated[list[Path] | None, typer.Option(help="Checkpoint folder with a shape; may be repeated.")] = None,
    tensor_parallel_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of ranks whose shares of linears are measured; may be repeated. Default: 1."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: the profile that the engine reads at its start."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure only the tiles that are likely to be fastest, and no gains of passes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
) -> None:
    """Measure kernel tiles and what each pass gains on this GPU, for models of these shapes.

    The engine reads the result when it starts, and tunes nothing itself. Other shapes of an existing profile are kept.
    Takes some minutes, less with --quick; needs a CUDA GPU. The file is written anew whenever some linears have been
    measured, so an interrupted run keeps what it has.

    Examples:

      compiled-engine tune --shape qwen3-0.6b --shape qwen3-8b

      compiled-engine tune --quick --model path/to/Llama-3.1-8B

      compiled-engine tune --model path/to/Llama-3.1-8B -o profile.json

      compiled-engine tune --shape qwen3-8b --tensor-parallel-size 1 --tensor-parallel-size 2
    """
    with bad_input_is_reported(), tempfile.TemporaryDirectory() as temporary:
        from compiled_engine.bench.shapes import write_shape
        from compiled_engine.passes.framework.profile import profile_path
        from compiled_engine.process.progress import RichProgress, WithTimeLeft
        from compiled_engine.tune.device_tuning import (
            MeasuredProfile,
            device_name,
            merged,
            profile_text,
            tune_device,
        )

        device = device_name()
        folders = [write_shape(Path(temporary) / name, name) for name in shape or ()]
        folders += model or ()
        if not folders:
            raise ValueError("shape and model are empty; allowed: at least one of them")
        path = output or profile_path(device)
        old = _checked(path)

        def joined(measured: MeasuredProfile) -> dict[str, Any]:
            return measured.as_record() if old is None else merged(measured, old)

        written = False

        def keep(measured: MeasuredProfile) -> None:
            nonlocal written
            _write(path, profile_text(joined(measured)))
            written = True

        try:
            measured = tune_device(
                folders, WithTimeLeft(RichProgress()), tensor_parallel_size or (1,), keep, quick=quick
            )
        except KeyboardInterrupt:
            typer.echo(f"interrupted: what was measured is in {path}" if written else "nothing was measured", err=True)
            raise
        new, profile = measured.as_record(), joined(measured)
    if as_json:
        typer.echo(profile_text(profile))
        return
    table = Table("tokens", "rows", "columns", "silu * up", "us", "cuBLAS us", "bound us", title=device)
    for row in new["linears"]:
        figures = [f"{row[name]:.2f}" for name in ("us", "cublas_us", "bound_us")]
        table.add_row(str(row["tokens"]), str(row["num_rows"]), str(row["k"]), str(row["silu_mul"]), *figures)
    Console().print(table)
    for name, by_tokens in new["gains_us"].items():
        gains = ", ".join(f"{gain:+.1f} at {tokens}" for tokens, gain in by_tokens.items())
        Console().print(f"{name}: microseconds a step saved, at tokens: {gains}")
    typer.echo(f"written to {path}")


def _write(path: Path, text: str) -> None:
    """Write a file at once, so that an interrupted run leaves no part of a profile."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with written_to(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _checked(path: Path) -> dict[str, Any] | None:
    """Return the existing profile; None without one. Raises ValueError for a file that is unwritable or no profile."""
    make_room("output", path)
    if not path.exists():
        return None
    if not os.access(path, os.W_OK):
        raise ValueError(f"output is {str(path)!r}; allowed: a file that can be written to")
    from compiled_engine.passes.framework.profile import parse_profile

    try:
        text = path.read_text(encoding="utf-8")
        parse_profile(text)
        return dict(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"output is {str(path)!r}, which is no profile of a device ({error})") from error
