"""Error output: bad input and full disks end a command with one line on stderr and exit code 2.

Ctrl-C ends a command with exit code 130. Other errors are not caught.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from compiled_engine.process.child import replace_missing_streams

# click's UsageError: recent versions of typer have their own copy of click.
UsageError: Any = typer.BadParameter.__bases__[0]


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BadInputError(Exception):
    """Ends a command with one line on stderr instead of a traceback. The message is that line."""


@contextmanager
def bad_input_is_reported(
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, OSError, MemoryError),
) -> Iterator[None]:
    """Convert errors of these kinds in the block, except BrokenPipeError, to BadInputError."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has exited: not an input error
        raise
    except kinds as error:
        raise BadInputError(str(error)) from error


def read_text(name: str, path: Path) -> str:
    """Read a text file. Raises ValueError, which names the option, if it cannot be read, is not UTF-8, or is empty."""
    try:
        words = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name} is {str(path)!r}, which cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is {str(path)!r}, which is not UTF-8: {error}") from error
    if not words.strip():
        raise ValueError(f"{name} is {str(path)!r}, which is empty; allowed: a file with text")
    return words


class OneLineErrors(TyperGroup):
    """A command group that prints usage errors, `BadInputError` and full disks as one line without a traceback."""

    def main(self, args: Any = None, *more: Any, **settings: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        replace_missing_streams()
        try:
            code = super().main(given or ["--help"], *more, **{**settings, "standalone_mode": False})
            sys.stdout.flush()
        except UsageError as error:
            if not error.format_message():  # no command was given: its help was shown
                sys.exit(0)
            _exit_with(f"{error.format_message()}{_origin(error, given)}")
        except BadInputError as error:
            _exit_with(str(error))
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            _forget_output()
            _exit_with(f"cannot write {error.filename or 'the output'}: {error.strerror}")
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


def _origin(error: Any, given: Sequence[str]) -> str:
    """Return the invalid value and its origin as the end of an error message; "" if the origin is unknown.

    The origin is the command line `given`, the environment, or a YAML file.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return ""
    match getattr(context.get_parameter_source(parameter.name), "name", None):
        case "ENVIRONMENT":
            names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar
            name = next((each for each in names if os.environ.get(each)), names[0])
            return f" (the environment has {name}={os.environ.get(name)!r})"
        case "DEFAULT_MAP":
            return f" (the file of --config has {context.lookup_default(parameter.name)!r})"
        case "COMMANDLINE" if values := _values(parameter.opts, given):
            return f" (got {', '.join(map(repr, values))})"
    return ""


def _values(names: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the values that the command line `given` has for the option with these `names`."""
    after = [value for name, value in pairwise(given) if name in names]
    return after + [value for name, sep, value in (word.partition("=") for word in given) if sep and name in names]


def _exit_with(message: str) -> NoReturn:
    typer.echo(f"compiled-engine: error: {' '.join(message.split())}", err=True)
    sys.exit(2)


def _forget_output() -> None:
    """Discard unwritten output, so that the interpreter does not retry at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
