"""Figures of other engines, or of another version, beside a table's rows: read from a JSON file.

    {"engines": {"vllm": "vLLM 0.25.1"}, "rows": [{"id": "0.6b-tpot-1", "vllm": 1.636}, ...]}

A figure is a number, or a range: two numbers. Other keys (source, machine, versions, date) are for readers of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.bench.result_file import read_json
from compiled_engine.bench.table_workloads import LOWER

Peers = Mapping[str, Mapping[str, list[float]]]


def read_peers(path: Path) -> Peers:
    """Row id -> engine as it is called -> its figure as [least, most].

    Raises ValueError for a file that is not of this form, OSError for one that cannot be read.
    """
    content = read_json("peer", path)
    try:
        engines = dict(content["engines"])
        return {
            row["id"]: {name: _range_of(row[key]) for key, name in engines.items() if key in row}
            for row in content["rows"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f'peer is {str(path)!r}, which has not the form {{"engines": {{key: name}}, "rows": [{{"id": row, key:'
            f" figure}}]}}: {type(error).__name__} {error}"
        ) from error


def with_peers(row: Mapping[str, Any], peers: Peers) -> dict[str, Any]:
    """The row with `peers`: engine -> figure and ratio, how many times better the row is than the peer's best."""
    found = dict(row)
    if row["id"] in peers:
        found["peers"] = {
            name: {"figure": figure, "ratio": _ratio(row, figure)} for name, figure in peers[row["id"]].items()
        }
    return found


def _ratio(row: Mapping[str, Any], figure: list[float]) -> float | None:
    if "measured" not in row:
        return None
    median = row["measured"]["median"]
    return figure[0] / median if row["better"] == LOWER else median / figure[1]


def _range_of(value: Any) -> list[float]:
    numbers = [float(number) for number in (value if isinstance(value, list) else [value])]
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"a figure is {value!r}; allowed: a positive number, or two")
    return [min(numbers), max(numbers)]
