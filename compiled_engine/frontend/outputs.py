"""Outputs of `LLM`: plain values with vLLM's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_engine.features.adapters.lora_request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token."""

    logprob: float
    # The token's rank in the vocabulary, from 1 for the most likely. The engine always sets it.
    rank: int | None = None
    # None without a tokenizer or with detokenize=False. Texts of consecutive tokens join to the whole text: a token
    # that ends within a character has "", and the token that completes it has the character. A special token has its
    # own text.
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `SamplingParams.n` completions of a prompt."""

    index: int
    text: str  # Without an end-of-sequence or stop token; ends before a stop string unless include_stop_str_in_output.
    token_ids: list[int]  # Includes the token that ended generation.
    cumulative_logprob: float | None
    # One entry per token, built on access (see LogprobList): the chosen token, then the most likely ones.
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None  # None while running, then "stop", "length", "abort" or "error".
    # The stop string or stop token id; None for an end-of-sequence token. For "error", the error: a failed token mask,
    # NaN logits, or no allowed token.
    stop_reason: str | int | None

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of a clock with arbitrary zero. A time is None before its event.

    Fields have the names of fields of vLLM's RequestMetrics. Properties such as `queued_ts` have the names of fields of
    vLLM's RequestStateStats.
    """

    arrival_time: float
    first_scheduled_time: float | None = None  # the end of its time in the queue
    first_token_time: float | None = None  # of any of its completions
    last_token_time: float | None = None  # the newest of any of its completions
    finished_time: float | None = None  # all completions have ended
    num_generation_tokens: int = 0  # of the longest completion
    num_drafts: int = 0  # The following are sums over all completions. num_drafts: steps that verified any drafts.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that are part of the output

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean number of tokens per step that verified drafts, as in vLLM; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first scheduled step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, in seconds; None before the end or with a single token."""
        if self.first_token_time is None or self.finished_time is None or self.num_generation_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def queued_ts(self) -> float:
        """Alias of arrival_time."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        """Alias of first_scheduled_time."""
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        """Alias of first_token_time."""
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        """Alias of last_token_time."""
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        """Alias of ttft_s."""
        return self.ttft_s


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its completions, complete or as far as they have been generated."""

    request_id: str
    prompt: str | None  # None for a prompt of token ids.
    prompt_token_ids: list[int]  # The same list object in all outputs of a request.
    # Starts with None, since nothing precedes the first token.
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None  # Prompt tokens found in the prefix cache; None before the first step.
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    weight_version: str | None = None  # Of the weights that sampled the first token; None before the first update.
