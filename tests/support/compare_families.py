"""Compare log-probabilities of tiny random checkpoints with those of transformers, family by family.

    python tests/support/compare_families.py families --family qwen3
    python tests/support/compare_families.py layouts --family qwen3 --layout "TP 2, eager"

families: each checkpoint is made by transformers and run through its code, or through the textbook's: prompts in
chunks, decodes, prefixes from the cache, windows shorter than the prompts. Mode fused executes the graph after all
passes op by op, on the CPU, which takes seconds where compiling takes minutes; verified compares the sums over ranks in
that graph with the undivided model, value by value.
layouts: each family in float32 on two ranks, two stages, and both, eager and compiled, on the CPU.

A difference from transformers in float32, or from it in float64, is right up to 3e-4; in other types the mean, or with
experts the median, may be 1.3 times that of transformers in the same type.

The JSON, after the verdicts on stderr, has benchmark, results, date, machine, versions and command. A result of
`families` has family, architecture, implementation, for each mode the fields of `Difference` and right, the passes with
matches and contract of each, or refused: why the family cannot be run. A result of `layouts` has family,
implementation, and for each layout largest, mean and right, or refused.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from families import FAMILIES, WRAPPERS
from families import family as known
from family_comparison import LAYOUTS, compare_families, compare_layouts


def main(words: Sequence[str] | None = None) -> int:
    """Compare, and return 0. A wrong option ends the program with status 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    names = [case.name for case in (*FAMILIES, *WRAPPERS)]
    for command, code in (("families", "transformers"), ("layouts", "textbook")):
        options = commands.add_parser(command)
        options.add_argument("--family", action="append", choices=names, metavar="NAME", help="may be repeated; or all")
        options.add_argument("--model-impl", default=code, help="transformers, textbook or auto")
        options.add_argument("--output", type=Path, help="file for the JSON, written after each family; or stdout")
    options.add_argument("--layout", action="append", choices=LAYOUTS, help="may be repeated; default: all")
    options = commands.choices["families"]
    options.add_argument(
        "--mode",
        action="append",
        choices=("eager", "compiled", "graphed", "fused", "verified"),
        help="may be repeated; default: eager, and fused with one rank or verified with several",
    )
    options.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that compute each layer together")
    options.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    given = parser.parse_args(words)
    head = {"command": shlex.join(["python", "tests/support/compare_families.py", *(words or sys.argv[1:])])}

    def done(result: dict[str, Any]) -> None:
        print(f"{result['results'][-1]['family']:20} {_verdicts(result['results'][-1])}", file=sys.stderr, flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps(result | head, indent=1) + "\n")

    if given.command == "layouts":
        cases = [known(name) for name in given.family] if given.family else list(FAMILIES)
        found = compare_layouts(cases, given.layout or list(LAYOUTS), {"model_impl": given.model_impl}, done)
    else:
        of_ranks = "verified" if given.tensor_parallel_size > 1 else "fused"
        modes = given.mode or ["eager", of_ranks]
        if unknown := {"fused", "verified"} & set(modes) - {of_ranks}:
            parser.error(f"mode must not be {unknown.pop()} with {given.tensor_parallel_size} ranks")
        cases = [known(name) for name in given.family] if given.family else [*FAMILIES, *WRAPPERS]
        engine = {"dtype": given.dtype, "device": given.device, "model_impl": given.model_impl}
        if given.tensor_parallel_size > 1:
            cases = [case.to_divide() for case in cases]
            engine["tensor_parallel_size"] = given.tensor_parallel_size
        found = compare_families(cases, modes, engine, done)
    if given.output is None:
        print(json.dumps(found | head, indent=1))
    return 0


def _verdicts(result: dict[str, Any]) -> str:
    """Say for each mode or layout of a family how large the difference is, and whether it is right."""
    if "refused" in result:
        return str(result["refused"])
    compared = {name: found for name, found in result.items() if isinstance(found, dict)}
    return " · ".join(
        f"{name}: refused" if "refused" in found else f"{name}: {found['largest']:.0e} {_word(found['right'])}"
        for name, found in compared.items()
    )


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    sys.exit(main())
