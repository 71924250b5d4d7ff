"""Shared parts of benchmark commands: options, the configuration to measure, the command line in results."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compiled_engine.bench.shapes import SHAPES, write_shape

HIDDEN = "..."
CACHES = "; a small model may stay in caches, and be faster"

ShapeName = Annotated[str | None, typer.Option(help=f"Random weights of this shape: {', '.join(SHAPES)}.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measured rounds.")]
WarmUp = Annotated[int, typer.Option("--warm-up", min=0, help="Uncounted rounds before the measured ones.")]
Batch = Annotated[list[int] | None, typer.Option(min=1, help="Batch size; may be repeated.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run: seconds to a minute with the bundled model.")]


@contextmanager
def engine_options(options: dict[str, Any], shape: str | None) -> Iterator[dict[str, Any]]:
    """Yield the engine's options. With `shape`, the model is a temporary folder of that shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        if shape is not None:
            if "model" in options:
                raise ValueError(f"model is {options['model']} and shape is {shape}; allowed: one of the two")
            options = {"load_format": "dummy"} | options | {"model": write_shape(Path(folder), shape)}
        yield options


def resolved(options: Mapping[str, Any]) -> Any:
    """Return the configuration for these options, without loading anything. Raises ValueError or TypeError."""
    from compiled_engine.other_engines.translate import make_options
    from compiled_engine.resolve.engine import resolve

    return resolve(make_options(options))


def require_fit(config: Any, requests_at_once: int, longest: int) -> None:
    """Raise ValueError unless the configuration allows `requests_at_once` requests and `longest` tokens per request."""
    if config.scheduler.max_num_seqs < requests_at_once:
        raise ValueError(f"max_num_seqs is {config.scheduler.max_num_seqs}; allowed: at least {requests_at_once}")
    if config.model.max_model_len < longest:
        raise ValueError(
            f"max_model_len is {config.model.max_model_len}; allowed: at least {longest}, prompt and output together"
        )


def command_line(secrets: Collection[str] = ()) -> str:
    """Return the command that started the process, without passwords in URLs.

    secrets: names of options whose values are hidden.
    """
    words = list(sys.argv[1:])
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if index and words[index - 1] in secrets:
            words[index] = HIDDEN
        elif equals and name in secrets:
            words[index] = f"{name}={HIDDEN}"
        else:
            words[index] = without_password(word)
    return shlex.join(["compiled-engine", *words])


def without_password(url: str) -> str:
    """Return a URL without user and password."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", url)


def print_rates(rates: Mapping[str, Any], out: Console) -> None:
    """Print the rates of memory and arithmetic that the bounds assume."""
    out.print(
        f"bound: {rates['bytes_per_s'] / 1e12:.3g} TB/s and {rates['flops_per_s'] / 1e12:.3g} TFLOP/s,"
        f" {rates['source']}" + CACHES * (not rates["source"].startswith("known")),
        style="dim",
        highlight=False,
    )
