"""The messages that cross the engine core's borders: API to core, and scheduler to runner.

They may cross process borders, so each is plain typed data that msgspec encodes and decodes without pickle. What is
not data, such as a token mask object, is handed over separately from its message and stays in its process. Messages of
which there is one for each request are structs, because structs are the cheapest to create.
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
"""Slots of a model without a KV cache, an encoder: more than any request needs."""
ROOT = bytes(32)
"""The root of requests that depend on their token ids alone."""


def prefix_root(**parts: str | None) -> bytes:
    """Return the root for a request. parts: by name, what its prefixes depend on besides token ids: only requests with
    the same parts share blocks. A part that is None does not count.
    """
    digest = None
    for name, content in parts.items():
        if content is not None:
            digest = digest or hashlib.sha256()
            digest.update(b"%s %d " % (name.encode(), len(data := content.encode())) + data)
    return ROOT if digest is None else digest.digest()


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """API to core: a tokenised request. `priority`: lower is served first when the scheduler's policy is priority.

    `eos_token_ids` end generation unless sampling_params.ignore_eos. What is not data in sampling_params, or has
    another form in the extras, is None there. `prefix_root` hashes everything besides token ids on which a prefix in
    the KV cache depends: only requests with the same root share blocks. `output_token_ids`: generated so far, of a
    request that goes on in another replica. `extras`: plain data of features, by name.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    prefix_root: bytes = ROOT
    output_token_ids: tuple[int, ...] = ()
    extras: dict[str, Any] = {}  # msgspec gives each its own


@dataclass(frozen=True)
class GrammarVocabulary:
    """API to core: what grammars need to know of tokens. To be given before the first request with a grammar.

    tokenizer: as the library `tokenizers` writes it (tokenizer.json). vocab_size: the width of the logits.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class RequestLimits:
    """Core to API: what the engine can take.

    Token ids are below `vocab_size`. A request has at most `max_model_len` tokens of prompt and output, of which all
    but the last, which is never computed, need one of `num_slots` in the KV cache. pools: requests have no output.
    max_step_tokens: tokens of a step, which must hold all of a prompt; None for a model whose prompts may be divided.
    """

    vocab_size: int
    max_model_len: int
    num_slots: int
    has_priorities: bool = False
    pools: bool = False
    max_step_tokens: int | None = None

    @classmethod
    def of(cls, config: EngineConfig, num_slots: int) -> RequestLimits:
        """Return the limits of an engine with this configuration and number of slots."""
        return cls(
            vocab_size=config.model.vocab_size,
            max_model_len=config.model.max_model_len,
            num_slots=num_slots,
            has_priorities=config.scheduler.policy == "priority",
            pools=config.model.pooling is not None,
            max_step_tokens=None if config.model.causal else config.scheduler.max_num_batched_tokens,
        )

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together; the end of a request that pools counts as one."""
        return min(self.max_model_len + self.pools, self.num_slots + 1)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt, as far as the model and a step limit it."""
        longest = self.max_model_len - (not self.pools)
        return longest if self.max_step_tokens is None else min(longest, self.max_step_tokens)

    @property
    def most_prompt_tokens(self) -> int:
        """Most tokens of any prompt: what is not above it passes `check_length`, as long as it needs no min_tokens."""
        return min(self.longest_prompt, self.num_slots)

    def check_length(self, name: str, num_tokens: int, min_tokens: int = 0, *, at_least: bool = False) -> None:
        """Raise ValueError unless a prompt of num_tokens leaves room for min_tokens of output, and for one. at_least:
        it may have more."""
        got = f"at least {num_tokens}" if at_least else f"{num_tokens}"
        longest, of_params = self.longest_prompt, "PoolingParams" if self.pools else "SamplingParams"
        if num_tokens == 0:
            raise ValueError(f"{name} must have at least one token")
        if num_tokens > longest == self.max_step_tokens:
            raise ValueError(
                f"{name} must have at most {longest} tokens (max_num_batched_tokens {longest}: an encoder computes a"
                f" text in one step), got {got}; a larger max_num_batched_tokens holds more"
            )
        if num_tokens > longest:
            raise ValueError(
                f"{name} must have at most {longest} tokens (max_model_len {self.max_model_len}"
                f"{'' if self.pools else ', less one to generate'}), got {got};"
                f" {of_params}(truncate_prompt_tokens=...) keeps the {'first' if self.pools else 'last'} ones"
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


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """Core to API: what one step added to a request.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop token id
    that ended it, None for an end-of-sequence token, or what the error is. `logprobs`: a row for each new token, if
    asked for. `num_cached_tokens` counts prompt tokens that came from the prefix cache; it comes with the first token
    or before, and None says nothing new. So does `scheduled_time`: when it was first scheduled, in seconds of
    time.perf_counter. `extras`: plain data of features, by name.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: LogprobRows | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    scheduled_time: float | None = None
    extras: dict[str, Any] = {}


@dataclass(frozen=True)
class StepOutputs:
    """Core to API: what one step added to requests; iterates over an EngineOutput for each.

    In columns: requests that only got tokens and log-probabilities, which are nearly all:
    `request_ids`, `token_ids`, and `lengths`, how many tokens each got; None if each got one. `logprobs` has a row for
    each token, to be ignored where none was asked for, and with more tokens than asked for where another one asks for
    more; None if no request asks. `columns`: extras of features that each of them has, by name.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    others: Sequence[EngineOutput] = ()
    logprobs: LogprobRows | None = None
    lengths: Sequence[int] | None = None
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def rows(self) -> Iterator[tuple[str, slice]]:
        """Yield each request's id in the columns, with the range of its tokens."""
        first, lengths = 0, repeat(1) if self.lengths is None else self.lengths
        for request_id, length in zip(self.request_ids, lengths, strict=False):
            yield request_id, slice(first, first + length)
            first += length

    def part(self, places: Sequence[int], others: Sequence[EngineOutput]) -> StepOutputs:
        """Some of it: the requests at these places in the columns, ascending, and these others."""
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
        """An output for each request in the columns."""
        for index, (request_id, tokens) in enumerate(self.rows()):
            logprobs = None if self.logprobs is None else self.logprobs.select(tokens)
            extras = {name: column[index] for name, column in self.columns.items()}
            yield EngineOutput(request_id, tuple(self.token_ids[tokens]), logprobs, extras=extras)

    def __iter__(self) -> Iterator[EngineOutput]:
        yield from self.in_columns()
        yield from self.others


@dataclass(frozen=True)
class ControlCall:
    """API to core, and core to ranks: what to do between two steps, see executor.py. `arguments` are plain data."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class NewRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that takes a row of the runner: all that the runner needs to know of it, but for blocks that
    it gets later.

    A preempted request comes back as a new one, its generated tokens included in `token_ids`. `block_ids`: its block
    table in each KV group. `samples_late`: its sampling awaits TokenMasks. `extras`: plain data of features, by name.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    block_ids: tuple[tuple[int, ...], ...]
    samples_late: bool = False
    extras: dict[str, Any] = {}


@dataclass(frozen=True)
class SchedulerOutput:
    """Scheduler to runner: one step of R requests, in lists of R entries; those with a decode's number of tokens come
    first, which is one unless steps may yield several tokens.

    removed: requests whose rows the runner frees before anything else: finished, aborted or preempted.
    starts, counts: request i computes `counts[i]` tokens from position `starts[i]` on. The last one may be the
        token that the step before samples, whose id the scheduler does not know yet. Where steps may yield several
        tokens a request, those behind the newest one are guesses, and `starts[i]` is an upper bound as long as a step
        in flight samples the request: the device knows how many tokens there are.
    samples: whether the step reaches a request's last token, so that a next one is sampled.
    new_block_ids: in each KV group, of requests that got blocks since the runner last heard of them (never a
        NewRequest).
    samples_late: nothing is sampled before what the step awaits comes, its TokenMasks.
    single: each request has one row and yields one token, in this step and in later ones: the step is one of an engine
        in which steps never yield several.
    extras: plain data of features, by name.
    """

    step: int
    removed: tuple[str, ...]
    new: tuple[NewRequest, ...]
    request_ids: list[str]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]]
    samples_late: bool = False
    single: bool = False
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class TokenMasks:
    """Scheduler to runner: which tokens may come next, for the step that was sent last.

    request_ids: M of its requests that sample. Others that are masked have failed: whatever they get is not used.
    words: M masks of int32 words, one after the other (see sampling/token_mask.py); valid until the next step's.
    """

    request_ids: list[str]
    words: memoryview


@dataclass(frozen=True)
class RunnerOutput:
    """Runner to scheduler: what a step produced.

    token_ids: of the requests that sample, in the order of the step; or why there is none (see sampled_tokens.py).
    lengths: how many tokens each of those requests got; None if each got one.
    logprobs: if any of them needs them, as in StepOutputs: a row for each token.
    columns: of features, by name: an entry for each of those requests.

    Results that few requests need are in a dict each, by request id:
    many_logprobs: the rows of a request with more than FEW_TOKENS (see sampling/logprobs.py).
    extras: of features, by name.
    """

    token_ids: Sequence[int] = ()
    logprobs: LogprobRows | None = None
    many_logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    lengths: Sequence[int] | None = None
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
