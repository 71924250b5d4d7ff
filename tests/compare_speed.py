"""Compares the speed of two commits on one machine: decode steps, and rows of the main table.

    python tests/compare_speed.py HEAD~3 HEAD -o result.json
    python tests/compare_speed.py main . --rounds 2 --steps 16

A commit may also be a folder with the project's files, such as `.` for the tree as it is. Each is installed into a
folder of its own, with a compile cache of its own, and runs in fresh processes: first once uncounted, then by turns, A
and B and in the next round B and A, so that what drifts (clocks, other users) meets both. All that is measured is the
commits' own `compiled-engine bench step` and `bench table`.

On a GPU the model is of the shape qwen3-0.6b with random weights, on a CPU the bundled one. Options behind `--` go to
`bench step`, for example `-- --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'`.

JSON: a, b (given, commit), measures (name, unit, a and b with median, spread and values, ratio with median, spread and
values), rounds, machine, seconds. A ratio is the cost of B over the cost of A in the same round: above 1, B is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIONS_ON_A_GPU = ("--shape", "qwen3-0.6b", "--max-model-len", "4096")
ROW_ON_A_GPU, ROW_ON_A_CPU = "0.6b-T", "bundled-T"
INSTALLED = ("pyproject.toml", "README.md", "LICENSE", "compiled_engine", "passes", "graphs", "models")
# What of a step is compared, in microseconds; a figure that the machine does not have is left out.
LAPS = ("step", "host", "device")


@dataclass
class Side:
    """A commit. site: where it is installed. figures: of each measure, one value a round."""

    name: str
    given: str
    commit: str
    site: Path
    cache: Path
    figures: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def run(self, words: Sequence[str]) -> dict[str, Any]:
        """Run a command of this commit's and read its JSON. Raises RuntimeError with the end of what it said."""
        variables = {"PYTHONPATH": python_path(self.site), "COMPILED_ENGINE_CACHE_DIR": str(self.cache)}
        command = [sys.executable, "-P", "-m", "compiled_engine", *words, "--json"]
        done = subprocess.run(
            command, cwd=self.site, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.given}: {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def take(self, name: str, unit: str, value: float) -> None:
        self.units[name] = unit
        self.figures.setdefault(name, []).append(value)


def install(name: str, given: str, folder: Path) -> Side:
    """Install a commit, or a folder's files. Raises ValueError if it is neither."""
    commit, source = "", folder / f"{name}-source"
    if (Path(given) / "pyproject.toml").is_file():
        copy_tree(Path(given), source)
    else:
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", f"{given}^{{commit}}"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode != 0:
            raise ValueError(f"{given!r} is no commit, and no folder with a pyproject.toml")
        commit = found.stdout.strip()
        source.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    site = folder / f"{name}-site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    side = Side(name, given, commit, site, folder / f"{name}-cache")
    where = "import compiled_engine; print(compiled_engine.__file__)"
    variables = os.environ | {"PYTHONPATH": python_path(site)}
    said = subprocess.run(
        [sys.executable, "-P", "-c", where], cwd=site, env=variables, capture_output=True, text=True, check=True
    ).stdout
    if not Path(said.strip()).is_relative_to(site):
        raise RuntimeError(f"{given} is installed in {site}, but {said.strip()} is what Python imports")
    return side


def python_path(site: Path) -> str:
    """Return a search path with the site first: what it depends on may be found by the path that is set."""
    return os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))


def copy_tree(given: Path, to: Path) -> None:
    """Copy what a wheel is made of: setuptools leaves files in the folder that it builds from."""
    for name in INSTALLED:
        if (given / name).is_dir():
            shutil.copytree(given / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.mkdir(exist_ok=True)
            shutil.copy(given / name, to / name)


def measure(side: Side, batches: Sequence[int], steps: int, rows: Sequence[str], more: Sequence[str]) -> None:
    """One round of a side."""
    on_gpu = torch.cuda.is_available()
    words = ["bench", "step", *(word for batch in batches for word in ("--batch", str(batch))), "--steps", str(steps)]
    options = OPTIONS_ON_A_GPU if on_gpu else ("--max-num-seqs", str(max(batches)))
    for record in side.run([*words, *options, *more])["results"]:
        for lap in LAPS:
            if record[lap] is not None:
                side.take(f"{lap} of {record['batch_size']}", "us", record[lap]["median"])
    if rows:
        patterns = [word for row in rows for word in ("--rows", row)]
        for record in side.run(["bench", "table", *patterns, "--repeats", "1"])["rows"]:
            side.take(record["id"], record["unit"], record["measured"]["median"])


def comparison(a: Side, b: Side) -> Iterator[dict[str, Any]]:
    for name, unit in a.units.items():
        values_a, values_b = a.figures[name], b.figures[name]
        is_rate = unit.endswith("/s")
        pairs = zip(values_b, values_a, strict=True) if not is_rate else zip(values_a, values_b, strict=True)
        ratios = [cost / before for cost, before in pairs]
        measured = {"a": summary(values_a), "b": summary(values_b), "ratio": summary(ratios)}
        yield {"name": name, "unit": unit, **measured}


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "spread": [min(values), max(values)], "values": list(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", help="commit or folder: what was before")
    parser.add_argument("b", help="commit or folder: what is to be judged")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, action="append", help="requests of a step; default: 1, 8 and 64")
    parser.add_argument("--steps", type=int, default=64, help="steps of a round")
    parser.add_argument("--row", action="append", help="rows of the main table; default: workload T; '' for none")
    parser.add_argument("--output", "-o", type=Path, help="file for the JSON, which is printed too")
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    arguments, more = parser.parse_args(own), words[len(own) + 1 :]
    rows = arguments.row or [ROW_ON_A_GPU if torch.cuda.is_available() else ROW_ON_A_CPU]
    rows = [row for row in rows if row]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="compare-speed-") as temporary:
        sides = [install(name, given, Path(temporary)) for name, given in (("a", arguments.a), ("b", arguments.b))]
        batches = arguments.batch or [1, 8, 64]
        for side in sides:
            measure(side, batches, arguments.steps, rows, more)
            side.figures.clear()  # the start compiled, and kernels were loaded
        for number in range(arguments.rounds):
            for side in sides[:: -1 if number % 2 else 1]:
                measure(side, batches, arguments.steps, rows, more)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    a, b = sides
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    found = {side.name: {"given": side.given, "commit": side.commit} for side in sides}
    result = {
        **found,
        "measures": list(comparison(a, b)),
        "rounds": arguments.rounds,
        "machine": machine,
        "seconds": round(time.perf_counter() - start, 1),
    }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
