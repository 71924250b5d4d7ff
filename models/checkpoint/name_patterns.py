"""The patterns of adapter_config.json (`alpha_pattern`, `rank_pattern`): regular expressions for the ends of modules'
names, whose values they give.

Anybody may have written them, so they are matched without backtracking, all in one pass over a name, by RE2. It has no
backreferences and no lookaround. Patterns without these mean what Python's `re`, and so PEFT, takes them for.
"""

from __future__ import annotations

import time

from compiled_engine.models.checkpoint.json_fields import JsonFields

# Bounds of all patterns of a field: bytes of what they compile to, and seconds of a thread's work.
MOST_MEMORY, MOST_SECONDS = 32 << 20, 5.0
_SHOWN = 80


class NamePatterns:
    """Numbers for modules, by the first pattern that matches the end of a name after a dot, or all of the name."""

    def __init__(self, fields: JsonFields, name: str) -> None:
        """Raises ValueError, one line with the pattern, for one that cannot be matched in linear time, and for a value
        that is no number above 0."""
        section = fields.section(name)
        self._source = section.source
        self._numbers = [section.number(pattern) for pattern in section.values]
        self._seconds = 0.0
        if not self._numbers:
            return
        import re2  # few adapters have patterns

        options = re2.Options()
        options.max_mem, options.log_errors = MOST_MEMORY, False
        self._set = re2.Set.FullMatchSet(options)
        for pattern in section.values:
            try:
                self._set.Add(rf"(?:.*\.)?(?:{pattern})")
            except (re2.error, UnicodeError) as error:
                shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
                raise ValueError(
                    f"{self._source} must have regular expressions as its names, got {shown!r}; allowed: those without "
                    "lookaround, backreferences, and more than 1,000 repetitions"
                ) from error
        self._set.Add("(?s:.*)")  # found in every name, unless memory does not suffice
        try:
            self._set.Compile()
        except re2.error:
            raise self._too_large() from None

    def number(self, module: str) -> float | None:
        """Return the value for a module; None if no pattern matches. Raises ValueError if that takes too long."""
        if not self._numbers:
            return None
        begin = time.thread_time()
        found = self._set.Match(module)
        self._seconds += time.thread_time() - begin
        if not found or self._seconds > MOST_SECONDS:
            raise self._too_large()
        first = min(found)
        return self._numbers[first] if first < len(self._numbers) else None

    def _too_large(self) -> ValueError:
        return ValueError(f"{self._source} has patterns that are too large, or take too long to match")
