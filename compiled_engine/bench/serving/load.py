"""Run a load test from its plan to its result: one run for each rate. Client processes send the requests."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from compiled_engine.bench.processes import Started, started
from compiled_engine.bench.results import host_provenance
from compiled_engine.bench.serving.client import Job, Outgoing, Report
from compiled_engine.bench.serving.figures import PERCENTILES, figures_of, records_of
from compiled_engine.bench.serving.requests import Endpoint, PlannedRequest, Ramp, RandomPrompts, Rate, arrival_times
from compiled_engine.bench.serving.target import Target
from compiled_engine.process.progress import Progress


@dataclass(frozen=True)
class LoadPlan:
    """Plan of a load test; see `compiled-engine bench serve --help` for its fields."""

    target: Target
    model: str
    endpoint: Endpoint
    # random prompts, drawn for each run, or those of a dataset, the same for each run
    prompts: RandomPrompts | tuple[PlannedRequest, ...]
    wanted: int  # requests per run
    fields: Mapping[str, Any]  # of every request's body, besides prompt and length
    rates: tuple[Rate, ...]
    concurrency: int | None
    timeout_s: float
    processes: int
    seed: int
    ramp: Ramp | None = None
    burstiness: float = 1.0
    warm_ups: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)  # bounds of latencies in ms
    percentiles: tuple[float, ...] = PERCENTILES
    detailed: bool = False

    def requests(self, generator: np.random.Generator) -> Sequence[PlannedRequest]:
        """Return the requests of one run."""
        if isinstance(self.prompts, RandomPrompts):
            return self.prompts.requests(self.endpoint, self.wanted, generator)
        return self.prompts

    def body(self, request: PlannedRequest) -> bytes:
        """Return the JSON body of a request."""
        prompt = {"prompt" if self.endpoint == "completions" else "messages": request.prompt}
        return msgspec.json.encode({"model": self.model, **prompt, "max_tokens": request.output_len, **self.fields})

    def settings(self) -> dict[str, Any]:
        """Return a description of the load, for the result."""
        if isinstance(self.prompts, RandomPrompts):
            workload: dict[str, Any] = {
                "input_len": self.prompts.input_len.text,
                "output_len": self.prompts.output_len.text,
                "shared_prefix": self.prompts.shared_prefix,
                "num_prefixes": self.prompts.num_prefixes,
            }
        else:
            workload = {"dataset_requests": len(self.prompts)}
        return {
            "endpoint": self.endpoint,
            "requests": self.wanted,
            **workload,
            "request_rate": [str(rate) for rate in self.rates] if self.ramp is None else None,
            "ramp": None if self.ramp is None else str(self.ramp),
            "burstiness": self.burstiness,
            "concurrency": self.concurrency,
            "fields": dict(self.fields),
            "seed": self.seed,
        }


def measure(plan: LoadPlan, progress: Progress) -> dict[str, Any]:
    """Run the plan and return the result. Its `runs` have the figures of each run.

    A run's `rate` is in requests per second, None if all requests are sent at once (inf) or on a ramp. Raises
    ProcessError if a client process fails. Raises ValueError if no warm-up request is completed, or if a rate is a
    percentage of the throughput at inf and the run at inf has completed no request.
    """
    generator = np.random.default_rng(plan.seed)
    if plan.warm_ups:
        _warm_up(plan, generator, progress)
    saturating: float | None = None
    runs = []
    for rate in plan.rates:
        asked = rate.value
        if rate.is_share:
            if not saturating:
                raise ValueError(f"request_rate is {rate}, but the run at inf has completed no request")
            asked = rate.value * saturating
        due = arrival_times(plan.wanted, asked, plan.burstiness, plan.ramp, generator)
        name = _name(plan, asked)
        job = Job(plan.target, plan.endpoint, _outgoing(plan, due, generator), plan.concurrency, plan.timeout_s)
        reports = send(job, plan.processes, name, progress)
        figures = figures_of(reports, plan.goodput, plan.percentiles)
        if math.isinf(asked) and plan.ramp is None:
            saturating = figures["request_throughput"]
        shown = None if plan.ramp is not None or math.isinf(asked) else asked
        runs.append({"name": name, "rate": shown, "asked": str(rate), **figures})
        if plan.detailed:
            runs[-1]["records"] = records_of(reports)
    return {
        "benchmark": "serve",
        "url": plan.target.url,
        "served_model": plan.model,
        "load": plan.settings(),
        "runs": runs,
        **host_provenance(),
    }


def _name(plan: LoadPlan, rate: float) -> str:
    if plan.ramp is not None:
        return f"ramp {plan.ramp}"
    return "all at once" if math.isinf(rate) else f"{rate:.3g}/s"


def _outgoing(plan: LoadPlan, due: Sequence[float], generator: np.random.Generator) -> list[Outgoing]:
    return [
        Outgoing(index, each, msgspec.Raw(plan.body(request)))
        for index, (each, request) in enumerate(zip(due, plan.requests(generator), strict=True))
    ]


def _warm_up(plan: LoadPlan, generator: np.random.Generator, progress: Progress) -> None:
    requests = _outgoing(plan, [0.0] * plan.wanted, generator)[: plan.warm_ups]
    reports = send(Job(plan.target, plan.endpoint, requests, 1, plan.timeout_s), 1, "warm-up", progress)
    figures = figures_of(reports, {}, ())
    if not figures["completed"]:
        said = "; ".join(f"{kind}: {message}" for kind, message in figures["first_errors"].items())
        raise ValueError(f"url is {plan.target.url!r}, which fails every request: {said}")


SENDER = "compiled_engine.bench.serving.client"
# From the last sender's readiness to the start, for the start line to reach all senders.
LEAD_S = 0.05


def shared_out(job: Job, processes: int) -> list[Job]:
    """Return a job for each of `processes` processes, which get requests in turn and equal parts of the concurrency."""
    parts = []
    for number in range(processes):
        concurrency = job.concurrency
        if concurrency is not None:
            concurrency = concurrency // processes + (number < concurrency % processes)
        parts.append(msgspec.structs.replace(job, requests=job.requests[number::processes], concurrency=concurrency))
    return parts


def send(job: Job, processes: int, name: str, progress: Progress) -> list[Report]:
    """Run a job on several processes, which start at the same time, and return their reports.

    Raises ProcessError if a process ends without a report.
    """
    with ExitStack() as stack, progress.stage(name, total=len(job.requests)) as advance:
        senders = []
        for part in shared_out(job, processes):
            senders.append(_Sender(stack.enter_context(started(["-m", SENDER], "a sender"))))
            senders[-1].process.write(msgspec.json.encode(part))
        for sender in senders:
            sender.await_ready()
        start = time.monotonic() + LEAD_S
        threads = []
        for sender in senders:
            sender.process.write(f"{start!r}".encode())
            threads.append(threading.Thread(target=sender.follow, args=(advance,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return [sender.report() for sender in senders]


class _Sender:
    def __init__(self, process: Started) -> None:
        self.process = process
        self._report: bytes | None = None

    def await_ready(self) -> None:
        """Read lines until one says "ready", or until the process ends."""
        any("ready" in line for line in self._lines())

    def follow(self, advance: Any) -> None:
        """Read lines until the process ends. advance: called with the number of requests that have newly ended."""
        ended = 0
        for line in self._lines():
            if "ended" in line:
                advance(line["ended"] - ended)
                ended = line["ended"]

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self.process.lines():
            if line.startswith(b'{"report"'):
                self._report = line
            else:
                yield json.loads(line)

    def report(self) -> Report:
        if self._report is None:
            raise self.process.error()
        return msgspec.json.decode(self._report, type=dict[str, Report])["report"]
