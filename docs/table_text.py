"""The parts of every table of the documents: Markdown, and the conditions of its measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
# Versions that matter for speed, by the names that they are shown under.
SHOWN_VERSIONS = {
    "torch": "torch",
    "triton": "Triton",
    "cuda": "CUDA",
    "transformers": "transformers",
    "sentence-transformers": "sentence-transformers",
    "vllm": "vLLM",
}


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, in which the first column is aligned left and all others right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(result: Result, *, with_command: bool = True) -> str:
    """Return the conditions of a result: machine, versions, date, repeats, and the command that repeats it."""
    machine, versions = result["machine"], result["versions"]
    count = {1: "one", 2: "two"}[machine.get("gpus", 1)]
    parts = [f"{count} {machine['gpu']}{'s' * (count != 'one')}"] if "gpu" in machine else []
    if "cores" in machine:
        parts.append(
            f"{machine['cores']} core{'s' * (machine['cores'] > 1)} of {machine['processor'].replace('(R)', '')}"
        )
    parts += [f"{shown} {versions[name]}" for name, shown in SHOWN_VERSIONS.items() if name in versions]
    parts += [result["model"]["dtype"]] if "model" in result else []
    repeats = result.get("repeats", 0)
    parts += [f"medians of {repeats} repeats"] if repeats > 1 else ["one run"] if repeats else []
    text = f"Measured {result['date']}: {', '.join(parts)}."
    return text + (f"\n`{result['command']}`" if with_command and "command" in result else "")


def below(table: str, *results: Result, with_command: bool = True) -> str:
    """Return the table with the conditions of its results below it; equal conditions are stated once."""
    notes = dict.fromkeys(conditions(result, with_command=with_command) for result in results)
    return "\n\n".join([table, *notes])


def model_name(result: Result) -> str:
    return result["model"]["name"].replace("qwen", "Qwen").replace("b", "B")


def median(figure: Mapping[str, Any] | None, digits: int, factor: float = 1.0) -> str:
    return "" if figure is None else f"{figure['median'] * factor:,.{digits}f}"
