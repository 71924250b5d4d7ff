"""The output of commands: tables and JSON on stdout, files, and the folders for them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(result: Any) -> None:
    typer.echo(json.dumps(result, indent=2))


def console(width: int = 160) -> Console:
    """Make a console for plain text; without a terminal its width is `width`, enough for every column."""
    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)


def aligned(table: Table, num_names: int) -> Table:
    """Figures to the right."""
    for column in table.columns[num_names:]:
        column.justify = "right"
    for column in table.columns[:num_names]:
        column.no_wrap = True
    return table


def write_json(path: Path | None, result: Any) -> None:
    """Write a result to its file, if there is one."""
    if path is not None:
        with written_to(path):
            path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the block that writes it: Python leaves the name out if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(name: str, folder: Path) -> None:
    """Make a folder for results, before the work.

    Raises ValueError, naming the option, for a file in its place or way, and where it cannot be written to."""
    given = f"{name} is {str(folder)!r}"
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{given}, {'a file' if part == folder else f'but {part} is a file'}; allowed: a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{given}, a folder that cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{given}; allowed: a folder that can be written to")


def make_room(name: str, path: Path | None) -> None:
    """Make the folder of a file for results, before the work; None: no file.

    Raises ValueError, naming the option, if the path is a folder, and what `make_folder` raises.
    """
    if path is not None:
        if path.is_dir():
            raise ValueError(f"{name} is {str(path)!r}, a folder; allowed: a file")
        make_folder(name, path.absolute().parent)
