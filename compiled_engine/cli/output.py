"""Output of commands: tables and JSON on stdout, files and their folders."""

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
    """Return a console for plain text. Without a terminal it is `width` characters wide."""
    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)


def aligned(table: Table, num_names: int) -> Table:
    """Right-align all columns but the first `num_names`, which do not wrap. Changes and returns the table."""
    for column in table.columns[num_names:]:
        column.justify = "right"
    for column in table.columns[:num_names]:
        column.no_wrap = True
    return table


def write_json(path: Path | None, result: Any) -> None:
    """Write a result as JSON to `path`. None writes nothing."""
    if path is not None:
        with written_to(path):
            path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Add the file name to an OSError of the block that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(name: str, folder: Path) -> None:
    """Make a folder for results before they are computed.

    Raises ValueError, which names the option, if a file is in the folder's place or the folder cannot be written to.
    """
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
    """Make the folder of a result file before the result is computed; None means no file.

    Raises ValueError, which names the option, if the path is a folder, and the errors of `make_folder`.
    """
    if path is not None:
        if path.is_dir():
            raise ValueError(f"{name} is {str(path)!r}, a folder; allowed: a file")
        make_folder(name, path.absolute().parent)
