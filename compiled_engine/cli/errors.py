"""Bad input ends a command with one line on stderr and exit code 2; nothing else is caught."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

# click's UsageError: recent versions of typer have their own copy of click.
UsageError: Any = typer.BadParameter.__bases__[0]


class BadInputError(Exception):
    """What the user gave cannot be used; the message says what and why."""


@contextmanager
def bad_input_is_reported(
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, OSError, MemoryError),
) -> Iterator[None]:
    """Around what checks the user's input: its errors of these kinds are the user's, not the program's."""
    try:
        yield
    except kinds as error:
        raise BadInputError(str(error)) from error


class OneLineErrors(TyperGroup):
    """A group of commands whose usage errors and `BadInputError` are one line on stderr, without a traceback."""

    def main(self, args: Any = None, *more: Any, **settings: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given or ["--help"], *more, **{**settings, "standalone_mode": False})
        except UsageError as error:
            if not error.format_message():  # no command was given: its help was shown
                sys.exit(0)
            _exit_with(error.format_message())
        except BadInputError as error:
            _exit_with(str(error))
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


def _exit_with(message: str) -> NoReturn:
    typer.echo(f"compiled-engine: error: {' '.join(message.split())}", err=True)
    sys.exit(2)
