"""Reads the settings of torch's compilers, and defines those that the engine sets."""

from __future__ import annotations

import sys
from typing import Any

# On a CPU each step sets its number of threads (engine/forward.py), so it must not be compiled in.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}


def settings_of(compiler: str) -> Any:
    """Return the settings module of one of torch's compilers: "inductor", "functorch" or "dynamo".

    Returns None if the compiler is not imported; its settings then have their defaults. This function does not import
    the compiler, since that takes seconds and a warm start needs no compiler.
    """
    return sys.modules.get(f"torch._{compiler}.config")


def changed_settings(compiler: str) -> dict[str, Any]:
    """Return the settings of a compiler that differ from their defaults in this process, by name."""
    config = settings_of(compiler)
    if config is None:
        return {}
    values = config.save_config_portable()
    return {name: value for name, value in values.items() if value != config._config[name].default}
