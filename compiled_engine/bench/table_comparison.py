"""Compare a performance table with another table, or with figures of other engines (peers)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_engine.bench.results import read_json
from compiled_engine.bench.workloads import LOWER

FASTER, SLOWER, SAME = "faster", "slower", "same"
FAILED, REPAIRED = "failed", "repaired"
# Fields that must be equal for two rows to be compared.
DEFINITION = ("unit", "better", "workload", "options")
# Fields that may differ, with a note.
CONDITIONS = (
    ("machine", ("gpu", "processor", "cores")),
    ("versions", ("torch", "triton", "cuda", "compiled-engine")),
)


def compare(a: Mapping[str, Any], b: Mapping[str, Any], noise: float) -> dict[str, Any]:
    """Return a comparison of table `b` (B) with table `a` (A): rows, notes, noise and counts.

    rows have id, model, what, unit and verdict. If the row was measured in both tables, they also have a and b (the
    figures), gain (how many times better B's median is) and overlap (whether the spreads overlap). The verdict is same
    if the spreads overlap or the medians differ by at most the share `noise`, otherwise faster or slower. It is failed
    if only B's row has an error, and repaired if only A's has. notes name rows that are in only one table, have
    different definitions or failed in both, and conditions that differ. counts has the number of each verdict.
    """
    ours, theirs = ({row["id"]: row for row in result["rows"]} for result in (a, b))
    notes = [f"{group} {name}: {one} and {other}" for group, name, one, other in _differences(a, b)]
    notes += [f"options: {a['options']} and {b['options']}"] * (a["options"] != b["options"])
    for name, rows, others in (("A", ours, theirs), ("B", theirs, ours)):
        notes += [f"only in {name}: {row}" for row in rows if row not in others]
    compared = []
    for name in (name for name in ours if name in theirs):
        one, other = ours[name], theirs[name]
        if any(one[key] != other[key] for key in DEFINITION):
            notes.append(f"measured differently: {name}")
        elif "measured" in one or "measured" in other:
            compared.append(_compared(one, other, noise))
        else:
            notes.append(f"failed in both: {name}")
    counts = Counter(row["verdict"] for row in compared)
    return {"rows": compared, "notes": notes, "noise": noise, "counts": dict(counts)}


def is_slower(comparison: Mapping[str, Any]) -> bool:
    """Return whether any row of a comparison has the verdict slower or failed."""
    return any(row["verdict"] in (SLOWER, FAILED) for row in comparison["rows"])


def _compared(one: Mapping[str, Any], other: Mapping[str, Any], noise: float) -> dict[str, Any]:
    row = {name: one[name] for name in ("id", "model", "what", "unit")}
    if "measured" not in one or "measured" not in other:
        return row | {"verdict": FAILED if "measured" in one else REPAIRED}
    a, b = one["measured"], other["measured"]
    gain = a["median"] / b["median"] if one["better"] == LOWER else b["median"] / a["median"]
    found = {"a": _figure(a), "b": _figure(b), "gain": gain, "overlap": _overlap(a["spread"], b["spread"])}
    is_noise = found["overlap"] or max(gain, 1 / gain) - 1 <= noise
    return row | found | {"verdict": SAME if is_noise else FASTER if gain > 1 else SLOWER}


def _figure(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {name: measured[name] for name in ("median", "spread", "n")}


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    return [
        (group, name, a[group].get(name), b[group].get(name))
        for group, names in CONDITIONS
        for name in names
        if a[group].get(name) != b[group].get(name)
    ]


Peers = Mapping[str, Mapping[str, list[float]]]


def read_peers(path: Path) -> Peers:
    """Read figures of other engines from a JSON file: row id -> engine name -> [min, max].

    Raises ValueError or OSError for an invalid file.
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
    """Return the row with the peers' figures of the same row, if there are any, as the field `peers`.

    The field maps each peer's name to its figure and a ratio: how many times better the row's median is than the peer's
    best figure. The ratio is None if the row was not measured.
    """
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
