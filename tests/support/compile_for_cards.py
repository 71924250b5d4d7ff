"""Compiles the kernels of starts for described cards, on a CPU, and writes what each card has to give them.

    python tests/support/compile_for_cards.py -o docs/measurements/cards.json     every start on every card
    python tests/support/compile_for_cards.py --cards 86 --starts bfloat16        some of them, printed

Nothing is launched. The exit code is 1 if a kernel cannot be compiled for a card, or does not fit it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from card_models import STARTS
from card_programs import Program, compile_launch
from card_starts import Collection, Launch, collect
from cards import CARDS, Card

from compiled_engine.bench.results import host_record, installed_versions, today

PACKAGES = ("compiled-engine", "torch", "triton", "transformers")
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def mapping(workers: int) -> Iterator[Map]:
    """Yield a function like `map`, which calls in so many new processes, or in this one if there are none."""
    if not workers:
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield pool.map


def collect_start(arch: int, folder: Path, name: str) -> Collection:
    """Return the kernels of a start on a card, see `collect`. folder: where the model's folder is written."""
    return collect(STARTS[name].written(folder / name), CARDS[arch])


def compile_or_say(arch: int, launch: Launch) -> Program | str:
    """Compile a kernel for a card; return the error as text if it cannot be compiled."""
    try:
        return compile_launch(launch, CARDS[arch])
    except Exception as error:  # of Triton, of its passes in C++, or of the assembler
        return f"{type(error).__name__}: {error}"[-2000:]


Results = Mapping[Launch, Program | str]


def record_of(start: str, card: Card, collection: Collection, results: Results) -> dict[str, Any]:
    """Return what the tables of the documents show of a start on a card, and which kernels do not fit it."""
    if collection.refused:
        return {"start": start, "card": card.arch, "refused": collection.refused}
    programs = [result for result in results.values() if isinstance(result, Program)]
    largest = max(programs, key=lambda program: program.shared_bytes)
    return {
        "start": start,
        "card": card.arch,
        "kernels": len(collection.launches),
        "compiled": len(programs),
        "functions": sorted({launch.name for launch in collection.launches}),
        "gluon": sorted({program.kernel for program in programs if program.is_gluon}),
        "failures": {launch.name: result for launch, result in results.items() if isinstance(result, str)},
        "too_large": [asdict(program) for program in programs if not program.fits(card)],
        "most_shared_bytes": largest.shared_bytes,
        "largest": largest.kernel,
        "most_registers": max(program.registers for program in programs),
        "spilling": sorted({(each.kernel, each.stack_bytes) for each in programs if each.stack_bytes}),
        "linears": list(collection.notes),
    }


def records(
    archs: Sequence[int], starts: Sequence[str], workers: int, one_in: int = 1, seed: str = "0"
) -> Iterator[dict[str, Any]]:
    """Yield the record of each start on each card. Kernels that starts share are compiled once.

    one_in: one kernel of a start in so many is compiled, at least one; the seed chooses which.
    """

    def drawn(launch: Launch) -> int:
        return zlib.crc32(f"{seed} {launch}".encode())

    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            results: dict[Launch, Program | str] = {}
            with mapping(workers) as collecting, mapping(workers) as compiling:
                # First all of them: a process that has compiled a kernel would launch it.
                collections = list(collecting(partial(collect_start, arch, Path(folder)), starts))
                for start, collection in zip(starts, collections, strict=True):
                    wanted = sorted(collection.launches, key=drawn)[: -(-len(collection.launches) // one_in)]
                    new = [launch for launch in wanted if launch not in results]
                    results |= zip(new, compiling(partial(compile_or_say, arch), new), strict=True)
                    yield record_of(start, CARDS[arch], collection, {launch: results[launch] for launch in wanted})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", choices=tuple(CARDS), default=tuple(CARDS))
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=tuple(STARTS))
    parser.add_argument("--workers", type=int, default=2, help="processes that compile; 0: none but this one")
    parser.add_argument("--one-in", type=int, default=1, help="compile one kernel in so many")
    parser.add_argument("--seed", default="0", help="which kernels these are")
    parser.add_argument("-o", "--output", type=Path, help="file whose records of these starts and cards are replaced")
    given = parser.parse_args(arguments)
    if len(given.cards) > 1 and not given.workers:
        parser.error("--workers is 0, and a process can take only one card for its GPU; allowed: --workers 1 and more")

    found = []
    for record in records(given.cards, given.starts, given.workers, given.one_in, given.seed):
        found.append(record)
        print(json.dumps(record), flush=True)
        if given.output:
            write(given.output, record)
    return int(any(record.get("failures") or record.get("too_large") for record in found))


def write(path: Path, *new: dict[str, Any]) -> None:
    """Write records to a file, whose other records stay: of other cards, and of other starts."""
    kept = json.loads(path.read_text())["starts"] if path.exists() else []
    by_place = {(record["card"], record["start"]): record for record in (*kept, *new)}
    names = list(STARTS)
    ordered = sorted(by_place, key=lambda place: (place[0], names.index(place[1])))
    cards = [asdict(CARDS[arch]) | {"arch": arch} for arch in CARDS if arch in {arch for arch, _ in by_place}]
    origin = {"date": today(), "machine": host_record(), "versions": installed_versions(PACKAGES)}
    record = {**origin, "cards": cards, "starts": [by_place[place] for place in ordered]}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
