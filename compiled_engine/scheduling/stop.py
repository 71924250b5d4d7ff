"""When generation ends: a pure function of the newest token and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from compiled_engine.sampling.params import SamplingParams


class Finish(NamedTuple):
    """See EngineOutput."""

    reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends one request. Counts are of output tokens; `max_tokens` is the smallest limit on length."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], room: int) -> StopRule:
        """`room`: how many output tokens the model's length and the KV cache leave the request."""
        return cls(
            eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            min_tokens=params.min_tokens,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )


def check_stop(rule: StopRule, token_id: int, num_output_tokens: int) -> Finish | None:
    """Whether a request ends with `token_id`, the last of its `num_output_tokens` output tokens.

    A stop token that comes before `min_tokens` ends nothing; the limit on length always holds.
    """
    if num_output_tokens >= rule.min_tokens:
        if token_id in rule.eos_token_ids:
            return Finish("stop", None)
        if token_id in rule.stop_token_ids:
            return Finish("stop", token_id)
    if num_output_tokens >= rule.max_tokens:
        return Finish("length", None)
    return None
