"""The table from the user's options to engines and their rows: everything is checked before the first one starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compiled_engine.bench.bounds import ModelSizes, Rates, model_sizes
from compiled_engine.bench.device_rates import device_rates
from compiled_engine.bench.large_tokenizer import write_tokenizer
from compiled_engine.bench.machine import plain_options
from compiled_engine.bench.shapes import write_shape
from compiled_engine.bench.table_rows import Limits, Row, Subject, chosen, known_rows
from compiled_engine.bench.table_workloads import Start
from compiled_engine.config import EngineConfig
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve, resolve_device

# Engine options that a start decides itself: its cache is empty, or has what the start before it compiled.
OF_A_START = ("cache_dir", "compile_cache")


@dataclass(frozen=True)
class EngineRows:
    """Rows that are measured with one engine, or, if `starts`, by starting one; options: all of the engine's."""

    subject: Subject
    options: Mapping[str, Any]
    config: EngineConfig
    sizes: ModelSizes
    rates: Rates
    rows: tuple[Row, ...]
    starts: bool

    def name(self) -> str:
        return f"{self.subject.title}{', fresh processes' if self.starts else ''}"


@dataclass(frozen=True)
class Plan:
    """ids: of all rows, in the order of the table. given: the user's engine options. notes: what is left out."""

    engines: tuple[EngineRows, ...]
    ids: tuple[str, ...]
    given: Mapping[str, Any]
    notes: tuple[str, ...]


def make_plan(given: Mapping[str, Any], patterns: Sequence[str], *, with_curves: bool, folder: Path) -> Plan:
    """Raises ValueError, TypeError or OSError for what cannot be measured.

    patterns: ids of rows, in the order in which they are measured; none for all of the device. with_curves: of these
    the points of plots too. folder: where configurations of the known shapes are written; it must live as long as the
    plan.
    """
    on_gpu = resolve_device(given.get("device", "auto"), {}).type == "cuda"
    known, default = known_rows(on_gpu=on_gpu, own_model="model" in given)
    rows = [row for row in default if row.curve is None or with_curves]
    if patterns:
        rows = chosen(known, default, patterns)
    if with_curves and not any(row.curve for row in rows):
        raise ValueError(f"rows is {list(patterns)}, with no point of a plot; allowed with plots: such as 'curve-*'")
    rates_of = cache(device_rates)  # measuring them takes a second
    engines: list[EngineRows] = []
    notes: list[str] = []
    for subject, limits, starts, members in _groups(rows):
        options = _options(subject, limits, given, folder, starts=starts)
        config = resolve(make_options(options))
        fitting = [row for row in members if _check(row, config, asked=bool(patterns), notes=notes)]
        if fitting:
            rates = rates_of(config.device, config.model.dtype)
            sizes = model_sizes(config.model)
            engines.append(EngineRows(subject, options, config, sizes, rates, tuple(fitting), starts))
    if not engines:
        raise ValueError("; ".join(["no row can be measured", *notes]))
    measured = {row.id for engine in engines for row in engine.rows}
    ids = tuple(row.id for row in known if row.id in measured)
    return Plan(tuple(engines), ids, given, tuple(notes))


def _groups(rows: Iterable[Row]) -> list[tuple[Subject, Limits, bool, list[Row]]]:
    """Rows that share an engine, in the order of the first of each. Starts come last, as they take the longest."""
    found: dict[tuple[Subject, Limits, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row.subject, row.limits, isinstance(row.workload, Start)), []).append(row)
    return sorted(((*key, members) for key, members in found.items()), key=lambda group: group[2])


def _options(
    subject: Subject, limits: Limits, given: Mapping[str, Any], folder: Path, *, starts: bool
) -> dict[str, Any]:
    """The engine's options: what the user gave wins over the row's limits."""
    options = {name: value for name, value in asdict(limits).items() if value is not None}
    if subject.shape is not None:
        path = folder / (subject.prefix + "-start" * starts)
        if not path.exists():
            write_shape(path, subject.shape)
            if starts:
                write_tokenizer(path)
        options |= {"model": path, "load_format": "dummy"}
    elif "model" in given and limits.max_model_len is not None:
        longest = resolve(make_options(given)).model.max_model_len
        options["max_model_len"] = min(limits.max_model_len, longest)
    options |= given
    if starts:
        for name in OF_A_START:
            options.pop(name, None)
    return plain_options(options)


def _check(row: Row, config: EngineConfig, *, asked: bool, notes: list[str]) -> bool:
    """Whether the engine can do what the row needs. ValueError if it cannot and the row was asked for by name."""
    if isinstance(row.workload, Start):
        return True
    needs = row.workload.needs()
    for name, limit, needed in (
        ("max_model_len", config.model.max_model_len, needs.longest),
        ("max_num_seqs", config.scheduler.max_num_seqs, needs.at_once),
        ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens, needs.in_a_step),
    ):
        if limit < needed:
            said = f"{name} is {limit}; row {row.id} needs at least {needed}"
            if asked:
                raise ValueError(said)
            notes.append(f"left out: {said}")
            return False
    return True
