"""The messages between the API and the engine core, and between the scheduler and the runners.

They may cross process borders, so each is plain typed data that msgspec encodes and decodes without pickle. An object
that is not plain data, such as a token mask, is passed beside its message and stays in its process. Messages sent once
per request are structs, because structs are the cheapest to create.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows

if TYPE_CHECKING:  # it brings torch, which the API imports at the start of an engine
    from compiled_engine.config import EngineConfig

NO_CACHE = 1 << 40
"""Number of slots of an encoder, which has no KV cache: more than any request needs."""
ROOT = bytes(32)
"""The prefix root of requests whose KV depends on their token ids alone."""


def prefix_root(**parts: str | None) -> bytes:
    """Return the root of a request's block hashes: only requests with the same parts share blocks.

    parts: everything besides token ids and contents (see EngineRequest) that the request's keys and values depend on,
    by name. None counts as absent.
    """
    digest = None
    for name, content in parts.items():
        if content is not None:
            digest = digest or hashlib.sha256()
            digest.update(b"%s %d " % (name.encode(), len(data := content.encode())) + data)
    return ROOT if digest is None else digest.digest()


class Content(msgspec.Struct, frozen=True, array_like=True):
    """Data such as an image that, besides token ids, determines the embeddings at consecutive positions of a prompt."""

    first: int  # position
    count: int  # number of positions
    key: str  # contents with the same key have the same embeddings


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tokenised request, sent from the API to the core."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    # Parameters that are not plain data, or that a feature has in its extras, are None here.
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()  # they end generation unless sampling_params.ignore_eos
    priority: int = 0  # lower ones are served first if the scheduler's policy is "priority"
    prefix_root: bytes = ROOT  # see `prefix_root`; only requests with the same root share blocks
    output_token_ids: tuple[int, ...] = ()  # generated so far, if the request continues in another replica
    # Features' plain data, by feature name. msgspec copies the default for each request.
    extras: dict[str, Any] = {}
    # Positions of the prompt whose keys and values depend on more than token ids, ascending; block hashes cover them.
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True)
class RequestLimits:
    """The engine's limits on requests, sent from the core to the API."""

    vocab_size: int  # token ids are below it
    max_model_len: int  # most tokens of prompt and output together
    num_slots: int  # of the KV cache; each token but the last, which is never computed, needs one
    has_priorities: bool = False  # the scheduler's policy is "priority"
    yields_tokens: bool = True  # requests get output tokens
    refused_id: int | None = None  # a token that prompts must not have
    max_whole_prompt: int | None = None  # most tokens of a prompt if one step must compute it whole; otherwise None

    @classmethod
    def of(cls, config: EngineConfig, num_slots: int) -> RequestLimits:
        """Return the limits of an engine. num_slots: the number of tokens that its KV cache holds."""
        return cls(
            vocab_size=config.model.vocab_size,
            max_model_len=config.model.max_model_len,
            num_slots=num_slots,
            has_priorities=config.scheduler.policy == "priority",
            yields_tokens=config.model.yields_tokens,
            refused_id=config.model.refused_id,
            max_whole_prompt=None if config.model.causal else config.scheduler.max_num_batched_tokens,
        )

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together. Without output tokens, a request's result counts as one token."""
        return min(self.max_model_len + (not self.yields_tokens), self.num_slots + 1)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that the model and a step allow, whatever the size of the KV cache."""
        longest = self.max_model_len - self.yields_tokens
        return longest if self.max_whole_prompt is None else min(longest, self.max_whole_prompt)

    @property
    def most_prompt_tokens(self) -> int:
        """Most tokens of a prompt that passes `check_length` without min_tokens."""
        return min(self.longest_prompt, self.num_slots)

    def check_length(self, name: str, num_tokens: int, min_tokens: int = 0, *, at_least: bool = False) -> None:
        """Raise ValueError unless a prompt of num_tokens tokens fits and leaves room for min_tokens of output.

        There must be room for at least one output token, if requests get any. name: the prompt's name in errors.
        at_least: num_tokens is a lower bound.
        """
        got = f"at least {num_tokens}" if at_least else f"{num_tokens}"
        longest, of_params = self.longest_prompt, "SamplingParams" if self.yields_tokens else "PoolingParams"
        if num_tokens == 0:
            raise ValueError(f"{name} must have at least one token")
        if num_tokens > longest == self.max_whole_prompt:
            raise ValueError(
                f"{name} must have at most {longest} tokens (max_num_batched_tokens {longest}: an encoder computes a"
                f" text in one step), got {got}; a larger max_num_batched_tokens holds more"
            )
        if num_tokens > longest:
            raise ValueError(
                f"{name} must have at most {longest} tokens (max_model_len {self.max_model_len}"
                f"{', less one to generate' if self.yields_tokens else ''}), got {got};"
                f" {of_params}(truncate_prompt_tokens=...) keeps the {'last' if self.yields_tokens else 'first'} ones"
            )
        if num_tokens > self.num_slots:
            raise ValueError(
                f"{name} must have at most the {self.num_slots} tokens that the KV cache holds, got {got};"
                " a larger num_blocks holds more"
            )
        most = self.max_total_tokens
        if num_tokens + min_tokens > most:
            why = "max_model_len" if most == self.max_model_len else "tokens in the KV cache, and one more"
            raise ValueError(
                f"{name}: min_tokens must be at most {most - num_tokens} after"
                f" {num_tokens} prompt tokens ({why} {most}), got {min_tokens}"
            )


ASKS = "asks"  # in the extras of an output, see EngineOutput.asks


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of one step for a request, sent from the core to the API."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: LogprobRows | None = None  # a row for each new token, if requested
    finish_reason: str | None = None  # None while the request runs, then "stop", "length", "abort" or "error"
    # The stop token id that ended the request, or the error's message; None for an end-of-sequence token.
    stop_reason: int | str | None = None
    # Prompt tokens from the prefix cache. Sent with the first token at the latest; None: nothing new.
    num_cached_tokens: int | None = None
    # When the request was first scheduled, in seconds of time.perf_counter; sent like num_cached_tokens.
    scheduled_time: float | None = None
    extras: dict[str, Any] = {}  # features' plain data, by feature name; ASKS

    @property
    def asks(self) -> Sequence[str]:
        """Keys of request data that the core lacks, such as images. The frontend must send the data in control calls.

        An output with `asks` has no other contents.
        """
        keys: Sequence[str] = self.extras.get(ASKS, ())
        return keys


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of one step, sent from the core to the API. Iterates over an EngineOutput per request.

    Nearly all requests only get tokens and log-probabilities. These are in columns (all fields but `others`), which are
    cheaper than an EngineOutput for each request. All other requests are in `others`.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()  # of all requests in the columns, one after the other
    others: Sequence[EngineOutput] = ()
    # A row for each token; None if no request asks for log-probabilities. Requests that ask for none, or for fewer
    # alternatives than another, ignore the surplus.
    logprobs: LogprobRows | None = None
    lengths: Sequence[int] | None = None  # number of tokens of each request; None: one each
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)  # features' values for each request, by name

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def rows(self) -> Iterator[tuple[str, slice]]:
        """Yield the id of each request in the columns, with the slice of `token_ids` that has its tokens."""
        first, lengths = 0, repeat(1) if self.lengths is None else self.lengths
        for request_id, length in zip(self.request_ids, lengths, strict=False):
            yield request_id, slice(first, first + length)
            first += length

    def part(self, places: Sequence[int], others: Sequence[EngineOutput]) -> StepOutputs:
        """Return a StepOutputs with the requests at some indices of the columns, and with `others` instead of its own.

        places: the indices, ascending.
        """
        if self.token_ids and len(places) == len(self.request_ids):
            return StepOutputs(self.request_ids, self.token_ids, others, self.logprobs, self.lengths, self.columns)
        tokens: Sequence[int] = places
        if self.lengths is not None:
            slices = [tokens for _, tokens in self.rows()]
            tokens = [token for index in places for token in range(slices[index].start, slices[index].stop)]
        return StepOutputs(
            [self.request_ids[index] for index in places],
            [self.token_ids[token] for token in tokens],
            others,
            self.logprobs.select(tokens) if self.logprobs is not None and tokens else None,
            None if self.lengths is None else [self.lengths[index] for index in places],
            {name: [column[index] for index in places] for name, column in self.columns.items()}
            if self.columns
            else {},
        )

    def in_columns(self) -> Iterator[EngineOutput]:
        """Yield an EngineOutput for each request that the columns hold. Requests in `others` are left out."""
        for index, (request_id, tokens) in enumerate(self.rows()):
            logprobs = None if self.logprobs is None else self.logprobs.select(tokens)
            extras = {name: column[index] for name, column in self.columns.items()}
            yield EngineOutput(request_id, tuple(self.token_ids[tokens]), logprobs, extras=extras)

    def __iter__(self) -> Iterator[EngineOutput]:
        yield from self.in_columns()
        yield from self.others


@dataclass(frozen=True)
class ControlCall:
    """A function to call between two steps, sent from API to core or from core to ranks; see control.apply."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)  # plain data
    slow: bool = False  # it may take minutes


class NewRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that begins to run, sent from the scheduler to the runner within a SchedulerOutput.

    A preempted request returns as a new one, with its generated tokens in `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    block_ids: tuple[tuple[int, ...], ...]  # its block table in each KV group: one group, or none in an encoder
    samples_late: bool = False  # its sampling awaits LateInputs
    extras: dict[str, Any] = {}  # features' plain data, by feature name


@dataclass(frozen=True)
class SchedulerOutput:
    """A step of R requests, sent from the scheduler to the runner, in lists of R entries.

    Requests with as many tokens as a decode, usually one, come first. Request i computes `counts[i]` tokens from
    position `starts[i]` on. The last of them may be the token that the previous step samples, whose id the scheduler
    does not know yet.

    In an engine whose steps may yield several tokens per request, a decode computes its newest token and guesses of the
    tokens ahead of it. Then `starts[i]` is an upper bound while a step in flight samples the request: only the device
    knows how many tokens the request has.
    """

    step: int  # its number
    removed: tuple[str, ...]  # finished, aborted and preempted requests, whose rows are freed first
    new: tuple[NewRequest, ...]
    request_ids: list[str]
    starts: list[int]
    counts: list[int]
    samples: list[bool]  # whether the step reaches the request's last token, so that a next one is sampled
    # Additional blocks in each KV group (there is one), for requests that already have rows.
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]]
    samples_late: bool = False  # sampling awaits the step's LateInputs
    # Each request of this step has one row, without guesses, and yields one token if it samples. Only a feature whose
    # steps may yield several tokens sets it, in `built` (StepBuilder.single). As such a step leaves out the work that
    # makes the next guesses, its requests have none in later steps either, see Request.limit_to_single_tokens.
    single: bool = False
    extras: dict[str, Any] = field(default_factory=dict)  # features' plain data, by feature name

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class LateInputs:
    """Data that the sampling of the newest step awaits, such as the tokens that grammars allow.

    Sent from the scheduler to the runner, and valid until the next step's late inputs are sent.
    """

    extras: dict[str, Any] = field(default_factory=dict)  # features' plain data, by feature name


@dataclass(frozen=True)
class RunnerOutput:
    """The result of a step for the requests that sample, in the step's order, sent from the runner to the scheduler.

    Results that few requests need are in dicts by request id.
    """

    token_ids: Sequence[int] = ()  # or error codes, see sampling/sampled_tokens.py
    logprobs: LogprobRows | None = None  # as in StepOutputs
    # The rows of requests with more than FEW_TOKENS alternatives, see sampling/logprobs.py.
    many_logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    lengths: Sequence[int] | None = None  # number of tokens of each request; None: one each
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)  # features' values for each request, by name
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # feature name -> request id -> plain data
