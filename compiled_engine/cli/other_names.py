"""The names that options of other engines have here, for errors about unknown options."""

from __future__ import annotations

from collections.abc import Mapping

from compiled_engine.other_engines.keywords import KEYWORDS, Honoured, Nested, Only, WithoutEffect
from compiled_engine.schema import plain


def other_name(written: str, flags: Mapping[str, str]) -> str | None:
    """Return what to do instead of giving an option of another engine; None for a name that none has.

    written: with or without dashes in front, and with dashes or underscores between words. flags: how the command
    writes its own options, by their names.
    """
    name = written.lstrip("-").replace("-", "_")
    match KEYWORDS.get(name, KEYWORDS.get(name.removeprefix("no_"))):
        case Honoured(choices={False: {}}) if name.startswith("no_"):
            return "leave it out: it is so by default"
        case Honoured(option=str(option)) if option in flags:
            return f"use {flags[option]}"
        case Honoured(choices={True: chosen}) if chosen and set(chosen) <= set(flags):
            return "use " + " ".join(f"{flags[option]} {value}" for option, value in chosen.items())
        case Honoured(means=means, option=None):
            return f"here: {plain(means)}"
        case Only(feature=feature, instead=instead):
            return f"{feature} is not supported; {instead}"
        case Nested():
            return "its keys are options of their own here, see docs/switching.md"
        case WithoutEffect(reason=reason):
            return f"leave it out: {reason}"
    return None
