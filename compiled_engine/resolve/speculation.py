"""Resolve speculative_config, with vLLM's keys, or raise an error with the allowed values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from compiled_engine.config import ModelConfig, SchedulerConfig, SpeculationConfig
from compiled_engine.options import EngineOptions
from compiled_engine.schema import integer, one_of, unknown_name_message

NGRAM = "ngram"
LOOKUP = 5
MOST_DRAFTS = 64
_LENGTH = integer(1, 1024)
KEYS = {
    "method": one_of(NGRAM),
    "num_speculative_tokens": integer(1, MOST_DRAFTS),
    "prompt_lookup_max": _LENGTH,
    "prompt_lookup_min": _LENGTH,
}
REQUIRED = ("method", "num_speculative_tokens")


def resolve_speculation(
    options: EngineOptions,
    device: torch.device,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    reasons: dict[str, str],
) -> SpeculationConfig:
    """Raises TypeError or ValueError naming the key, its value and what is allowed."""
    given = _read(options.speculative_config)
    if not given:
        return SpeculationConfig()
    for name, value in given.items():
        if name not in KEYS:
            raise ValueError(unknown_name_message("speculative_config has no key", str(name), KEYS))
        KEYS[name].check(f"speculative_config[{name!r}]", value)
    for name in REQUIRED:
        if name not in given:
            raise ValueError(f"speculative_config has no {name!r}, which it must have; got {dict(given)!r}")
    num_tokens, most = given["num_speculative_tokens"], scheduler.max_num_batched_tokens - 1
    if num_tokens > most:
        raise ValueError(
            f"speculative_config['num_speculative_tokens'] is {num_tokens}; allowed: at most {most}, one less than "
            "max_num_batched_tokens"
        )
    longest, shortest = _lookup(given, reasons)
    _check_together(options, device, model)
    return SpeculationConfig(given["method"], num_tokens, longest, shortest)


def _read(value: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """The keys that are given; those that are None are not."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"speculative_config is {value!r}; allowed: a dict as JSON ({error})") from error
    if not isinstance(value, Mapping | None):
        raise TypeError(f"speculative_config is {value!r}; allowed: a dict, or one as JSON")
    return {name: each for name, each in (value or {}).items() if each is not None}


def _lookup(given: Mapping[str, Any], reasons: dict[str, str]) -> tuple[int, int]:
    """Return the most and the fewest tokens to look for; one of the two is also the other's default, as in vLLM."""
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    for name, value, other in (("lookup_max", longest, shortest), ("lookup_min", shortest, longest)):
        if value is None:
            reasons[f"speculation.{name}"] = "default" if other is None else "the other bound"
    longest, shortest = longest or shortest or LOOKUP, shortest or longest or LOOKUP
    if shortest > longest:
        raise ValueError(
            f"speculative_config['prompt_lookup_min'] is {shortest}; allowed: at most prompt_lookup_max ({longest})"
        )
    return longest, shortest


def _check_together(options: EngineOptions, device: torch.device, model: ModelConfig) -> None:
    """Raise ValueError for options that drafts do not go with."""
    reason = None
    if model.pooling is not None:
        reason = "the model pools: it generates no tokens"
    elif model.recurrences is not None:
        reason = "the model has recurrences, whose states cannot go back to before a draft"
    elif device.type != "cpu":
        reason = f"the device is {device}, and drafts are verified on a CPU alone"
    elif options.pipeline_parallel_size > 1:
        reason = f"pipeline_parallel_size is {options.pipeline_parallel_size}: drafts take one stage"
    elif options.logits_processors:
        reason = "there are logits_processors, which are not told of drafts"
    if reason is not None:
        raise ValueError(f"speculative_config is {options.speculative_config!r}, but {reason}; allowed: None")
