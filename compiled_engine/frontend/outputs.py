"""The outputs of `LLM`: plain values with vLLM's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_engine.frontend.adapters import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token; `rank` is its place in the vocabulary, 1 for the most likely. The engine always
    sets it.

    `decoded_token` is None when the engine has no tokenizer, and with detokenize=False. Texts of consecutive tokens
    join to the whole text: a token that ends within a character has "", and the token that completes it has the
    character; a special token has its own text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A completion of a prompt; the `index`-th of `SamplingParams.n`.

    `token_ids` end with the token that ended generation; `text` leaves out an end-of-sequence or stop token,
    and a stop string with what follows it, unless include_stop_str_in_output. `logprobs` has an entry a token, made
    when it is looked at (see LogprobList): the chosen token first, then the most likely ones. `finish_reason` is None
    while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token id that
    ended it, None for an end-of-sequence token, or what the error is: a token mask failed, the logits were NaN, or no
    token was allowed.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of a clock with arbitrary zero; None: not yet, or never.

    arrival_time: it was added to the engine. first_scheduled_time: a step with its first tokens was scheduled; until
    then it waits in the queue. first_token_time, last_token_time: the first and the newest token of any of its
    completions came. finished_time: all have ended. num_generation_tokens: those of the longest completion.

    With drafts, of all completions together: num_drafts: how often a step verified drafts, of any number;
    num_draft_tokens: how many these were; num_accepted_tokens: how many of them are part of the output.

    Fields have the names of vLLM's RequestMetrics; `queued_ts` and the like are those of its RequestStateStats.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean number of tokens of a step that verified drafts, as vLLM counts it; None without any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first, in seconds; None before the end or with a single one."""
        if self.first_token_time is None or self.finished_time is None or self.num_generation_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def queued_ts(self) -> float:
        """arrival_time."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        """first_scheduled_time."""
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        """first_token_time."""
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        """last_token_time."""
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        """ttft_s."""
        return self.ttft_s


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions, whole or as far as they are.

    `prompt` is None for a prompt of token ids. `prompt_token_ids` is the same list in all outputs of a request.
    `prompt_logprobs` starts with None: nothing precedes the first token. `num_cached_tokens` counts prompt tokens that
    came from the prefix cache; None before the first step. `lora_request` is the adapter that the prompt has.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
