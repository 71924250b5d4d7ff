"""Measure the cost of HTTP by running the same requests through the engine's Python API and its streaming server."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compiled_engine.bench.processes import Ready, run_worker, server
from compiled_engine.bench.serving.load import LoadPlan, measure
from compiled_engine.bench.serving.requests import PlannedRequest, RandomPrompts, Rate, parse_lengths
from compiled_engine.bench.serving.target import find_model, parse_target
from compiled_engine.bench.worker_workloads import HttpWorkload
from compiled_engine.bench.workloads import summary
from compiled_engine.process.progress import Progress

# A run at a rate repeats the workload's requests this many times, to average over arrivals.
TIMES = 2
ENGINE = "the engine"
TIMEOUT_S = 600.0

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class HttpPlan:
    """Plan of a comparison between the engine's Python API and its server."""

    options: Mapping[str, Any]  # engine options
    arguments: Sequence[str]  # the same options as command line arguments
    workload: HttpWorkload
    servers: Sequence[Sequence[str]]  # further arguments of each server to measure
    share: float  # share of the saturating rate at which latencies are measured
    repeats: int
    starts: int  # restarts of engine and server, for the time of a start
    processes: int


def compare(plan: HttpPlan, progress: Progress, say: Say) -> dict[str, Any]:
    """Run the plan and return the result. say: called with the result so far after each part, as later parts may fail.

    The keys are benchmark ("http"), workload, repeats, date, machine, versions, model, and
    offline: output_throughput (median, spread) and mixed_step_ms.
    servers: for each, arguments, output_throughput, ratio (of output_throughput to offline's), the figures of runs as
        of `bench serve` (repeats, saturated, steady), and of the steady run ttft_p99_by_median (TTFT's 99th percentile
        over its median) and itl_p99_by_mixed_step (ITL's 99th percentile over mixed_step_ms). wall_s and cpu_s are the
        repeats' duration and each process's CPU time, warm-up included.
    ready_s: seconds until offline and server are ready, if a server without further arguments is measured.

    Raises ProcessError, and the errors of a load test.
    """
    with progress.stage("offline", total=1) as advance:
        found = run_worker(plan.options, plan.workload.task(plan.repeats), name=ENGINE)
        advance(1)
    result: dict[str, Any] = {
        "benchmark": "http",
        "workload": asdict(plan.workload),
        "repeats": plan.repeats,
        "offline": {
            "output_throughput": summary(found["output_throughput"]),
            "mixed_step_ms": found["mixed_step_ms"],
        },
        "servers": [],
        **{name: found[name] for name in ("date", "machine", "versions", "model")},
    }
    say(result)
    for arguments in plan.servers:
        with server([*plan.arguments, *arguments]) as started:
            result["servers"].append(_measure_server(plan, arguments, started, result["offline"], progress))
        say(result)
        if not arguments:
            result["ready_s"] = _measure_starts(plan, [started.ready_s], progress)
            say(result)
    return result


def _measure_starts(plan: HttpPlan, servers: list[float], progress: Progress) -> dict[str, Any]:
    """Measure starts of engine and server in turn; return both in seconds, as median and spread.

    servers: times of server starts that have been measured already; later ones are appended.
    """
    engines: list[float] = []
    with progress.stage("starts", total=plan.starts) as advance:
        for number in range(plan.starts):
            engines.append(run_worker(plan.options, None, name=ENGINE)["ready_s"])
            if number >= len(servers):
                with server(plan.arguments) as started:
                    servers.append(started.ready_s)
            advance(1)
    return {name: summary(seconds) for name, seconds in (("offline", engines), ("server", servers)) if seconds}


def _measure_server(
    plan: HttpPlan, arguments: Sequence[str], started: Ready, beside: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """Return a server's figures: of repeats with all requests at once, then of a run at a share of the saturating rate.

    arguments: the server's further arguments. beside: the Python API's figures, to which ratios are computed.
    """
    generator = random.Random(plan.workload.seed + 1)
    before = started.cpu_s()
    runs = []
    for _ in range(plan.repeats + 1):  # the first warms up
        shift = generator.randrange(plan.workload.vocab_size)
        prompts, lengths = plan.workload.requests(shift)
        planned = [PlannedRequest(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        runs += measure(_load(plan, started.url, tuple(planned), (Rate(float("inf")),)), progress)["runs"]
    after = started.cpu_s()
    rates = (Rate(float("inf")), Rate(plan.share, is_share=True))
    lengths_drawn = parse_lengths("length", f"uniform:{plan.workload.least}:{plan.workload.most}")
    drawn = RandomPrompts(lengths_drawn, lengths_drawn, 0, 1, plan.workload.vocab_size)
    saturated, steady = measure(_load(plan, started.url, drawn, rates), progress)["runs"]
    throughput = summary([run["output_throughput"] for run in runs[1:]])
    return {
        "arguments": list(arguments),
        "output_throughput": throughput,
        "ratio": throughput["median"] / beside["output_throughput"]["median"],
        "ttft_p99_by_median": steady["ttft_ms"]["p99"] / steady["ttft_ms"]["median"],
        "itl_p99_by_mixed_step": steady["itl_ms"]["p99"] / beside["mixed_step_ms"],
        "repeats": runs[1:],
        "saturated": saturated,
        "steady": steady,
        "wall_s": sum(run["duration_s"] for run in runs),
        "cpu_s": {name: after[name] - before.get(name, 0.0) for name in after},
    }


def _load(
    plan: HttpPlan, url: str, prompts: RandomPrompts | tuple[PlannedRequest, ...], rates: tuple[Rate, ...]
) -> LoadPlan:
    """Return a load plan for a server at `url`. Chunks of answers have token ids, to count tokens without text too."""
    target = parse_target(url, None, [])
    count = plan.workload.num_requests
    return LoadPlan(
        target=target,
        model=find_model(target, None, 0.0)[0],
        endpoint="completions",
        prompts=prompts,
        wanted=TIMES * count if isinstance(prompts, RandomPrompts) else count,
        fields={
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": plan.workload.temperature,
        },
        rates=rates,
        concurrency=count,
        timeout_s=TIMEOUT_S,
        processes=plan.processes,
        seed=plan.workload.seed,
    )
