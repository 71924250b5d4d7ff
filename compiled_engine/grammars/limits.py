"""What a grammar may cost. Requests bring grammars, so each of these is met by an attack."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Compiled grammars that are kept, the last used; and characters up to which one waits for no larger one.
KEPT_GRAMMARS = 256
QUICK_GRAMMAR = 16 << 10
# A request waits so long for its grammar, other requests' grammars before it included.
LONGEST_COMPILE_S = 10.0


def mask_threads() -> int:
    """Threads that fill masks: few masks take long, so more would wait for each other rather than help."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def parser_limits() -> LLParserLimits:
    """Of one grammar. Fuel is a count of steps: a thousand take less than a millisecond.

    A compilation or a mask that needs more is an error of its request.
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
