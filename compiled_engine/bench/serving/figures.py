"""Compute a run's figures from the records of its requests: rates, latencies, goodput, errors, and the client's delays.

An answer arrives in chunks. Latencies are of complete answers:
TTFT: from sending the request, including connecting, to the first chunk with output.
E2EL: from sending the request to the last chunk with output.
TPOT: (E2EL - TTFT) / (output tokens - 1).
ITL: between two consecutive chunks with output. If chunks have several tokens, which `tokens_per_chunk` shows, this is
not the time between tokens; TPOT is not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiled_engine.bench.serving.client import Record, Report

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (90.0, 95.0, 99.0)
TIMELINE_POINTS = 60
# Beyond either, the client may be the limit: share of a core, and seconds late at the 99th percentile.
BUSY = 0.85
LATE_S = 0.02


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Return bounds in ms by metric, parsed from METRIC=MS pairs that are separated by commas or spaces.

    Raises ValueError, which says what is allowed, for any other text.
    """
    bounds: dict[str, float] = {}
    for part in (part for text in texts for part in text.replace(",", " ").split()):
        name, _, value = part.replace("=", ":").partition(":")
        try:
            bounds[name] = float(value)
            if name not in METRICS or name == "itl" or not bounds[name] > 0:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"goodput is {part!r}; allowed: ttft=MS, tpot=MS and e2el=MS, with milliseconds above 0"
            ) from None
    return bounds


def figures_of(reports: Sequence[Report], goodput: Mapping[str, float], percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a run. A figure is None if there is nothing to compute it from.

    goodput: bounds of latencies in ms by metric. percentiles: the percentiles of latencies to include.

    Latencies are in ms, other times in s. duration_s is the time from the first request to the end of the last answer.
    The figure goodput counts complete answers whose latencies are within all bounds; a latency that is None is within
    its bound.
    """
    records = sorted((record for report in reports for record in report.records), key=lambda record: record.index)
    whole = [record for record in records if record.error is None]
    sent = [record.sent for record in records if record.sent is not None]
    duration = max((record.end or 0.0 for record in records), default=0.0) - min(sent, default=0.0)
    latencies = [_latencies(record) for record in whole]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in whole)
    output_tokens = sum(record.output_tokens for record in whole)
    good = sum(_is_good(each, goodput) for each in latencies)
    chunks = sum(len(record.chunk_times) for record in whole)
    per_s = 1 / duration if duration > 0 else 0.0
    return {
        "requests": len(records),
        "completed": len(whole),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "first_errors": _first_messages(records),
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_known": all(record.prompt_tokens is not None for record in whole),
        "output_tokens": output_tokens,
        "tokens_counted_by": dict(Counter(record.counted_by for record in whole)),
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        "request_throughput": len(whole) * per_s,
        "output_throughput": output_tokens * per_s,
        "total_token_throughput": (prompt_tokens + output_tokens) * per_s,
        "mean_concurrency": sum(each["e2el"] for each in latencies) / 1e3 * per_s,
        "goodput": {"bounds_ms": dict(goodput), "share": good / len(records), "request_throughput": good * per_s}
        if goodput
        else None,
        **{
            f"{name}_ms": _distribution([value for each in latencies for value in _values(each, name)], percentiles)
            for name in METRICS
        },
        "timeline": _timeline(whole, duration),
        "client": client_figures(reports),
    }


def client_figures(reports: Sequence[Report]) -> dict[str, Any]:
    """Return how busy and late the client was. Key is_suspect: whether the client may have limited the run."""
    lags = np.array([lag for report in reports for lag in report.lags_s] or [0.0])
    late = np.array([each for report in reports for each in report.late_s] or [0.0])
    busy = max((report.cpu_s / report.wall_s for report in reports if report.wall_s > 0), default=0.0)
    lag_p99, late_p99 = float(np.percentile(lags, 99)), float(np.percentile(late, 99))
    return {
        "processes": len(reports),
        "busiest_share_of_a_core": busy,
        "cpu_s": sum(report.cpu_s for report in reports),
        "loop_lag_ms": {"p99": lag_p99 * 1e3, "max": float(lags.max()) * 1e3},
        "late_sends_ms": {"p99": late_p99 * 1e3, "max": float(late.max()) * 1e3},
        "is_suspect": busy > BUSY or max(lag_p99, late_p99) > LATE_S,
    }


def records_of(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return a dict of times, tokens, latencies in ms and error for each request, in the order of the run."""
    records = sorted((record for report in reports for record in report.records), key=lambda record: record.index)
    return [
        {
            "due_s": record.due,
            "sent_s": record.sent,
            "end_s": record.end,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "error": record.error,
            **({name: _latencies(record)[name] for name in ("ttft", "tpot", "e2el")} if record.error is None else {}),
        }
        for record in records
    ]


def _latencies(record: Record) -> dict[str, Any]:
    """Return a complete answer's latencies in ms by metric. tpot is None for a single token."""
    sent, times = record.sent or 0.0, np.array(record.chunk_times)
    first, last = float(times[0]) - sent, float(times[-1]) - sent
    tokens = record.output_tokens
    return {
        "ttft": first * 1e3,
        "e2el": last * 1e3,
        "tpot": (last - first) / (tokens - 1) * 1e3 if tokens > 1 else None,
        "itl": np.diff(times) * 1e3,
    }


def _values(latencies: Mapping[str, Any], name: str) -> Sequence[float]:
    value = latencies[name]
    return value if name == "itl" else [] if value is None else [value]


def _is_good(latencies: Mapping[str, Any], goodput: Mapping[str, float]) -> bool:
    return all((latencies[name] or 0.0) <= bound for name, bound in goodput.items())


def _distribution(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any] | None:
    """Return statistics of values by name; None if there are no values.

    percentiles: those to include, each under its own name, such as p99. The statistic `quantiles`, for plots, is the
    list of all percentiles from 0 to 100.
    """
    if not len(values):
        return None
    array = np.array(values)
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "median": float(np.median(array)),
        **{f"p{each:g}": float(np.percentile(array, each)) for each in percentiles},
        "max": float(array.max()),
        "quantiles": [round(float(each), 4) for each in np.percentile(array, np.arange(101))],
    }


def _timeline(whole: Sequence[Record], duration: float) -> dict[str, Any]:
    """Return tokens per second and the number of running requests over time, in TIMELINE_POINTS equal intervals.

    whole: records of complete answers. duration: of the run, in seconds.
    """
    if not whole or duration <= 0:
        return {"seconds": [], "output_throughput": [], "concurrency": []}
    width = duration / TIMELINE_POINTS
    begin = min(record.sent or 0.0 for record in whole)
    tokens = np.zeros(TIMELINE_POINTS)
    for record in whole:
        share = record.output_tokens / len(record.chunk_times)
        places = ((np.array(record.chunk_times) - begin) / width).astype(int)
        np.add.at(tokens, np.clip(places, 0, TIMELINE_POINTS - 1), share)
    middles = begin + (np.arange(TIMELINE_POINTS) + 0.5) * width
    sent = np.array([record.sent or 0.0 for record in whole])
    end = np.array([record.end or 0.0 for record in whole])
    under_way = [int(((sent <= middle) & (middle < end)).sum()) for middle in middles]
    return {
        "seconds": [round(float(middle - begin), 4) for middle in middles],
        "output_throughput": [round(float(count / width), 1) for count in tokens],
        "concurrency": under_way,
    }


def _first_messages(records: Sequence[Record]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            messages.setdefault(record.error, record.message or "")
    return messages


# Above this number of tokens per part, a note is added.
SEVERAL = 1.005


def notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on how tokens were counted, and whether the client was the limit."""
    said = []
    if any("chunks" in run["tokens_counted_by"] for run in runs):
        said.append("The server counts no tokens: each part of an answer counts as one.")
    per_part = max((run["tokens_per_chunk"] or 1.0 for run in runs), default=1.0)
    if per_part > SEVERAL:
        said.append(f"Up to {per_part:.2f} tokens a part: ITL is the time between parts, TPOT that of a token.")
    for run in runs:
        client = run["client"]
        if client["is_suspect"]:
            is_busy = client["busiest_share_of_a_core"] > BUSY / 2
            advice = "Use more --client-processes." if is_busy else "Other work on its machine holds it up."
            lag, late = client["loop_lag_ms"]["p99"], client["late_sends_ms"]["p99"]
            said.append(
                f"{run['name']}: the client may be the limit: {client['busiest_share_of_a_core']:.0%} of a core; at the"
                f" 99th percentile it read {lag:.1f} ms and sent {late:.1f} ms late. {advice}"
            )
    return said
