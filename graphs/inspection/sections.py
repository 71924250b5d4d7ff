"""Lists the sections of the inspector's page, each with a text about its content and a text shown if it is empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    id: str  # names the template
    title: str
    about: str
    empty: str  # shown in place of an empty section


def sections(data: Mapping[str, Any]) -> list[Section]:
    """Return the sections of a report in the page's order: first the compiler's work, then tables for reference."""
    notes = data["notes"]
    eager = notes.get("compile", "")
    return [
        Section("start-up", "Start-up", "Where the time went, from the start of the process on.", ""),
        Section(
            "model",
            "Model",
            "The modules as the model's file writes them. A module opens to the compiled pieces that take its "
            "parameters, and their kernels.",
            eager,
        ),
        Section(
            "passes",
            "Passes",
            "What each pass rewrote, against its contract: how often it must match in this model. A pass opens to the "
            "graph before (−) and after (+) it.",
            eager,
        ),
        Section(
            "graphs",
            "Graphs",
            "The trace of the whole model, and what each range of token counts made of it: the pieces, and the ops "
            "between them that touch the KV cache.",
            eager,
        ),
        Section(
            "pieces",
            "Pieces",
            "Each unique piece is compiled once, however many layers use it: its graph, its kernels, and what launches "
            "them.",
            eager,
        ),
        Section("kernels", "Kernels a step", "What one forward of the whole model launches.", eager),
        Section(
            "guards",
            "Guards",
            "The conditions under which the trace holds. None is checked while the engine runs: each holds by "
            "construction, for the reason given.",
            eager,
        ),
        *([] if data["config"]["device"] == "cpu" else [_cuda_graphs(notes)]),
        Section("configuration", "Configuration", "Every value that the engine runs with, and why it was chosen.", ""),
        Section(
            "cache",
            "Cache",
            "The entry that holds all of this, and what its key is made of: when one of these factors changes, the "
            "model is compiled again.",
            eager,
        ),
    ]


def _cuda_graphs(notes: Mapping[str, str]) -> Section:
    return Section(
        "cuda-graphs",
        "CUDA graphs",
        "The batch sizes that are captured, and their memory.",
        notes.get("captures", ""),
    )


def facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the summary at the top of the page, as pairs (name, value)."""
    if "compile" in data["notes"]:
        return [("Compiled", "no: eager")]
    applied = [one for one in data["passes"] if one["applied"]]
    kept = sum(one["matches"] >= one["contract"] for one in applied)
    build = max((span["start_s"] + span["seconds"] for span in data["phases"]["build"]), default=0.0)
    per_step = [f"{counts['total']}" for counts in data["kernels_per_step"].values()]
    return [
        ("Passes at contract", f"{kept} of {len(applied)}"),
        ("Unique pieces", str(len(data["pieces"]))),
        ("Ranges of tokens", ", ".join(one["name"] for one in data["ranges"])),
        ("Launches a step", ", ".join(per_step)),
        ("Compiled in", f"{build:.1f} s"),
        ("Cache", data["cache"]["status"]),
    ]
