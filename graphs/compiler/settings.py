"""The settings of torch's compilers: those that the engine sets, and those that its caller changed."""

from __future__ import annotations

import sys
from typing import Any

# On a CPU each step sets its number of threads (engine/forward.py), so it must not be compiled in.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}


def settings_of(compiler: str) -> Any:
    """Return the settings of "inductor", "functorch" or "dynamo"; None if it is not imported.

    Settings of a compiler that is not imported have their defaults. Warm starts do not import compilers, which takes
    seconds.
    """
    return sys.modules.get(f"torch._{compiler}.config")


def changed_settings(compiler: str) -> dict[str, Any]:
    """Return the settings of this process that differ from the compiler's defaults."""
    config = settings_of(compiler)
    if config is None:
        return {}
    values = config.save_config_portable()
    return {name: value for name, value in values.items() if value != config._config[name].default}
