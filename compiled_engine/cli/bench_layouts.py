"""`compiled-engine bench layouts`: families of models on several ranks and stages, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compiled_engine.cli.bench_engine import AsJson, command_line, print_json
from compiled_engine.cli.errors import bad_input_is_reported, written_to


def layouts(
    *,
    family: Annotated[list[str] | None, typer.Option(help="Model type, instead of all; may be repeated.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layout, instead of all; may be repeated.")] = None,
    model_impl: Annotated[str, typer.Option(help="Whose code: textbook, transformers, or auto.")] = "textbook",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the JSON, written after each family.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tiny models of each family in float32 on two ranks, two stages, and both, eager and compiled, on the CPU.

    Log-probabilities are compared with those of transformers as `bench families` does it on one device.

    JSON: benchmark, layouts, results (family, implementation, and for each layout largest, mean, right; or refused: why
    it cannot be), date, machine, versions, command.

    Examples:

      compiled-engine bench layouts --family qwen3 --layout "TP 2, eager"
    """
    from compiled_engine.bench.families import FAMILIES
    from compiled_engine.bench.families import family as known
    from compiled_engine.bench.layouts import LAYOUTS, compare_layouts

    console = Console(stderr=as_json, highlight=False)
    head = {"command": command_line()}

    def done(result: dict[str, Any]) -> None:
        row = result["results"][-1]
        cells = (f"{name}: {_verdict(row[name])}" for name in result["layouts"])
        console.print(f"{row['family']:20} {' · '.join(cells)}", markup=False)
        if output is not None:
            with written_to(output):
                output.write_text(json.dumps(result | head, indent=1) + "\n")

    with bad_input_is_reported((ValueError, TypeError)):
        for name in layout or ():
            if name not in LAYOUTS:
                raise ValueError(f"layout is {name!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
        cases = [known(name) for name in family] if family else list(FAMILIES)
        if output is not None:
            with written_to(output):
                output.touch()
        found = compare_layouts(cases, layout or list(LAYOUTS), {"model_impl": model_impl}, done)
    if as_json:
        print_json(found | head)


def _verdict(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "refused"
    return f"{found['largest']:.0e} {'right' if found['right'] else 'wrong'}"
