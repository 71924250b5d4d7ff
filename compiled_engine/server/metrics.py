"""What the server counts itself: times, tokens and ends of requests, and HTTP responses."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from compiled_engine.frontend.metric_list import PREFIX
from compiled_engine.frontend.outputs import RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams

# Upper borders of the buckets: seconds of a token, seconds of a request, and tokens.
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
ABORTED = "abort"


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, borders: tuple[float, ...]) -> None:
        self._borders = borders
        self._counts = [0] * (len(borders) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._borders, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Border and number of values up to it, ascending."""
        borders = [*map(str, map(float, self._borders)), "+Inf"]
        return list(zip(borders, map(float, accumulate(self._counts)), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class ServerMetrics:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(borders) for name, (_, borders) in HISTOGRAMS.items()}
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.finish_reasons: Counter[str] = Counter({"stop": 0, "length": 0, "error": 0, ABORTED: 0})
        self.responses: Counter[tuple[str, int]] = Counter()

    def request(self, params: SamplingParams) -> ObservedRequest:
        """Start to follow a request to the engine: one prompt, with all its completions."""
        self.histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(params.max_tokens)
        return ObservedRequest(self, params.n)

    def response(self, route: str, status: int) -> None:
        """An HTTP response began."""
        self.responses[route, status] += 1

    def collect(self, labels: dict[str, str]) -> list[Metric]:
        """All of it as families of metrics with these labels."""
        names, values = list(labels), list(labels.values())
        counters = (
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("prompt_tokens_cached", "Those that came from the prefix cache.", self.cached_prompt_tokens),
        )
        families: list[Metric] = []
        for name, text, count in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(values, count)
            families.append(counter)
        ends = CounterMetricFamily(PREFIX + "request_success", "Completions, by how they ended.",
                                   labels=[*names, "finished_reason"])  # fmt: skip
        for reason, count in self.finish_reasons.items():
            ends.add_metric([*values, reason], count)
        responses = CounterMetricFamily(PREFIX + "http_responses", "HTTP responses.", labels=["route", "status"])
        for (route, status), count in self.responses.items():
            responses.add_metric([route, str(status)], count)
        families += [ends, responses]
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=names)
            histogram.add_metric(values, self.histograms[name].buckets(), self.histograms[name].sum)
            families.append(histogram)
        return families


class ObservedRequest:
    """Follows the outputs of one request to the engine."""

    def __init__(self, metrics: ServerMetrics, completions: int) -> None:
        self._metrics = metrics
        self._unfinished = completions
        self._tokens: dict[int, int] = {}
        self._gaps = 0
        self._newest = 0.0
        self._ended = False

    def refused(self) -> None:
        """It never began."""
        self._ended = True

    def output(self, result: RequestOutput) -> None:
        """The engine gave an output; "delta" and "final" ones count."""
        now = time.perf_counter()
        for completion in result.outputs:
            count = len(completion.token_ids)
            if completion.index in self._tokens and count and self._unfinished == len(self._tokens) == 1:
                self._metrics.histograms["inter_token_latency_seconds"].observe((now - self._newest) / count, count)
                self._gaps += count
            self._tokens[completion.index] = self._tokens.get(completion.index, 0) + count
            if completion.finish_reason is not None:
                self._metrics.finish_reasons[completion.finish_reason] += 1
                self._unfinished -= 1
        self._newest = now
        if result.finished and result.metrics is not None:
            self._finish(result, result.metrics)

    def end(self) -> None:
        """Nobody waits for it any more; completions that have not finished are aborted."""
        if not self._ended:
            self._ended = True
            self._metrics.finish_reasons[ABORTED] += self._unfinished

    def _finish(self, result: RequestOutput, times: RequestMetrics) -> None:
        self._ended = True
        metrics, generated = self._metrics, sum(self._tokens.values())
        metrics.prompt_tokens += len(result.prompt_token_ids)
        metrics.cached_prompt_tokens += result.num_cached_tokens or 0
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
        if times.tpot_s is not None and self._gaps == 0:  # nobody saw the tokens come: their mean, for each
            metrics.histograms["inter_token_latency_seconds"].observe(times.tpot_s, times.num_generation_tokens - 1)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
