"""`--config FILE`: the options of a command from a YAML file. The command line and the environment come before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compiled_engine.near_names import unknown_name_message


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """A callback for typer: the values of the file become the defaults of the command's options.

    Raises typer.BadParameter for what is no such file, and for a name that no option has.
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
    lists = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    defaults: dict[str, Any] = {}
    for written, value in values.items():
        name, negates = names.get(str(written).replace("-", "_"), (None, False))
        if name is None:
            raise typer.BadParameter(unknown_name_message(f"{str(path)!r} has the unknown option", str(written), names))
        if isinstance(value, dict) or value is None:
            raise typer.BadParameter(f"{written} in {str(path)!r} must be a value or a list, got {value!r}")
        if negates and not isinstance(value, bool):
            raise typer.BadParameter(f"{written} in {str(path)!r} must be true or false, got {value!r}")
        several = name in lists and not isinstance(value, list)
        defaults[name] = [value] if several else not value if negates else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _names_of_options(context: typer.Context) -> dict[str, tuple[str, bool]]:
    """How options are written, without dashes; the names of their parameters, and whether the option negates it."""
    names: dict[str, tuple[str, bool]] = {}
    for parameter in context.command.params:
        for written in (*parameter.opts, *parameter.secondary_opts):
            if parameter.name is not None and written != "--config":
                names[written.lstrip("-").replace("-", "_")] = parameter.name, written in parameter.secondary_opts
    return names
