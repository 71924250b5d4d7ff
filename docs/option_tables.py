"""The tables of options in the documents, from what the code declares. Each function returns Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiled_engine.cli.arguments import Argument
from compiled_engine.options import EngineOptions
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import Declaration, declarations, described


def engine_options() -> str:
    """The keywords of `LLM`, each with the option of the command line where that has another name."""
    return table("option", (row(each, *written_otherwise(each)) for each in declarations(EngineOptions)))


def sampling_parameters() -> str:
    return table("field", map(row, declarations(SamplingParams)))


def table(heading: str, rows: Iterator[str]) -> str:
    return "\n".join([f"| {heading} | default | meaning |", "|---|---|---|", *rows])


def row(declaration: Declaration, *notes: str) -> str:
    meaning = described(declaration) + (f" ({', '.join(notes)})" if notes else "")
    return f"| `{declaration.name}` | `{declaration.default!r}` | {meaning} |"


def written_otherwise(declaration: Declaration) -> Iterator[str]:
    """How the command line writes an option that is no rule's."""
    argument: Any = Argument(declaration)
    if argument.written != f"--{declaration.name.replace('_', '-')}":
        yield f"`{argument.written}`"
    if declaration.several:
        yield "may be repeated"
