"""Command line options, generated from the declared options of the engine, sampling and the server.

The command line takes precedence over the environment, and the environment over a YAML file. Only `serve` reads the
environment and YAML files.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from compiled_engine.cli.errors import BadInputError, bad_input_is_reported
from compiled_engine.cli.other_words import as_read, own_values
from compiled_engine.cli.word_division import OBJECTS, find_row, is_number_of_other_kind, with_unit
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.serve_words import VARIABLES
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import Declaration, JsonSchema, declarations, plain, unknown_name_message

ENVIRONMENT = "COMPILED_ENGINE_"
# Options whose environment variables the engine reads itself.
READ_BY_THE_ENGINE = ("cache_dir",)
TYPES: dict[str, type] = {"integer": int, "number": float, "boolean": bool}


@dataclass(frozen=True)
class Argument:
    """A declared field as a command line option. The command receives a value only if the option was given."""

    declaration: Declaration

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def type(self) -> Any:
        """The Python type to which typer converts the option's text."""
        return _type(self.declaration.schema)

    @property
    def written(self) -> str:
        """The option's spelling, such as --max-num-seqs.

        A Boolean field is spelled --no-NAME if its default is True, and --NAME/--no-NAME if its default is None.
        """
        if self.declaration.flag:
            return self.declaration.flag
        name = self.name.replace("_", "-")
        if self.type is not bool:
            return f"--{name}"
        return {True: f"--no-{name}", False: f"--{name}", None: f"--{name}/--no-{name}"}[self.declaration.default]

    @property
    def variable(self) -> str:
        """The option's environment variable: the prefix ENVIRONMENT, then the spelling in capitals with underscores."""
        return ENVIRONMENT + self.written.split("/")[0].removeprefix("--").replace("-", "_").upper()

    @property
    def help(self) -> str:
        """The field's description as a sentence without markup."""
        text = ("do not " if self.negates else "") + self.declaration.text
        text += "; may be repeated" * self.declaration.several + "; 0 for none" * self._may_be_emptied
        shown = plain(text)
        return f"{shown if text[0] == '`' else shown[0].upper() + shown[1:]}."

    @property
    def defaults(self) -> tuple[Any, ...]:
        """The default values. Empty if there are none, or if the default is a Boolean, which the spelling implies."""
        default = self.declaration.default
        if default in (None, (), "") or isinstance(default, bool):
            return ()
        return default if isinstance(default, tuple) else (default,)

    @property
    def default(self) -> str:
        """The default as a sentence of the help; "" if there is none to show."""
        shown, meaning = ", ".join(map(str, self.defaults)), plain(self.declaration.default_is)
        if shown and meaning:
            return f" Default: {shown} ({meaning})."
        return f" Default: {shown or meaning}." if shown or meaning else ""

    def converted(self, value: Any) -> Any:
        """Convert a value read by typer to the field's type."""
        if self.negates:
            return not value
        if self.declaration.several:
            return () if self._may_be_emptied and value == [0] else tuple(value)
        if isinstance(value, Path):
            return str(value)
        is_number = "anyOf" in self.declaration.schema and isinstance(value, str) and value.isdecimal()
        return int(value) if is_number else value

    def parameter(self, panel: str, *, from_environment: bool, with_default: bool) -> inspect.Parameter:
        if "/" in self.written:  # the second name's column would cut off names of other options
            panel = f"{panel}: on or off"
        own = [self.variable] * (from_environment and self.name not in READ_BY_THE_ENGINE)
        others = VARIABLES.get(self.name, ()) if from_environment else ()
        option = typer.Option(
            None,
            self.written,
            metavar="<list>" if self.declaration.several else None,  # a longer one would cut off names of options
            help=self.help + self.default * with_default,
            rich_help_panel=panel,
            show_default=False,
            envvar=[*own, *others] or None,
            show_envvar=False,
        )
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=self.type | None)

    @property
    def negates(self) -> bool:
        """Whether the option sets the field to False, because the default is True."""
        return self.declaration.default is True

    @property
    def _may_be_emptied(self) -> bool:
        """Whether the option takes 0 for an empty list.

        It does if an empty list differs from the default None, and 0 is no valid entry.
        """
        items = self.declaration.schema.get("items", {})
        return self.declaration.default is None and items.get("minimum") == 1


def _type(schema: JsonSchema) -> Any:
    if schema.get("type") == "array":
        return list[_type(schema["items"])]  # type: ignore[misc]
    return Path if schema.get("format") == "path" else TYPES.get(schema.get("type", ""), str)


def arguments_of(options: type[Any]) -> tuple[Argument, ...]:
    """Return a dataclass's options whose values can be written on a command line."""
    return tuple(
        Argument(each) for each in declarations(options) if each.flag is not None and _can_be_written(each.schema)
    )


def _can_be_written(schema: JsonSchema) -> bool:
    if schema.get("type") == "array":
        return _can_be_written(schema["items"]) and schema["items"].get("type") != "array"
    return bool(schema) and schema.get("type") != "object"


ENGINE_ARGUMENTS = arguments_of(EngineOptions)
SAMPLING_ARGUMENTS = arguments_of(SamplingParams)

Command = Callable[..., Any]


def takes_engine_options(command: Command) -> Command:
    """Add the engine's options to a command. The command receives the given options as the dict `engine`."""
    return takes_options(command, "engine", "Engine", ENGINE_ARGUMENTS)


def takes_sampling_params(command: Command) -> Command:
    """Add sampling parameters to a command. The command receives the given parameters as the dict `sampling`."""
    panel = "Sampling (if not given: the checkpoint's defaults)"
    return takes_options(command, "sampling", panel, SAMPLING_ARGUMENTS, with_defaults=False)


def takes_options(
    command: Command,
    keyword: str,
    panel: str,
    arguments: Sequence[Argument],
    *,
    from_environment: bool = False,
    with_defaults: bool = True,
) -> Command:
    """Add options to a command. The command receives the given options as a dict under `keyword`.

    typer reads options from a function's signature, so the returned wrapper's signature has a parameter for each
    option.
    """
    shown = {"from_environment": from_environment, "with_default": with_defaults}
    added = [argument.parameter(panel, **shown) for argument in arguments]
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != keyword]

    def wrapper(**values: Any) -> Any:
        given = {}
        for argument in arguments:
            value = values.pop(argument.name)
            if value not in (None, []):
                with bad_input_is_reported((ValueError,)):
                    given[argument.name] = argument.converted(value)
        return command(**values, **{keyword: given})

    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return wrapper


def as_written(arguments: Sequence[Argument], given: Mapping[str, Any]) -> list[str]:
    """Return the command line words that set the options to the `given` values: the reverse of parsing."""
    words: list[str] = []
    for argument in arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        if argument.type is bool:
            on, _, off = argument.written.partition("/")
            words.append(on if value or not off else off)
        elif isinstance(value, tuple | list):
            words += [word for each in value or (0,) for word in (argument.written, str(each))]
        else:
            words += [argument.written, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words


def take_model(named: str | None, engine: dict[str, Any]) -> None:
    """Set `engine["model"]` to the argument MODEL, in place. Raises BadInputError if --model names another model."""
    if named is not None and engine.setdefault("model", named) != named:
        raise BadInputError(f"the model is given twice, as {named!r} and as {engine['model']!r}")


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a YAML file the defaults of the command's options, as a callback for typer. Returns `path`.

    Raises typer.BadParameter if the file cannot be read, is no mapping of option names to values, or has an unknown
    name or an invalid value.
    """
    if path is None or context.resilient_parsing:
        return path
    try:
        import yaml
    except ImportError as error:
        raise typer.BadParameter("a YAML file needs pyyaml: python -m pip install 'compiled-engine[serve]'") from error
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{str(path)!r} must hold option names with their values")
    names = _names_of_options(context)
    params = {parameter.name: parameter for parameter in context.command.params}
    rows = getattr(context.command, "rows", {})
    defaults: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for written, value in values.items():
        name, negates = names.get(str(written).replace("-", "_"), (None, False))
        if name is None:
            if (found := find_row(rows, str(written))) is None:
                known = {*names, *rows}
                raise typer.BadParameter(
                    unknown_name_message(f"{str(path)!r} has the unknown option", str(written), known)
                )
            others[found[0]] = not value if found[1] else value
            continue
        if isinstance(value, dict) and name in OBJECTS:
            defaults[name] = json.dumps(value, default=str)  # YAML has dates
            continue
        if isinstance(value, dict) or value is None:
            raise typer.BadParameter(f"{written} in {str(path)!r} must be a value or a list, got {value!r}")
        if negates and not isinstance(value, bool):
            raise typer.BadParameter(f"{written} in {str(path)!r} must be true or false, got {value!r}")
        parameter = params[name]
        if is_number_of_other_kind(name, given := with_unit(name, value), rows):
            others[name] = given
            continue
        several = getattr(parameter, "multiple", False) and not isinstance(given, list)
        defaults[name] = [given] if several else not given if negates else given
    if others:
        own = own_values(context.command, others)
        defaults |= {name: as_read(params[name], value) for name, value in own.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _names_of_options(context: typer.Context) -> dict[str, tuple[str, bool]]:
    """Map each spelling of an option to its parameter's name and whether the spelling negates it, as --no-x does.

    The keys have no leading dashes, and underscores in place of the inner dashes. --config is left out.
    """
    names: dict[str, tuple[str, bool]] = {}
    for parameter in context.command.params:
        for written in (*parameter.opts, *parameter.secondary_opts):
            if parameter.name is not None and written != "--config":
                names[written.lstrip("-").replace("-", "_")] = parameter.name, written in parameter.secondary_opts
    return names
