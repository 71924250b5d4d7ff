"""The settings of torch's compilers: the engine's, and the caller's changes."""

from __future__ import annotations

import sys
from typing import Any

# On a CPU the number of threads is chosen for each step (runner/model_forward.py), not when a piece is compiled.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}


def settings_of(compiler: str) -> Any:
    """The settings of "inductor", "functorch" or "dynamo"; None if it is not imported, so they are unchanged.

    A warm start does without the compilers, which take seconds to import.
    """
    return sys.modules.get(f"torch._{compiler}.config")


def changed_settings(compiler: str) -> dict[str, Any]:
    """Settings of this process that differ from the compiler's defaults."""
    config = settings_of(compiler)
    if config is None:
        return {}
    values = config.save_config_portable()
    return {name: value for name, value in values.items() if value != config._config[name].default}
