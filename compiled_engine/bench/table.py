"""Measures the table: one engine for all rows that it can serve, each row repeated until it has a spread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compiled_engine.bench.fresh_process import WorkerError
from compiled_engine.bench.machine import model_record, plain_options, provenance
from compiled_engine.bench.start_up import measure as measure_starts
from compiled_engine.bench.table_plan import EngineRows, Plan
from compiled_engine.bench.table_rows import Row
from compiled_engine.bench.table_workloads import LOWER, Start
from compiled_engine.bench.workloads import summary
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress

# A row is repeated at least so often, and more while all its repeats took less than so many seconds, up to so often.
LEAST_REPEATS, ENOUGH_SECONDS, MOST_REPEATS = 3, 2.5, 7
# A start takes many times as long as a row.
START_REPEATS = 2

Say = Callable[[dict[str, Any]], None]


@dataclass
class _Rows:
    """The records so far, and who is told of each: what is measured must not be lost by what comes after."""

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
    """The result, as JSON. say: gets the result so far whenever a row is done.

    rows: objects of id, model, what, unit, better (lower or higher), options and workload, bound (None of a start that
    failed), and measured (median, spread [least, most], n, values) with share_of_bound, or error; seconds that the row
    took, with its warm-up. curve and place, where the row is a point of a plot. Besides: date, machine, versions,
    models, options (the user's), rates, notes, and seconds, which it took.

    repeats: of each row, instead of as many as give it a spread. What fails has an error, and the rest goes on.
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
    except WorkerError as error:
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
                except Exception as error:  # a row that fails must not take the others with it
                    found = {"error": f"{type(error).__name__}: {error}"}
                rows.add(engine, left.pop(0), found | {"seconds": round(time.perf_counter() - begun, 2)})
    except Exception as error:
        for row in left:
            rows.add(engine, row, {"error": f"{type(error).__name__}: {error}"})


def _measure_row(llm: LLM, row: Row, repeats: int | None, name: str, progress: Progress) -> dict[str, Any]:
    workload = row.workload
    assert not isinstance(workload, Start)
    together = workload.needs().together
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
