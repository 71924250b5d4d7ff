"""Match module names against the fields `alpha_pattern` and `rank_pattern` of adapter_config.json.

Such a field maps regular expressions for the ends of module names to numbers. The patterns are untrusted; therefore RE2
matches all of them in one pass, in linear time. RE2 has no backreferences and no lookaround; other patterns mean the
same as in Python's `re`, which PEFT uses.
"""

from __future__ import annotations

import time

from compiled_engine.models.checkpoint.json_fields import JsonFields

# Limits for all patterns of a field together: bytes of the compiled patterns, and seconds of CPU time for matching.
MOST_MEMORY, MOST_SECONDS = 32 << 20, 5.0
_SHOWN = 80


class NamePatterns:
    """Assigns numbers to modules by patterns of module names.

    A module gets the number of the first pattern that matches its whole name, or the end of its name after a dot.
    """

    def __init__(self, fields: JsonFields, name: str) -> None:
        """Compile the patterns of the field `name`.

        Raises ValueError, with one line that names the pattern, if a pattern is not supported by RE2 or its value is
        not a number above 0. Also raises ValueError if the compiled patterns take more than MOST_MEMORY bytes.
        """
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
        self._set.Add("(?s:.*)")  # matches every name, so that no match at all means out of memory
        try:
            self._set.Compile()
        except re2.error:
            raise self._too_large() from None

    def number(self, module: str) -> float | None:
        """Return the number of the first pattern that matches a module's name; None if no pattern does.

        Raises ValueError if matching runs out of memory, or has taken more than MOST_SECONDS over all calls.
        """
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
