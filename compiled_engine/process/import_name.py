"""Imports objects by names such as "package.module:Name", the form in which functions and classes cross processes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def import_name(field: str, given: str) -> Any:
    """Import the object that is called "package.module:Name"; Name may have dots.

    field: the option or argument with the value `given`, for errors. Raises ValueError if `given` has another form, or
    cannot be imported.
    """
    module_name, colon, path = given.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{field} is {given!r}; allowed: 'package.module:Name'")
    try:
        found: Any = import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(
            f"{field} is {given!r}, which cannot be imported ({type(error).__name__}: {error}); "
            "allowed: 'package.module:Name' of a module on Python's path"
        ) from error
    return found


def name_of(field: str, function: Callable[..., Any]) -> str:
    """Return the name by which `import_name` finds a function in another process.

    Raises ValueError if it cannot be found: a lambda, a function within another, or one of the script that is run.
    """
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and path and module != "__main__" and "<" not in path:
        name = f"{module}:{path}"
        if import_name(field, name) == function:
            return name
    raise ValueError(
        f"{field} is {function!r}, which other processes cannot import; "
        "allowed: a function of a module, other than the script that is run"
    )
