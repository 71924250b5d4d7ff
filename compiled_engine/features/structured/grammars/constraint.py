"""Tracks a request's position in a compiled grammar, by llguidance, and fills the masks of many requests together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from compiled_engine.features.structured.grammars.string_masks import StringMasks
from compiled_engine.sampling.token_mask import Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# llguidance's messages: for a grammar that allows neither a byte nor the end, and the suffix of errors without a dump.
_NOTHING_MAY_COME = "NoExtensionBias"
_SUFFIX = "\n<non-verbose/>"
# Lines of an error that repeat the grammar, or point into the line above.
_POINTER = re.compile(r"\s*(\^*|\d+ \| .*)\s*")
NO_TEXT = "no text has this form: its rules contradict each other, or lead to each other without end"


class GrammarConstraint:
    """The Constraint of a request's grammar. If the text may end, end-of-sequence tokens are allowed.

    A matcher raises nothing: its error, for example about an exceeded limit, is read after each call.
    """

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, strings: StringMasks | None = None) -> None:
        self.matcher, self.executor, self.strings = matcher, executor, strings

    def accept(self, token_ids: Sequence[int]) -> None:
        if token_ids and not self.matcher.consume_tokens(list(token_ids)):
            raise ValueError(self.failure)
        if self.strings is not None:
            self.strings.accept(token_ids)

    def fill_known(self, words_W: np.ndarray) -> bool:
        """Write the mask if it can be derived without the matcher. Return whether it was written."""
        return self.strings is not None and self.strings.fill(words_W)

    def fill(self, words_W: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self.matcher.is_error():
            raise ValueError(self.failure)

    @property
    def failure(self) -> str:
        """The matcher's error, worded for the user as an error of structured_outputs."""
        return failure_text(self.matcher)


def is_complete(constraint: Constraint | None) -> bool:
    """Return whether the constraint is a grammar that is complete, so that the text may end here."""
    return isinstance(constraint, GrammarConstraint) and constraint.matcher.is_accepting()


def failure_text(matcher: LLMatcher) -> str:
    """Return a failed matcher's error, worded for the user as an error of structured_outputs."""
    return f"structured_outputs: {error_of(matcher)}"


def error_of(matcher: LLMatcher) -> str:
    """Return a matcher's error as one line; empty if there is none."""
    whole = matcher.get_error().removesuffix(_SUFFIX)
    error = " ".join(line.strip() for line in whole.splitlines() if not _POINTER.fullmatch(line))
    return NO_TEXT if error == _NOTHING_MAY_COME else error or " ".join(whole.split())


def fill_together(constraints: Mapping[int, GrammarConstraint], words_MW: np.ndarray) -> dict[int, str]:
    """Fill rows of the masks (int32 [M, W], contiguous) in threads without the GIL. Return errors by row.

    `constraints` maps each row to its constraint.
    """
    if not constraints:
        return {}
    executor = next(iter(constraints.values())).executor
    matchers = [(constraint.matcher, row) for row, constraint in constraints.items()]
    num_rows, num_words = words_MW.shape
    executor.unsafe_compute_mask_ptr(matchers, words_MW.ctypes.data, num_words * words_MW.itemsize, num_rows)
    failures: dict[int, str] = {}
    for row, constraint in constraints.items():
        if constraint.matcher.is_error():
            failures[row] = constraint.failure
        elif constraint.strings is not None:
            constraint.strings.note(words_MW[row], constraint.matcher)
    return failures


# Masks of many requests at once.


def fill_masks(
    asked: Sequence[tuple[Constraint, Sequence[int]]], words_MW: np.ndarray, thread: Executor
) -> Future[dict[int, str]]:
    """Pass each constraint its new tokens, and make it fill its row of the masks, int32 [M, W].

    asked: the constraint and new tokens of each row. Grammars' masks are filled in parallel without the GIL: `thread`
    waits for them, and the caller continues. The future's result has the errors of requests without a mask, by row;
    other requests are not affected.
    """
    failures: dict[int, str] = {}
    grammars: dict[int, GrammarConstraint] = {}
    for row, (constraint, token_ids) in enumerate(asked):
        try:
            constraint.accept(token_ids)
            if isinstance(constraint, GrammarConstraint):
                if not constraint.fill_known(words_MW[row]):
                    grammars[row] = constraint
            else:
                constraint.fill(words_MW[row])
        except ValueError as error:
            failures[row] = str(error)
    if not grammars:
        filled: Future[dict[int, str]] = Future()
        filled.set_result(failures)
        return filled
    begun = Event()

    def fill() -> dict[int, str]:
        begun.set()
        return failures | fill_together(grammars, words_MW)

    filled = thread.submit(fill)
    begun.wait()  # the thread needs the GIL to begin, and would otherwise wait for it while the caller computes
    return filled
