"""Converts prompts and sampling parameters to engine requests. All are checked before any is scheduled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any

from compiled_engine.engine.messages import EngineRequest, RequestLimits, prefix_root
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.request_hooks import (
    Attachment,
    RequestFeature,
    RequestPart,
    attach_all,
    joined,
    parts_of_all,
)
from compiled_engine.frontend.tokenizer import Tokenizer, encode_bad_words
from compiled_engine.frontend.tokenizer_backend import LONG_TEXT
from compiled_engine.process.callers import warn_caller
from compiled_engine.sampling.params import SamplingParams, checked_again, of_completion, validate_for_model


def check_text(name: str, text: str, params: SamplingParams, tokenizer: Tokenizer, limits: RequestLimits) -> None:
    """Raise ValueError for a text that is too long even if all its tokens are the longest of the vocabulary.

    The text is not tokenised. Short texts, and texts that will be truncated, are not checked.
    """
    if params.truncate_prompt_tokens is None and len(text) >= LONG_TEXT:
        at_least = max(tokenizer.fewest_tokens(text), 1)
        limits.check_length(name, at_least, params.min_tokens, at_least=True)


class InputProcessor:
    """Checks and tokenises prompts. Without a tokenizer, prompts must be token ids.

    Request ids begin with `id_prefix`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        eos_token_ids: frozenset[int],
        id_prefix: str = "",
        features: Sequence[RequestFeature] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self.id_prefix = id_prefix
        self.features = features
        self._numbers = itertools.count()

    def process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        priority: int | Sequence[int] | None = None,
        *,
        attached: Sequence[Attachment | None] = (),
        **given: Any,
    ) -> list[PreparedRequest]:
        """Return a request for each prompt.

        Parameters and priorities apply to all prompts, or are lists with one entry for each. `attached` has the
        prompts' attachments; if it is empty, this method makes them. Waits for the data of the attachments. `given` has
        the arguments that only features read, such as lora_request. Raises TypeError or ValueError with the field, its
        value and what is allowed.
        """
        attached = attached or attach_all(self.features, prompts)
        makers = self.makers(prompts, sampling_params, priority, attached=attached, **given)
        for each in filter(None, attached):
            each.wait()
        return [make() for make in makers]

    def makers(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        priority: int | Sequence[int] | None = None,
        *,
        attached: Sequence[Attachment | None],
        **given: Any,
    ) -> list[Callable[[], PreparedRequest]]:
        """Return for each prompt a function that makes its request, to be called once its attachment's data is ready.

        For the arguments see `process`. Parameters, priorities and arguments of features are checked here. The returned
        functions check prompts and their data, and raise the errors of `process`.
        """
        params = self._params_for(sampling_params, len(prompts))
        priorities = checked_priorities(priority, len(prompts), self.limits)
        parts = parts_of_all(self.features, params, given)
        of_prompts = zip(prompts, params, priorities, parts, attached or [None] * len(prompts), strict=True)
        return [partial(self._prepare, *each) for each in of_prompts]

    def tokens(self, prompt: Prompt, attachment: Attachment | None, params: SamplingParams) -> tuple[int, ...]:
        """Return a prompt's tokens before truncation, including those that stand for its data. The data must be ready.

        Raises ValueError for an invalid prompt, and for a prompt that would be too long after truncation.
        """
        token_ids = self._whole(prompt, params, attachment)
        self._truncated(prompt, token_ids, params)
        return token_ids

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
        if isinstance(given, SamplingParams):
            return [self._complete(given, "sampling_params")] * count
        if not isinstance(given, list | tuple):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {given!r}")
        require_one_each("sampling_params", given, count)
        return [self._complete(param, f"sampling_params[{index}]") for index, param in enumerate(given)]

    def _complete(self, params: SamplingParams, name: str) -> SamplingParams:
        """Return a copy of the parameters, checked against the model, with bad_words as token ids.

        The check is repeated because lists may have changed since they were assigned.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{name} must be SamplingParams, got {params!r}")
        if self.tokenizer is None and (params.stop or params.bad_words):
            field = "stop" if params.stop else "bad_words"
            raise ValueError(f"{name}: {field} needs a tokenizer, got {getattr(params, field)!r} without one")
        try:
            for feature in self.features:
                feature.check(params)
            params = checked_again(params)
            for index, word in enumerate(params.bad_words or ()):
                require_unicode(f"bad_words[{index}]", word)
            if self.tokenizer is not None and params.bad_words:
                params.bad_words_token_ids += encode_bad_words(self.tokenizer, params.bad_words)
            params.top_k = min(params.top_k, self.limits.vocab_size)  # larger values have no effect
            validate_for_model(params, self.limits.vocab_size, self.limits.max_model_len)
            if params.max_tokens is not None:  # nor do these
                params.max_tokens = min(params.max_tokens, self.limits.max_model_len)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        return params

    def _encode(self, prompt: Prompt, params: SamplingParams, attachment: Attachment | None) -> tuple[int, ...]:
        """Return a prompt's token ids, truncated if requested. Raises ValueError for an invalid prompt."""
        return self._truncated(prompt, self._whole(prompt, params, attachment), params)

    def _whole(self, prompt: Prompt, params: SamplingParams, attachment: Attachment | None) -> tuple[int, ...]:
        token_ids = prompt.token_ids if prompt.token_ids is not None else self._tokenize(prompt, params)
        check_token_ids(prompt, token_ids, self.limits.vocab_size, self.limits.refused_id)
        return token_ids if attachment is None else attachment.expand(token_ids)

    def _truncated(self, prompt: Prompt, token_ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        keep = params.truncate_prompt_tokens
        if keep is not None:
            longest = self.limits.longest_prompt
            token_ids = token_ids[-(longest if keep == -1 else min(keep, longest)) :]
        self.limits.check_length(prompt.name, len(token_ids), params.min_tokens)
        return token_ids

    def _tokenize(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        text = prompt.text or ""
        if self.tokenizer is None:
            raise ValueError(f"{prompt.name} must be token ids, as there is no tokenizer, got {text!r}")
        require_unicode(prompt.name, text)
        check_text(prompt.name, text, params, self.tokenizer, self.limits)
        return tuple(self.tokenizer.encode(text))

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        part: RequestPart,
        attachment: Attachment | None,
    ) -> PreparedRequest:
        token_ids = self._encode(prompt, params, attachment)
        if attachment is not None:
            part = joined((part, attachment.part(token_ids, params)))
        request_id = f"{self.id_prefix}{next(self._numbers)}"
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self.limits.max_model_len - len(token_ids)
        root = prefix_root(salt=prompt.cache_salt, **part.root)
        extras = dict(part.extras)
        requests = tuple(
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=of_completion(params, index, max_tokens),
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                prefix_root=root,
                contents=part.contents,
                extras=extras,
            )
            for index in range(params.n)
        )
        return PreparedRequest(request_id, prompt.text, token_ids, params, requests, part.given, part.output, part.give)


def require_one_each(name: str, given: Sized, count: int) -> None:
    """Raise ValueError unless `given` has an entry for each of `count` prompts."""
    if len(given) != count:
        raise ValueError(f"{name} must have one entry for each prompt, got {len(given)} for {count} prompts")


def checked_priorities(given: int | Sequence[int] | None, count: int, limits: RequestLimits) -> list[int]:
    """Return a priority for each prompt. If priorities have no effect, warn and return 0 for each.

    Raises TypeError or ValueError for invalid priorities.
    """
    if given is None:
        return [0] * count
    values = [given] * count if isinstance(given, int) else given
    if not isinstance(values, list | tuple):
        raise TypeError(f"priority must be an integer or a list of integers, got {given!r}")
    require_one_each("priority", values, count)
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
    """Return whether a message to the engine core can carry this priority: an integer of 64 bits."""
    return -(1 << 63) <= value < 1 << 63


def check_token_ids(prompt: Prompt, token_ids: Sequence[int], vocab_size: int, refused_id: int | None = None) -> None:
    """Raise ValueError if a prompt has no token ids, an id outside the vocabulary, or `refused_id`.

    refused_id: the token that the model does not take in prompts; None for none.
    """
    if not token_ids:
        given: object = prompt.text if prompt.token_ids is None else []
        raise ValueError(f"{prompt.name} must have at least one token, got {given!r}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        index, token_id = next((i, each) for i, each in enumerate(token_ids) if not 0 <= each < vocab_size)
        raise ValueError(
            f"{prompt.name}: token {index} must be within the vocabulary, 0 to {vocab_size - 1}, got {token_id}"
        )
    if refused_id is not None and refused_id in token_ids:
        raise ValueError(
            f"{prompt.name}: token {token_ids.index(refused_id)} must be another one than {refused_id}, the model's"
            " padding, for which it counts no position"
        )


def require_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {text!r}: {error.reason}") from error
