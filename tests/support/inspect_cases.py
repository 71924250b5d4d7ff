"""`compiled-engine inspect` on the bundled model with one small range: one entry of the tests' cache, compiled once."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from compiled_engine.cli.app import app

RANGES = ("1-8", "1-64")
NUM_LAYERS = 6
SMALL = [
    *("--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "64"),
    *("--num-blocks", "16", "--quiet"),
]
COMPILED = [*SMALL, "--compile-range", "8", "--compile-workers", "0"]
EAGER = [*SMALL, "--mode", "eager"]


def inspect(*arguments: str) -> Any:
    """Run the command, assert that it succeeds, and return its result."""
    result = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def inspect_json(*arguments: str) -> dict[str, Any]:
    return json.loads(inspect(*arguments, "--json").stdout)
