"""Plan and measure the performance table.

Everything is checked before the first engine starts. Rows with the same model and limits share an engine. Each row is
repeated, so that it has a median and a spread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compiled_engine.bench.bounds import ModelSizes, Rates, device_rates, model_sizes, with_tower
from compiled_engine.bench.drafts import drafts_of
from compiled_engine.bench.image_rows import write_processor
from compiled_engine.bench.large_tokenizer import write_tokenizer
from compiled_engine.bench.processes import ProcessError
from compiled_engine.bench.results import model_record, plain_options, provenance
from compiled_engine.bench.shapes import write_shape
from compiled_engine.bench.start_up import measure as measure_starts
from compiled_engine.bench.table_rows import Limits, Row, Start, Subject, chosen, known_rows
from compiled_engine.bench.workloads import LOWER, summary
from compiled_engine.config import EngineConfig
from compiled_engine.llm import LLM
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve, resolve_device

# Engine options that a start sets itself: its cache is empty, or filled by the start before it.
OF_A_START = ("cache_dir", "compile_cache")


@dataclass(frozen=True)
class EngineRows:
    """Rows of the table that share an engine."""

    subject: Subject
    options: Mapping[str, Any]  # complete engine options
    config: EngineConfig
    sizes: ModelSizes
    rates: Rates
    rows: tuple[Row, ...]
    starts: bool  # the rows are measured by starting this engine in fresh processes

    def name(self) -> str:
        return f"{self.subject.title}{', fresh processes' if self.starts else ''}"


@dataclass(frozen=True)
class Plan:
    """The rows of the table to measure, grouped by the engine that they share."""

    engines: tuple[EngineRows, ...]
    ids: tuple[str, ...]  # of all rows, in the order of the table
    given: Mapping[str, Any]  # the user's engine options
    notes: tuple[str, ...]  # rows that are left out, with reasons


def make_plan(given: Mapping[str, Any], patterns: Sequence[str], *, with_curves: bool, folder: Path) -> Plan:
    """Return the plan of a table. given: the user's engine options.

    patterns: select rows, see `chosen`; empty for all default rows of the device. with_curves: include the points of
    plots. Configurations of the known shapes are written to `folder`, which must outlive the plan. Raises ValueError,
    TypeError or OSError if something that is asked for cannot be measured.
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
            if config.images is not None:
                sizes = with_tower(sizes, config.images)
            engines.append(EngineRows(subject, options, config, sizes, rates, tuple(fitting), starts))
    if not engines:
        raise ValueError("; ".join(["no row can be measured", *notes]))
    measured = {row.id for engine in engines for row in engine.rows}
    ids = tuple(row.id for row in known if row.id in measured)
    return Plan(tuple(engines), ids, given, tuple(notes))


def _groups(rows: Iterable[Row]) -> list[tuple[Subject, Limits, bool, list[Row]]]:
    """Return (subject, limits, whether the rows measure starts, rows) for each group of rows that share an engine.

    Groups are in order of appearance, but starts come last, since they take the longest.
    """
    found: dict[tuple[Subject, Limits, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row.subject, row.limits, isinstance(row.workload, Start)), []).append(row)
    return sorted(((*key, members) for key, members in found.items()), key=lambda group: group[2])


def _options(
    subject: Subject, limits: Limits, given: Mapping[str, Any], folder: Path, *, starts: bool
) -> dict[str, Any]:
    """Return complete engine options for rows of this subject and these limits. starts: the rows measure starts.

    given: the user's options, which take precedence over the limits. Some of them have no effect: for rows that measure
    starts, the options of the compile cache (OF_A_START); for rows with drafts, load_format and speculative_config.
    folder: for the configurations of known shapes.
    """
    options = {name: value for name, value in asdict(limits).items() if value is not None and name != "drafts"}
    if subject.shape is not None:
        path = folder / (subject.prefix + "-start" * starts)
        if not path.exists():
            write_shape(path, subject.shape)
            if starts:
                write_tokenizer(path)
            if subject.sees:
                write_processor(path)
        options |= {"model": path, "load_format": "dummy"}
    elif "model" in given and limits.max_model_len is not None:
        longest = resolve(make_options(given)).model.max_model_len
        options["max_model_len"] = min(limits.max_model_len, longest)
    options |= given
    if limits.drafts is not None:
        options["load_format"] = "dummy"
        model = resolve(make_options(options)).model
        options["speculative_config"] = drafts_of(limits.drafts, model, folder)
    if starts:
        for name in OF_A_START:
            options.pop(name, None)
    return plain_options(options)


def _check(row: Row, config: EngineConfig, *, asked: bool, notes: list[str]) -> bool:
    """Return whether an engine with this configuration can run the row; if not, add the reason to `notes`.

    asked: the user has selected rows, so raise ValueError with the reason instead.
    """
    if isinstance(row.workload, Start):
        return True
    needs = row.workload.needs(config.max_new_tokens_per_step)
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


# Repeats of a row: at least LEAST_REPEATS, then up to MOST_REPEATS while all together took less than ENOUGH_SECONDS.
LEAST_REPEATS, ENOUGH_SECONDS, MOST_REPEATS = 3, 2.5, 7
# Fewer than for rows: a start takes many times as long.
START_REPEATS = 2

Say = Callable[[dict[str, Any]], None]


@dataclass
class _Rows:
    """Collects the records of rows, and reports the result so far after each row, in case a later row fails."""

    plan: Plan
    say: Say
    records: list[dict[str, Any]]
    begun: float

    def add(self, engine: EngineRows, row: Row, found: Mapping[str, Any]) -> None:
        record = _record(engine, row) | dict(found)
        if "measured" in record:
            bound, median = record["bound"], record["measured"]["median"]
            record["share_of_bound"] = bound / median if record["better"] == LOWER else median / bound
        self.records.append(record)
        self.say(self.result())

    def where(self, row: Row) -> str:
        return f"{row.id} (row {len(self.records) + 1} of {len(self.plan.ids)})"

    def result(self) -> dict[str, Any]:
        plan = self.plan
        configs = {engine.subject.prefix: engine for engine in plan.engines}
        return {
            "benchmark": "table",
            "rows": sorted(self.records, key=lambda record: plan.ids.index(record["id"])),
            **provenance(plan.engines[0].config.device),
            "models": {name: model_record(one.config, one.subject.shape) for name, one in configs.items()},
            "options": plain_options(plan.given),
            "rates": {name: asdict(one.rates) for name, one in configs.items()},
            "notes": list(plan.notes),
            "seconds": round(time.perf_counter() - self.begun, 1),
        }


def measure(plan: Plan, repeats: int | None, progress: Progress, say: Say) -> dict[str, Any]:
    """Measure the rows and return the result as a dict for JSON. say: called with the result so far after each row.

    rows are objects of id, model, what, unit, better (lower or higher), options, workload, bound (None for a failed
    start), and either measured (median, spread [min, max], n, values) with share_of_bound, or error; seconds that the
    row took with its warm-up, if an engine ran it; and curve and place for a point of a plot. Further keys are date,
    machine, versions, models, options (the user's), rates, notes and seconds.

    repeats: number of repeats of each row; None: LEAST_REPEATS to MOST_REPEATS, or START_REPEATS for starts. After a
    failed row, measuring continues.
    """
    rows = _Rows(plan, say, [], time.perf_counter())
    for engine in plan.engines:
        if engine.starts:
            _measure_starts(engine, repeats or START_REPEATS, progress, rows)
        else:
            _measure_engine(engine, repeats, progress, rows)
    return rows.result()


def _measure_starts(engine: EngineRows, repeats: int, progress: Progress, rows: _Rows) -> None:
    try:
        starts = measure_starts(engine.options, engine.config.device, 0, repeats, progress)
    except ProcessError as error:
        for row in engine.rows:
            rows.add(engine, row, {"error": str(error)})
        return
    for row in engine.rows:
        assert isinstance(row.workload, Start)
        seconds = starts.kinds[row.workload.kind]["seconds"]
        rows.add(engine, row, {"bound": starts.torch_alone["median"], "measured": seconds | {"n": repeats}})


def _measure_engine(engine: EngineRows, repeats: int | None, progress: Progress, rows: _Rows) -> None:
    left = list(engine.rows)
    try:
        with progress.stage(f"start {engine.name()}", total=1) as advance:
            llm = LLM(**engine.options, progress=False)
            advance(1)
        with llm:
            while left:
                begun = time.perf_counter()
                try:
                    found = _measure_row(llm, left[0], repeats, rows.where(left[0]), progress)
                except Exception as error:  # a failed row must not affect the others
                    found = {"error": f"{type(error).__name__}: {error}"}
                rows.add(engine, left.pop(0), found | {"seconds": round(time.perf_counter() - begun, 2)})
    except Exception as error:
        for row in left:
            rows.add(engine, row, {"error": f"{type(error).__name__}: {error}"})


def _measure_row(llm: LLM, row: Row, repeats: int | None, name: str, progress: Progress) -> dict[str, Any]:
    workload = row.workload
    assert not isinstance(workload, Start)
    together = workload.needs(llm.config.max_new_tokens_per_step).together
    slots = llm.metrics()["blocks_total"] * llm.config.cache.block_size
    if slots < together:
        raise ValueError(f"the KV cache holds {slots:,} tokens; the row needs {together:,} at once")
    llm.reset_prefix_cache()
    generator = random.Random(llm.config.model.seed)
    values: list[float] = []
    with progress.stage(name, total=repeats) as advance:
        workload.warm_up(llm, generator)
        begun = time.perf_counter()
        while _needs_another(len(values), time.perf_counter() - begun, repeats):
            values.append(workload.once(llm, generator))
            advance(1)
    return {"measured": summary(values) | {"n": len(values), "values": values}}


def _needs_another(done: int, seconds: float, repeats: int | None) -> bool:
    if repeats is not None:
        return done < repeats
    return done < LEAST_REPEATS or (done < MOST_REPEATS and seconds < ENOUGH_SECONDS)


def _record(engine: EngineRows, row: Row) -> dict[str, Any]:
    workload, max_num_seqs = row.workload, engine.config.scheduler.max_num_seqs
    bound = None if isinstance(workload, Start) else workload.bound(engine.sizes, engine.rates, max_num_seqs)
    return {
        "id": row.id,
        "model": row.subject.title,
        "what": workload.what(),
        "unit": workload.unit,
        "better": workload.better,
        "options": {name: value for name, value in asdict(row.limits).items() if value is not None},
        "workload": {"kind": type(workload).__name__, **asdict(workload)},
        **({"curve": row.curve[0], "place": row.curve[1]} if row.curve else {}),
        "bound": bound,
    }
