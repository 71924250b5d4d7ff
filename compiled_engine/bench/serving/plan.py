"""Make the plan of a load test from the user's options. Everything is checked before the first request."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from compiled_engine.bench.serving.figures import parse_goodput
from compiled_engine.bench.serving.load import LoadPlan
from compiled_engine.bench.serving.requests import (
    Endpoint,
    Lengths,
    PlannedRequest,
    RandomPrompts,
    longest,
    parse_lengths,
    parse_ramp,
    parse_rates,
    read_dataset,
)
from compiled_engine.bench.serving.target import find_model, parse_target

DEFAULT_LENGTH = "128"
DEFAULT_REQUESTS = 100


@dataclass(frozen=True)
class Asked:
    """The options of `compiled-engine bench serve` as given."""

    url: str
    endpoint: str
    model: str | None
    api_key: str | None
    header: Sequence[str]
    request_rate: Sequence[str]
    burstiness: float
    ramp: str | None
    concurrency: int | None
    num_requests: int | None
    num_warmups: int
    input_len: str | None
    output_len: str | None
    shared_prefix: int
    num_prefixes: int
    vocab_size: int
    dataset: Path | None
    ignore_eos: bool
    temperature: float | None
    extra_body: str | None
    seed: int
    goodput: Sequence[str]
    metric_percentiles: str
    ready_timeout: float
    request_timeout: float
    client_processes: int
    save_detailed: bool


def make_plan(asked: Asked) -> LoadPlan:
    """Return the plan for these options. Raises ValueError, which names the invalid option. Queries the server last."""
    endpoint = _endpoint(asked.endpoint)
    if not (asked.burstiness > 0 and math.isfinite(asked.burstiness)):
        raise ValueError(f"burstiness is {asked.burstiness}; allowed: above 0")
    ramp = None if asked.ramp is None else parse_ramp(asked.ramp)
    if ramp is not None and asked.request_rate:
        raise ValueError(f"ramp is {asked.ramp!r} and request_rate is given too; allowed: one of the two")
    rates = parse_rates(asked.request_rate or ["inf"])
    if asked.concurrency is not None and asked.concurrency < asked.client_processes:
        raise ValueError(
            f"client_processes is {asked.client_processes}; allowed: at most the concurrency, {asked.concurrency}"
        )
    prompts, most = _prompts(asked, endpoint)
    wanted = (asked.num_requests or DEFAULT_REQUESTS) if isinstance(prompts, RandomPrompts) else len(prompts)
    fields, goodput, percentiles = _fields(asked), parse_goodput(asked.goodput), _percentiles(asked.metric_percentiles)
    target = parse_target(asked.url, asked.api_key, asked.header)
    model, max_model_len = find_model(target, asked.model, asked.ready_timeout)
    if max_model_len is not None and most > max_model_len:
        raise ValueError(f"a request may have {most} tokens; allowed by the server: {max_model_len}")
    return LoadPlan(
        target=target,
        model=model,
        endpoint=endpoint,
        prompts=prompts,
        wanted=wanted,
        fields=fields,
        rates=tuple(rates),
        ramp=ramp,
        burstiness=asked.burstiness,
        concurrency=asked.concurrency,
        warm_ups=min(asked.num_warmups, wanted),
        timeout_s=asked.request_timeout,
        processes=asked.client_processes,
        seed=asked.seed,
        goodput=goodput,
        percentiles=percentiles,
        detailed=asked.save_detailed,
    )


def _endpoint(text: str) -> Endpoint:
    for name in get_args(Endpoint):
        if text in (name, f"/v1/{name}", f"/v1/{name}/completions"):
            return name  # type: ignore[no-any-return]
    raise ValueError(f"endpoint is {text!r}; allowed: {', '.join(get_args(Endpoint))}")


def _prompts(asked: Asked, endpoint: Endpoint) -> tuple[RandomPrompts | tuple[PlannedRequest, ...], int]:
    """Return (prompts, tokens of the longest possible request). The latter is 0 if it is not known."""
    output_len = parse_lengths("output_len", asked.output_len or DEFAULT_LENGTH)
    if asked.dataset is not None:
        return _of_dataset(asked, asked.dataset, endpoint, output_len)
    input_len = parse_lengths("input_len", asked.input_len or DEFAULT_LENGTH)
    prompts = RandomPrompts(input_len, output_len, asked.shared_prefix, asked.num_prefixes, asked.vocab_size)
    return prompts, asked.shared_prefix + input_len.most + output_len.most if endpoint == "completions" else 0


def _of_dataset(
    asked: Asked, dataset: Path, endpoint: Endpoint, output_len: Lengths
) -> tuple[tuple[PlannedRequest, ...], int]:
    for name, value in (("input_len", asked.input_len), ("shared_prefix", asked.shared_prefix)):
        if value:
            raise ValueError(f"{name} is {value}, but the prompts are those of the dataset; allowed: one of the two")
    generator = np.random.default_rng(asked.seed)
    requests = tuple(read_dataset(dataset, endpoint, asked.num_requests, output_len, generator))
    return requests, longest(requests)


def _fields(asked: Asked) -> dict[str, Any]:
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if asked.ignore_eos:
        fields["ignore_eos"] = True
    if asked.temperature is not None:
        fields["temperature"] = asked.temperature
    if asked.extra_body is not None:
        try:
            extra = json.loads(asked.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict) or not extra.get("stream", True):
            raise ValueError(f"extra_body is {asked.extra_body!r}; allowed: a JSON object, in which stream is true")
        fields |= extra
    return fields


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
        if not all(0 < value < 100 for value in values):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"metric_percentiles is {text!r}; allowed: numbers between 0 and 100, with commas between"
        ) from None
    return values
