"""`compiled-engine bench families` and `bench layouts`: families of models, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compiled_engine.cli.bench_engine import command_line
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, print_json, write_json, written_to


def families(
    *,
    family: Annotated[list[str] | None, typer.Option(help="Model type, instead of all; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compiled, graphed, fused (one rank) or verified (several), instead of eager and fused or "
            "verified; may be repeated."
        ),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks that compute each layer together.")] = 1,
    model_impl: Annotated[
        str, typer.Option(help="Code of the model: transformers, textbook, or auto.")
    ] = "transformers",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare log-probabilities of tiny random checkpoints with those of transformers, family by family.

    Each family's checkpoint is made by transformers and run through its code, or through the textbook's: prompts in
    chunks, decodes, prefixes from the cache, windows shorter than the prompts. Mode fused executes the graph after all
    passes op by op, on the CPU, which takes seconds where compiling takes minutes; verified compares the sums over
    ranks in that graph with the undivided model, value by value. A difference from transformers in float32, or from
    it in float64, is right up to 3e-4; in other types the mean, or with experts the median, may be 1.3 times that of
    transformers in the same type.

    JSON: benchmark, ranks, results (family, architecture, implementation, and for each mode largest, mean,
    mean_of_transformers, from_float64, transformers_from_float64, medians, tokens_equal, tokens_per_s, right; passes:
    matches and contract of each; refused: why it cannot be run), date, machine, versions, command.
    """
    from compiled_engine.bench.families import FAMILIES, WRAPPERS
    from compiled_engine.bench.families import family as known
    from compiled_engine.bench.family_comparison import compare_families

    console = Console(stderr=as_json, highlight=False)

    def done(result: dict[str, Any]) -> None:
        modes = [f"{name} {result[name]['largest']:.1e}" for name in asked if name in result]
        wrong = [name for name in asked if name in result and not result[name]["right"]]
        verdict = result.get("refused") or ("wrong" if wrong else "right")
        console.print(f"{result['family']:20} {' · '.join(modes)}  {verdict}", markup=False)

    asked = mode or ["eager", "verified" if tensor_parallel_size > 1 else "fused"]
    with bad_input_is_reported((ValueError, TypeError)):
        allowed = ("eager", "compiled", "graphed", "verified" if tensor_parallel_size > 1 else "fused")
        if unknown := [name for name in asked if name not in allowed]:
            ranks = f"with tensor_parallel_size {tensor_parallel_size}"
            raise ValueError(f"mode is {unknown[0]!r}; allowed {ranks}: {', '.join(allowed)}")
        cases = [known(name) for name in family] if family else [*FAMILIES, *WRAPPERS]
        options: dict[str, Any] = {"dtype": dtype, "device": device, "model_impl": model_impl}
        if tensor_parallel_size > 1:
            cases = [case.to_divide() for case in cases]
            options["tensor_parallel_size"] = tensor_parallel_size
        found = compare_families(cases, asked, options, done)
    if as_json:
        print_json(found | {"command": command_line()})


def layouts(
    *,
    family: Annotated[list[str] | None, typer.Option(help="Model type, instead of all; may be repeated.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layout, instead of all; may be repeated.")] = None,
    model_impl: Annotated[str, typer.Option(help="Code of the model: textbook, transformers, or auto.")] = "textbook",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the JSON, written after each family.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare tiny models of each family in float32 on two ranks, two stages, and both, eager and compiled, on the CPU.

    Log-probabilities are compared with those of transformers as `bench families` does it on one device.

    JSON: benchmark, layouts, results (family, implementation, and for each layout largest, mean, right; or refused: why
    it cannot be), date, machine, versions, command.

    Examples:

      compiled-engine bench layouts --family qwen3 --layout "TP 2, eager"
    """
    from compiled_engine.bench.families import FAMILIES
    from compiled_engine.bench.families import family as known
    from compiled_engine.bench.family_comparison import LAYOUTS, compare_layouts

    console = Console(stderr=as_json, highlight=False)
    head = {"command": command_line()}

    def done(result: dict[str, Any]) -> None:
        row = result["results"][-1]
        cells = (f"{name}: {_verdict(row[name])}" for name in result["layouts"])
        console.print(f"{row['family']:20} {' · '.join(cells)}", markup=False)
        write_json(output, result | head)

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
