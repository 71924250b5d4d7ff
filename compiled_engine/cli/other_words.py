"""Accept other engines' options on the command line and in YAML files, and translate them to the command's options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.word_division import divide
from compiled_engine.other_engines.bench_words import BENCH
from compiled_engine.other_engines.keywords import KEYWORDS, Rows
from compiled_engine.other_engines.translate import DEFAULTS, is_on_gpu, translate


class EngineCommand(TyperCommand):
    """A command with the engine's options, which also accepts other engines' options."""

    rows: ClassVar[Rows] = KEYWORDS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with bad_input_is_reported((ValueError, TypeError)):
            words = divide(args, self.get_params(ctx), self.rows)
        rest = super().parse_args(ctx, words.own)
        if not ctx.resilient_parsing:
            options = [param for param in self.params if param.param_type_name == "option"]
            own = {param.name: value for param in options if (value := _given(ctx, param)) is not None}
            found = own_values(self, {**own, **words.others})
            for param in options:
                if found.get(param.name) != own.get(param.name):
                    ctx.params[param.name] = as_read(param, found.get(param.name))
        return rest


class BenchServeCommand(TyperCommand):
    """The command `bench serve`, which also accepts the options of vLLM's `bench serve`."""

    rows: ClassVar[Rows] = BENCH

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with bad_input_is_reported((ValueError, TypeError)):
            words = divide(args, self.get_params(ctx), self.rows)
        flags = {param.name: param.opts[0] for param in self.params}
        for name, value in own_values(self, words.others).items():
            words.own += [flags[name]] if value is True else [flags[name], str(value)]
        return super().parse_args(ctx, words.own)


def own_values(command: Any, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command's options, name -> value, for `words`, which may include another engine's options.

    Prints the given options that have no effect to stderr. Raises BadInputError for values that cannot be translated.
    """
    defaults = {param.name: DEFAULTS.get(param.name, param.default) for param in command.params}
    with bad_input_is_reported((ValueError, TypeError)):
        found = translate(
            words, on_gpu=lambda: is_on_gpu(words.get("device", "auto")), rows=command.rows, defaults=defaults
        )
    if found.ignored:
        typer.echo(f"compiled-engine: without effect: {found.note}", err=True)
    return found.options


def as_read(param: Any, value: Any) -> Any:
    """Convert an option's value to the form that the command line parser gives it. None means that it is not given."""
    if value is None:
        return None
    if param.is_flag:
        return not value if _negates(param) else value
    if param.multiple:
        return list(value) or [0]  # 0 stands for an empty list
    return json.dumps(value) if isinstance(value, Mapping) else value


def _negates(param: Any) -> bool:
    return bool(param.opts[0].startswith("--no-") and not param.secondary_opts)


def _given(ctx: Any, param: Any) -> Any:
    """Return an option's value as the engine's options take it; None if it is not given."""
    value = ctx.params.get(param.name)
    if value in (None, [], ()) or getattr(ctx.get_parameter_source(param.name), "name", "DEFAULT") == "DEFAULT":
        return None
    if getattr(param, "is_flag", False):
        return not value if _negates(param) else value
    if getattr(param, "multiple", False):
        return () if value == [0] else tuple(value)
    return str(value) if isinstance(value, Path) else value
