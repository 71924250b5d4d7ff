"""`compiled-engine bench families`: models of transformers' code, compared with transformers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from compiled_engine.cli.bench_engine import AsJson, command_line, print_json
from compiled_engine.cli.errors import bad_input_is_reported


def families(
    *,
    family: Annotated[list[str] | None, typer.Option(help="Model type, instead of all; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="eager, fused, compiled or graphed, instead of eager and fused; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Log-probabilities of tiny random checkpoints beside those of transformers, family by family.

    Each family's checkpoint is made by transformers and run through its code: prompts in chunks, decodes, prefixes
    from the cache, windows shorter than the prompts. Mode fused executes the graph after all passes op by op, on the
    CPU, which takes seconds where compiling takes minutes. A difference is right up to 3e-4 in float32; in other types
    the mean may be 1.3 times that of transformers in the same type.

    JSON: benchmark, results (family, architecture, and for each mode largest, mean, mean_of_transformers, right;
    passes: matches and contract of each; refused: why it cannot be run), date, machine, versions, command.
    """
    from compiled_engine.bench.families import FAMILIES
    from compiled_engine.bench.families import family as known
    from compiled_engine.bench.family_comparison import compare_families

    console = Console(stderr=as_json, highlight=False)

    def done(result: dict[str, Any]) -> None:
        modes = [f"{name} {result[name]['largest']:.1e}" for name in asked if name in result]
        wrong = [name for name in asked if name in result and not result[name]["right"]]
        verdict = result.get("refused") or ("wrong" if wrong else "right")
        console.print(f"{result['family']:20} {' · '.join(modes)}  {verdict}", markup=False)

    asked = mode or ["eager", "fused"]
    with bad_input_is_reported((ValueError, TypeError)):
        cases = [known(name) for name in family] if family else list(FAMILIES)
        found = compare_families(cases, asked, {"dtype": dtype, "device": device}, done)
    if as_json:
        print_json(found | {"command": command_line()})
