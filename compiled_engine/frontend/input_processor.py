"""Turn prompts and sampling parameters into engine requests. All are checked before any is scheduled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from compiled_engine.engine.messages import EngineRequest, RequestLimits, prefix_root
from compiled_engine.features.adapters import extras as adapter_extras
from compiled_engine.features.adapters.extras import AdapterRef
from compiled_engine.features.structured import extras as structured_extras
from compiled_engine.frontend.adapters import AdapterFinder, LoRARequest
from compiled_engine.frontend.pooling import PoolingTask
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.tokenizer import Tokenizer, encode_bad_words
from compiled_engine.frontend.tokenizer_backend import LONG_TEXT
from compiled_engine.grammars.text import grammar_text
from compiled_engine.grammars.vocabulary import GrammarVocabulary
from compiled_engine.process.callers import warn_caller
from compiled_engine.sampling.params import SamplingParams, checked_again, derived, validate_for_model

if TYPE_CHECKING:
    from compiled_engine.config import AdapterConfig


class PreparedRequest(msgspec.Struct, frozen=True):
    """A prompt ready to run, with one engine request for each of its `sampling_params.n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    engine_requests: tuple[EngineRequest, ...]
    pooling: PoolingTask | None = None  # the post-processing of a pooling request
    lora_request: LoRARequest | None = None


def check_text(name: str, text: str, params: SamplingParams, tokenizer: Tokenizer, limits: RequestLimits) -> None:
    """Raise ValueError for a text that is too long even in the longest tokens, without tokenising it."""
    if params.truncate_prompt_tokens is None and len(text) >= LONG_TEXT:
        at_least = max(tokenizer.fewest_tokens(text), 1)
        limits.check_length(name, at_least, params.min_tokens, at_least=True)


class InputProcessor:
    """Checks and tokenises prompts; without a tokenizer, only token ids. `id_prefix` starts the request ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        eos_token_ids: frozenset[int],
        id_prefix: str = "",
        adapters: AdapterConfig | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._id_prefix = id_prefix
        self.adapters = AdapterFinder(adapters)
        self._numbers = itertools.count()

    def process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PreparedRequest]:
        """Make a request for each prompt. The other arguments apply to all prompts, or are lists with one each.

        Raises TypeError or ValueError with the field, its value and what is allowed.
        """
        params = self._params_for(sampling_params, len(prompts))
        priorities = checked_priorities(priority, len(prompts), self._limits)
        encoded = [self._encode(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        adapters = self.adapters.find_each(lora_request, len(prompts))
        named = lora_request if isinstance(lora_request, list | tuple) else [lora_request] * len(prompts)
        given = zip(prompts, encoded, params, priorities, adapters, named, strict=True)
        return [self._prepare(*each) for each in given]

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """The vocabulary, which the core needs before its first request with a grammar.

        Raises ValueError without a tokenizer, or if the library `tokenizers` cannot read it.
        """
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and there is none")
        return GrammarVocabulary(self._tokenizer.to_json(), self._limits.vocab_size, self._eos_token_ids)

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
        if isinstance(given, SamplingParams):
            return [self._complete(given, "sampling_params")] * count
        if not isinstance(given, list | tuple):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {given!r}")
        if len(given) != count:
            raise ValueError(
                f"sampling_params must have one entry for each prompt, got {len(given)} for {count} prompts"
            )
        return [self._complete(param, f"sampling_params[{index}]") for index, param in enumerate(given)]

    def _complete(self, params: SamplingParams, name: str) -> SamplingParams:
        """Copy the parameters, checked against the model, with bad_words as token ids.

        The check is repeated because lists may have changed since they were assigned.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{name} must be SamplingParams, got {params!r}")
        if self._tokenizer is None and (params.stop or params.bad_words or params.structured_outputs):
            field = "stop" if params.stop else "bad_words" if params.bad_words else "structured_outputs"
            raise ValueError(f"{name}: {field} needs a tokenizer, got {getattr(params, field)!r} without one")
        try:
            params = checked_again(params)
            for index, word in enumerate(params.bad_words or ()):
                require_unicode(f"bad_words[{index}]", word)
            if self._tokenizer is not None and params.bad_words:
                params.bad_words_token_ids += encode_bad_words(self._tokenizer, params.bad_words)
            params.top_k = min(params.top_k, self._limits.vocab_size)  # larger values have no effect
            validate_for_model(params, self._limits.vocab_size, self._limits.max_model_len)
            if params.max_tokens is not None:  # nor do these
                params.max_tokens = min(params.max_tokens, self._limits.max_model_len)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        return params

    def _encode(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        """Tokenise a prompt, truncate it if requested, and check it."""
        token_ids = prompt.token_ids if prompt.token_ids is not None else self._tokenize(prompt, params)
        check_token_ids(prompt, token_ids, self._limits.vocab_size)
        keep = params.truncate_prompt_tokens
        if keep is not None:
            longest = self._limits.longest_prompt
            token_ids = token_ids[-(longest if keep == -1 else min(keep, longest)) :]
        self._limits.check_length(prompt.name, len(token_ids), params.min_tokens)
        return token_ids

    def _tokenize(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        text = prompt.text or ""
        if self._tokenizer is None:
            raise ValueError(f"{prompt.name} must be token ids, as there is no tokenizer, got {text!r}")
        require_unicode(prompt.name, text)
        check_text(prompt.name, text, params, self._tokenizer, self._limits)
        return tuple(self._tokenizer.encode(text))

    def _prepare(
        self,
        prompt: Prompt,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        adapter: AdapterRef | None,
        lora_request: LoRARequest | None,
    ) -> PreparedRequest:
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        grammar = None if params.structured_outputs is None else grammar_text(params.structured_outputs)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self._limits.max_model_len - len(token_ids)
        root = prefix_root(salt=prompt.cache_salt, adapter=None if adapter is None else adapter.digest)
        extras = structured_extras.extras_of(grammar) | adapter_extras.extras_of(adapter)
        requests = tuple(
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=_of_completion(params, index, max_tokens),
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                prefix_root=root,
                extras=extras,
            )
            for index in range(params.n)
        )
        return PreparedRequest(request_id, prompt.text, token_ids, params, requests, lora_request=lora_request)


def _of_completion(params: SamplingParams, index: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of one of n completions. Each has its own seed; only the first has prompt logprobs."""
    return derived(
        params,
        n=1,
        token_mask=None,  # passed separately from the request
        structured_outputs=None,  # the grammar is in the extras
        max_tokens=max_tokens,
        # Within 64 bits and never negative: -1 means no seed.
        seed=None if params.seed is None else (params.seed + index) % 2**64,
        prompt_logprobs=None if index > 0 else params.prompt_logprobs,
    )


def checked_priorities(given: int | Sequence[int] | None, count: int, limits: RequestLimits) -> list[int]:
    """Return a priority for each prompt; warn if they have no effect. Raises TypeError or ValueError."""
    if given is None:
        return [0] * count
    values = [given] * count if isinstance(given, int) else given
    if not isinstance(values, list | tuple):
        raise TypeError(f"priority must be an integer or a list of integers, got {given!r}")
    if len(values) != count:
        raise ValueError(f"priority must have one entry for each prompt, got {len(values)} for {count} prompts")
    for index, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"priority[{index}] must be an integer, got {value!r}")
        if not is_priority(value):
            raise ValueError(f"priority[{index}] must be an integer of 64 bits, got {value}")
    if any(values) and not limits.has_priorities:
        warn_caller("priority has no effect unless scheduling_policy is 'priority'")
        return [0] * count
    return list(values)


def is_priority(value: int) -> bool:
    """Return whether a message to the engine core can carry the value."""
    return -(1 << 63) <= value < 1 << 63


def check_token_ids(prompt: Prompt, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError if there are no ids, or one is outside the vocabulary."""
    if not token_ids:
        given: object = prompt.text if prompt.token_ids is None else []
        raise ValueError(f"{prompt.name} must have at least one token, got {given!r}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        index, token_id = next((i, each) for i, each in enumerate(token_ids) if not 0 <= each < vocab_size)
        raise ValueError(
            f"{prompt.name}: token {index} must be within the vocabulary, 0 to {vocab_size - 1}, got {token_id}"
        )


def require_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {text!r}: {error.reason}") from error
