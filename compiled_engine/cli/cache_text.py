"""The compile cache in words and tables for people, and as records for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiled_engine.graphs.cache.diff import Difference, flatten
from compiled_engine.graphs.cache.report import EntryReport, Nearest, short


def entry_record(entry: EntryReport) -> dict[str, Any]:
    """An entry as one JSON object; times in ISO 8601, UTC."""
    config, device = entry.factors.get("config", {}), entry.factors.get("device", {})
    return {
        "key": entry.key,
        "path": str(entry.path),
        "status": "damaged" if entry.damage else "ok",
        "damage": entry.damage,
        "architecture": config.get("model.architecture"),
        "num_layers": config.get("model.num_layers"),
        "hidden_size": config.get("model.hidden_size"),
        "dtype": str(config.get("model.dtype")).removeprefix("torch."),
        "max_num_batched_tokens": config.get("scheduler.max_num_batched_tokens"),
        "device": device.get("name") or device.get("type"),
        "passes": config.get("compile.passes"),
        "passes_off": entry.passes_off,
        "size_bytes": entry.size_bytes,
        "created": datetime.fromtimestamp(entry.created, UTC).isoformat(timespec="seconds"),
        "last_used": datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds"),
    }


def difference_records(found: Sequence[Difference], here: str, there: str) -> list[dict[str, Any]]:
    return [
        {"factor": one.factor, "here": one.ours, "there": one.theirs, "words": one.in_words(here, there)}
        for one in found
    ]


def difference_lines(found: Sequence[Difference], here: str, there: str) -> list[str]:
    return [one.in_words(here, there) for one in found] or ["no factor differs"]


def entry_table(entries: Sequence[EntryReport]) -> Table:
    """One row an entry."""
    headings = ("key", "model", "tokens", "device", "passes off", "size", "created", "last used", "status")
    table = Table(*headings, box=None, pad_edge=False)
    for entry in entries:
        record = entry_record(entry)
        model = f"{record['architecture']}, {record['num_layers']} x {record['hidden_size']}, {record['dtype']}"
        cells = (
            short(entry.key),
            model if entry.factors else "?",
            str(record["max_num_batched_tokens"] or "?"),
            str(record["device"] or "?"),
            ", ".join(entry.passes_off) or "none",
            size(entry.size_bytes),
            ago(entry.created),
            ago(entry.last_used),
            f"damaged: {entry.damage}" if entry.damage else "ok",
        )
        table.add_row(*map(escape, cells))
    return table


def entry_lines(entry: EntryReport) -> list[str]:
    """Its state, then its factors."""
    lines = [
        f"key        {entry.key}",
        f"folder     {entry.path}",
        f"status     {f'damaged: {entry.damage}' if entry.damage else 'ok'}",
        f"size       {size(entry.size_bytes)}",
        f"created    {ago(entry.created)}",
        f"last used  {ago(entry.last_used)}",
        f"passes off {', '.join(entry.passes_off) or 'none'}",
    ]
    for section, values in entry.factors.items():
        if section == "source":
            lines.append(f"source: digests of {len(values)} files, with --json")
        elif values:
            lines += [section, *(f"  {name}: {_shown(value)}" for name, value in flatten(values).items())]
    return lines


def explanation(key: str, own: EntryReport | None, near: Nearest | None) -> list[str]:
    """Whether the entry of `key` is there (`own`), or what keeps the nearest one from being it."""
    if own is not None and own.damage is None:
        return [f"hit: entry {short(key)}, created {ago(own.created)}, last used {ago(own.last_used)}"]
    if own is not None:
        return [f"miss: entry {short(key)} is damaged ({own.damage}); it will be set aside and built again"]
    if near is None:
        return [f"miss: entry {short(key)} would be built; the cache has no entries to compare with"]
    there = f"in entry {short(near.entry.key)}"
    head = f"miss: entry {short(key)} would be built. The nearest is {short(near.entry.key)}; what differs:"
    return [head, *(f"  {line}" for line in difference_lines(near.differences, "here", there))]


def print_table(table: Table) -> None:
    # Without a terminal nothing says how wide the output may be.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def counted(entries: Sequence[EntryReport]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def size(num_bytes: float) -> str:
    """Such as 2.1 MB; powers of ten."""
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def ago(timestamp: float) -> str:
    """Such as `3 h ago`."""
    seconds = max(0.0, time.time() - timestamp)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return "just now"


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
