"""The server's own metrics: latencies, token counts and finish reasons of requests, and HTTP responses."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, product
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from compiled_engine.features.pooling.frontend.outputs import PoolingRequestOutput
from compiled_engine.frontend.metric_list import PREFIX
from compiled_engine.frontend.outputs import RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.shared_figures import SharedFigures

# Upper bounds of the histogram buckets, in seconds or tokens.
_TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 120.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_FEW = (1, 2, 5, 10, 20, 50, 100)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_S),
    "inter_token_latency_seconds": ("Between the tokens of a request.", _TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean of a request's tokens after the first.", _TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", _REQUEST_S),
    "request_queue_time_seconds": ("From arrival to the first step.", _REQUEST_S),
    "request_inference_time_seconds": ("From the first step to the end.", _REQUEST_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_S),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_S),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a prompt.", _TOKENS),
    "request_params_n": ("Completions asked for.", _FEW),
    "request_params_max_tokens": ("max_tokens, where given.", _TOKENS),
}
IMAGE_COUNTERS = {
    "mm_cache_queries": "Images, or clips, in prompts.",
    "mm_cache_hits": "Images, or clips, in prompts that were processed before.",
    "image_processor_seconds": "Time that processing images took, in worker processes.",
    "audio_processor_seconds": "Time that processing clips took, in worker processes.",
}
IMAGE_GAUGES = {"mm_cache_bytes": "Processed images, or clips, in host memory."}
PROMPT_TOKENS = {
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Those that came from the prefix cache.",
}
ABORTED = "abort"
STATUSES = ("200", "400", "401", "403", "404", "405", "408", "413", "415", "431", "499", "500", "503")
OTHER = "other"


class Histogram:
    """A histogram with fixed buckets, summed over all API processes. `borders` are the buckets' upper bounds."""

    def __init__(self, borders: tuple[float, ...], figures: SharedFigures) -> None:
        self._borders = borders
        self._figures = figures
        self._first = figures.reserve(len(borders) + 2)
        self._last = self._first + len(borders) + 1

    def observe(self, value: float, times: int = 1) -> None:
        own = self._figures.own
        own[self._first + bisect_left(self._borders, value)] += times
        own[self._last] += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets as pairs, ascending: the upper bound, and the number of values up to it."""
        borders = [*map(str, map(float, self._borders)), "+Inf"]
        counts = self._figures.totals(range(self._first, self._last))
        return list(zip(borders, accumulate(counts), strict=True))

    @property
    def sum(self) -> float:
        return self._figures.total(self._last)


class Counts:
    """Counters by name, summed over all API processes."""

    def __init__(self, names: Iterable[Hashable], figures: SharedFigures) -> None:
        self._figures = figures
        self._columns = {name: figures.reserve(1) for name in names}

    def add(self, name: Hashable, count: float = 1) -> None:
        self._figures.own[self._columns[name]] += count

    def put(self, name: Hashable, count: float) -> None:
        """Set this process's count of `name`."""
        self._figures.own[self._columns[name]] = count

    def totals(self) -> dict[Any, float]:
        return {name: self._figures.total(column) for name, column in self._columns.items()}


class ServerMetrics:
    """The metrics of all API processes. Each process writes its own part, from one event loop. Reading sums all parts.

    `routes` are the values of the label `route` of HTTP responses.
    """

    def __init__(self, figures: SharedFigures, routes: Sequence[str]) -> None:
        self.histograms = {name: Histogram(borders, figures) for name, (_, borders) in HISTOGRAMS.items()}
        self.tokens = Counts(PROMPT_TOKENS, figures)
        self.finish_reasons = Counts(("stop", "length", "error", ABORTED), figures)
        self.images = Counts((*IMAGE_COUNTERS, *IMAGE_GAUGES), figures)
        self._responses = Counts(product(routes, (*STATUSES, OTHER)), figures)

    def request(self, params: SamplingParams) -> ObservedRequest:
        """Start observing a request to the engine: one prompt with all its completions."""
        self.histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(params.max_tokens)
        return ObservedRequest(self, params.n)

    def pooled(self, outputs: Sequence[PoolingRequestOutput[Any]], seconds: float) -> None:
        """Count the results of a pooling request that took `seconds`."""
        for output in outputs:
            self.tokens.add("prompt_tokens", len(output.prompt_token_ids))
            self.tokens.add("prompt_tokens_cached", output.num_cached_tokens or 0)
            self.histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        self.finish_reasons.add("stop", len(outputs))
        self.histograms["e2e_request_latency_seconds"].observe(seconds)

    def count_images(self, figures: Mapping[str, float]) -> None:
        """Set this process's metrics of images to `figures`, the result of AsyncLLM.frontend_metrics."""
        for name, figure in figures.items():
            self.images.put(name, figure)

    def response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self._responses.add((route, str(status) if str(status) in STATUSES else OTHER))

    def collect(self, labels: dict[str, str]) -> list[Metric]:
        """Return all metrics as Prometheus families with these labels."""
        names, values = list(labels), list(labels.values())
        families: list[Metric] = []
        for name, count in self.tokens.totals().items():
            counter = CounterMetricFamily(PREFIX + name, PROMPT_TOKENS[name], labels=names)
            counter.add_metric(values, count)
            families.append(counter)
        for name, total in self.images.totals().items():
            make = CounterMetricFamily if name in IMAGE_COUNTERS else GaugeMetricFamily
            family = make(PREFIX + name, {**IMAGE_COUNTERS, **IMAGE_GAUGES}[name], labels=names)
            family.add_metric(values, total)
            families.append(family)
        ends = CounterMetricFamily(PREFIX + "request_success", "Completions, by how they ended.",
                                   labels=[*names, "finished_reason"])  # fmt: skip
        for reason, count in self.finish_reasons.totals().items():
            ends.add_metric([*values, reason], count)
        responses = CounterMetricFamily(PREFIX + "http_responses", "HTTP responses.", labels=["route", "status"])
        for (route, status), count in self._responses.totals().items():
            if count:
                responses.add_metric([route, status], count)
        families += [ends, responses]
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=names)
            histogram.add_metric(values, self.histograms[name].buckets(), self.histograms[name].sum)
            families.append(histogram)
        return families


class ObservedRequest:
    """Records metrics of one request to the engine, as its outputs arrive."""

    def __init__(self, metrics: ServerMetrics, completions: int) -> None:
        self._metrics = metrics
        self._unfinished = completions
        self._tokens: dict[int, int] = {}
        self._gaps = 0
        self._newest = 0.0
        self._ended = False

    def refused(self) -> None:
        """Note that the engine refused the request, so that `end` does not count it."""
        self._ended = True

    def output(self, result: RequestOutput) -> None:
        """Record the tokens and times of an output, which must be of the kind "delta" or "final"."""
        now = time.perf_counter()
        for completion in result.outputs:
            count = len(completion.token_ids)
            if completion.index in self._tokens and count and self._unfinished == len(self._tokens) == 1:
                self._metrics.histograms["inter_token_latency_seconds"].observe((now - self._newest) / count, count)
                self._gaps += count
            self._tokens[completion.index] = self._tokens.get(completion.index, 0) + count
            if completion.finish_reason is not None:
                self._metrics.finish_reasons.add(completion.finish_reason)
                self._unfinished -= 1
        self._newest = now
        if result.finished and result.metrics is not None:
            self._finish(result, result.metrics)

    def end(self) -> None:
        """Record that the client's answer has ended. Unfinished completions count as aborted."""
        if not self._ended:
            self._ended = True
            self._metrics.finish_reasons.add(ABORTED, self._unfinished)

    def _finish(self, result: RequestOutput, times: RequestMetrics) -> None:
        self._ended = True
        metrics, generated = self._metrics, sum(self._tokens.values())
        metrics.tokens.add("prompt_tokens", len(result.prompt_token_ids))
        metrics.tokens.add("prompt_tokens_cached", result.num_cached_tokens or 0)
        observed = {
            "request_prompt_tokens": len(result.prompt_token_ids),
            "request_generation_tokens": generated,
            "time_to_first_token_seconds": times.ttft_s,
            "request_queue_time_seconds": times.time_in_queue,
            "request_time_per_output_token_seconds": times.tpot_s,
            "e2e_request_latency_seconds": _between(times.arrival_time, times.finished_time),
            "request_inference_time_seconds": _between(times.first_scheduled_time, times.finished_time),
            "request_prefill_time_seconds": _between(times.first_scheduled_time, times.first_token_time),
            "request_decode_time_seconds": _between(times.first_token_time, times.last_token_time),
        }
        for name, value in observed.items():
            if value is not None:
                metrics.histograms[name].observe(value)
        if times.tpot_s is not None and self._gaps == 0:  # no intervals were observed: record the mean for each
            metrics.histograms["inter_token_latency_seconds"].observe(times.tpot_s, times.num_generation_tokens - 1)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
