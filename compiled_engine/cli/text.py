"""Prompts and completions on a terminal: the prompt in bold, the completion as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from compiled_engine.frontend.outputs import RequestOutput


def print_stream(prompt: str, stream: Iterable[RequestOutput]) -> RequestOutput:
    """Print a stream of one completion; give the last output."""
    typer.secho(prompt, bold=True, nl=False)
    shown = 0
    try:
        for output in stream:
            text = output.outputs[0].text
            typer.echo(text[shown:], nl=False)
            shown = len(text)
    finally:
        typer.echo()
    return output


def print_completions(outputs: Sequence[RequestOutput]) -> None:
    """Print finished outputs, each completion after its prompt, with a blank line between two."""
    for index, (output, completion) in enumerate((o, c) for o in outputs for c in o.outputs):
        if index:
            typer.echo()
        typer.secho(output.prompt, bold=True, nl=False)
        typer.echo(completion.text)
