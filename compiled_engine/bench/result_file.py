"""Reads what a benchmark has written as JSON; errors name the option that the file was given for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(name: str, path: Path) -> Any:
    """What a JSON file holds. ValueError for one that is missing or no JSON."""
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}; allowed: a JSON file")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{name} is {str(path)!r}, which is no JSON: {error}") from error


def read_result(name: str, path: Path, *benchmarks: str) -> dict[str, Any]:
    """The result of one of these benchmarks. ValueError for anything else."""
    result = read_json(name, path)
    if not isinstance(result, dict) or result.get("benchmark") not in benchmarks:
        allowed = " or ".join(f"bench {benchmark}" for benchmark in benchmarks)
        raise ValueError(f"{name} is {str(path)!r}; allowed: a JSON file of {allowed}")
    return result
