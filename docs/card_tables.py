"""The tables of the documents on NVIDIA cards: what was compiled for each, and what a card lacks.

Each function takes the record of tests/support/compile_for_cards.py, as loaded from JSON, and returns Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from table_text import SHOWN_VERSIONS, Result, markdown

KIB = 1 << 10


def card_kernels(result: Result) -> str:
    """Return a table with a row for each kind of start, and a column for each card.

    A cell has the number of kernels, and the most shared memory that one of them takes.
    """
    cards = {card["arch"]: card for card in result["cards"]}
    by_start: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in result["starts"]:
        by_start.setdefault(record["start"], {})[record["card"]] = record
    headings = ["start", *(f"{card['capability'][0]}.{card['capability'][1]}" for card in cards.values())]
    limits = ["*of a block, KiB*", *(f"*{card['shared_memory'] // KIB}*" for card in cards.values())]
    rows = [[start, *(_cell(records.get(arch)) for arch in cards)] for start, records in by_start.items()]
    return markdown(headings, [limits, *rows]) + "\n\n" + _conditions(result)


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not compiled"
    if record.get("refused"):
        return "refused"
    return f"{record['kernels']}: {record['most_shared_bytes'] / KIB:.0f}"


def card_spills(result: Result) -> str:
    """Return a table of the kernels whose threads keep values in memory: the most bytes of a thread, by card."""
    archs = [card["arch"] for card in result["cards"]]
    most: dict[str, dict[int, int]] = {}
    for record in result["starts"]:
        for kernel, stack_bytes in record.get("spilling", ()):
            of_kernel = most.setdefault(kernel, {})
            of_kernel[record["card"]] = max(stack_bytes, of_kernel.get(record["card"], 0))
    headings = ["kernel", *(f"{arch // 10}.{arch % 10}" for arch in archs)]
    rows = [[f"`{kernel}`", *(str(found.get(arch, "")) for arch in archs)] for kernel, found in sorted(most.items())]
    return markdown(headings, rows)


def card_linears(result: Result) -> str:
    """Return a table of the kernels of quantised linears, by kind of start and by cards that use the same kernels."""
    groups: dict[tuple[str, str], list[int]] = {}
    for record in result["starts"]:
        for note in record.get("linears", ()):
            groups.setdefault((record["start"], note), []).append(record["card"])
    rows = [
        [start, ", ".join(f"{arch // 10}.{arch % 10}" for arch in dict.fromkeys(archs)), note]
        for (start, note), archs in groups.items()
    ]
    return markdown(["start", "cards", "kernels"], rows)


def _conditions(result: Result) -> str:
    versions = ", ".join(
        f"{shown} {result['versions'][name]}" for name, shown in SHOWN_VERSIONS.items() if name in result["versions"]
    )
    return f"Compiled on a CPU, {result['date']}: {versions}; nothing was run."
