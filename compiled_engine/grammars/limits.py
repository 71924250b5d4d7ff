"""Limits of grammars: requests bring them, and some are made to cost as much as possible."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

# Stack for recursion as deep as its input is long, in bytes of address space, used only as far as the depth needs: the
# longest allowed grammar, with every rule nested in the one before, needs less than a third. A process that exceeds
# its stack is killed.
STACK_BYTES = 512 * 2**20
_STACK_SIZE = threading.Lock()  # the stack size is a setting of the whole process
# Compiled grammars that are kept, the last used.
KEPT_GRAMMARS = 256
# Characters up to which a grammar waits for no larger one, and the seconds after which it counts as a large one.
QUICK_GRAMMAR = 16 << 10
QUICK_COMPILE_S = 0.25
# A request waits at most this long for its grammar, grammars before it included.
LONGEST_COMPILE_S = 10.0
# Memory of one compilation beyond the vocabulary: six times what the largest harmless schema takes.
COMPILE_BYTES = 256 * 2**20

# llguidance's words: a grammar that allows no byte and does not allow the end, and the end of an error without a dump.
_NOTHING_MAY_COME = "NoExtensionBias"
_SUFFIX = "\n<non-verbose/>"
# Lines of an error that repeat the grammar, and those that point into the line above.
_POINTER = re.compile(r"\s*(\^*|\d+ \| .*)\s*")
NO_TEXT = "no text has this form: its rules contradict each other, or lead to each other without end"

Result = TypeVar("Result")


class TakesTooLong(ValueError):
    """A grammar that is not compiled within its limits."""

    def __init__(self) -> None:
        super().__init__(
            f"structured_outputs: the grammar takes more than {LONGEST_COMPILE_S:g} s or {COMPILE_BYTES >> 20} MiB to "
            "compile"
        )


class CompileTime:
    """The time that the grammars of a request may take together, from now on."""

    def __init__(self, seconds: float = LONGEST_COMPILE_S) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left. Raises TakesTooLong if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TakesTooLong
        return seconds


def on_large_stack(work: Callable[[], Result]) -> Result:
    """Run in a thread of its own, and wait. Raises what `work` raises."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="large stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def parser_limits() -> LLParserLimits:
    """Limits of one grammar. Fuel is a count of steps: a thousand take less than a millisecond.

    Exceeding a limit is an error of the request. Not all that compiling does takes fuel.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        max_grammar_size=100_000,
        step_lexer_fuel=20_000,
        step_max_items=3_000,
        max_items_in_row=500,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def failure_text(matcher: LLMatcher) -> str:
    """The error of a matcher that has one, as errors of requests begin."""
    return f"structured_outputs: {error_of(matcher)}"


def error_of(matcher: LLMatcher) -> str:
    """The error of a matcher as one line; empty if there is none."""
    whole = matcher.get_error().removesuffix(_SUFFIX)
    error = " ".join(line.strip() for line in whole.splitlines() if not _POINTER.fullmatch(line))
    return NO_TEXT if error == _NOTHING_MAY_COME else error or " ".join(whole.split())
