"""The masks of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from threading import Event

import numpy as np

from compiled_engine.grammars.constraint import GrammarConstraint, fill_together
from compiled_engine.sampling.token_mask import Constraint


def fill_masks(
    asked: Sequence[tuple[Constraint, Sequence[int]]], words_MW: np.ndarray, thread: Executor
) -> Future[dict[int, str]]:
    """Tell each constraint of its new tokens and have it fill its row of the masks, int32 [M, W].

    Those of grammars are filled side by side and without the GIL: `thread` waits for them, and the caller goes on. What
    comes of it is why some have no mask, by row; the others are not disturbed.
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
    begun.wait()  # to begin takes the GIL, for which the thread would wait as long as the caller computes
    return filled
