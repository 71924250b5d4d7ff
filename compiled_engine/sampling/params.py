"""SamplingParams: what one request asks of sampling, checked when it is made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.sampling.value_checks import (
    Check,
    arguments,
    flag,
    having,
    integer,
    number,
    optional,
    sequence_of,
    text,
    text_or_texts,
    token_biases,
)

# Below this a request is greedy: the logits divided by the temperature could leave the range of float32.
SMALLEST_TEMPERATURE = 1e-5
MAX_COMPLETIONS = 16384


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, when generation ends, and what is returned.

    Fields have vLLM's names, defaults and meaning. Sequences are stored as tuples, None as an empty one, and
    numbers of numpy as Python's.

    n: how many completions to generate from the prompt, at most 16384; 1 if greedy.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens generated so far, once, or once
        for each occurrence; in [-2, 2].
    repetition_penalty: logits of tokens in the prompt or the output are divided by it if positive, multiplied
        by it if negative; above 0.
    temperature: divides the logits; below 1e-5 the most likely token is taken (greedy).
    top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum; in (0, 1].
    top_k: sample from this many most likely tokens; 0 or -1 for all.
    min_p: leave out tokens less likely than this times the most likely one; in [0, 1].
    seed: an integer of 64 bits, signed or not, that decides all that is random; None: chosen for the request.
    stop: a string or several that end generation; needs detokenize. stop_token_ids: token ids that do.
    ignore_eos: go on after an end-of-sequence token.
    max_tokens: generate at most this many; None for as many as the model's length allows.
    min_tokens: generate this many before an end-of-sequence or stop token may come.
    logprobs: return log-probabilities of the chosen token and of this many most likely ones, for each
        generated token; -1 for the whole vocabulary. prompt_logprobs: the same for the prompt's tokens.
    detokenize: return text. skip_special_tokens, spaces_between_special_tokens: how it looks.
    include_stop_str_in_output: whether the text keeps the stop string.
    logit_bias: added to the logits, by token id.
    bad_words: words whose tokens are not to be generated. bad_words_token_ids: these tokens, from the frontend.
    truncate_prompt_tokens: use only this many last tokens of the prompt; -1 for the model's length.
    extra_args: what the request has to say to the engine's logits processors, by name; nothing else reads it.
    token_mask: decides before each token which ones are allowed, for structured output (see TokenMask).

    Raises TypeError or ValueError, naming the field, its value and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    extra_args: Mapping[str, Any] | None = None
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.greedy and self.n > 1:
            raise ValueError(f"n must be 1 when temperature is 0 (greedy), got {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop must be empty when detokenize is False, got {self.stop!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams(**values); the TypeError for an unknown name states the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"SamplingParams has no field {name!r}; the nearest is {nearest!r}")
        return cls(**values)


_CHECKS: dict[str, Check] = {
    "n": integer(1, MAX_COMPLETIONS),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, above_low=True),
    "temperature": number(0),
    "top_p": number(0, 1, above_low=True),
    "top_k": integer(0, or_minus_one=True),
    "min_p": number(0, 1),
    "seed": optional(integer(-(2**63), 2**64 - 1)),
    "stop": text_or_texts,
    "stop_token_ids": sequence_of(integer(0)),
    "ignore_eos": flag,
    "max_tokens": optional(integer(1)),
    "min_tokens": integer(0),
    "logprobs": optional(integer(0, or_minus_one=True)),
    "prompt_logprobs": optional(integer(0, or_minus_one=True)),
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "include_stop_str_in_output": flag,
    "logit_bias": token_biases,
    "bad_words": sequence_of(text),
    "truncate_prompt_tokens": optional(integer(1, or_minus_one=True)),
    "bad_words_token_ids": sequence_of(sequence_of(integer(0), may_be_empty=False)),
    "extra_args": arguments,
    "token_mask": optional(having("allowed")),
}


def validate_for_model(params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if a model of this vocabulary and length (in tokens) cannot do what `params` asks."""

    def check_token(name: str, token_id: int) -> None:
        if token_id >= vocab_size:
            raise ValueError(f"{name} must be within the vocabulary, 0 to {vocab_size - 1}, got {token_id}")

    def check_at_most(name: str, limit: int, what: str) -> None:
        value = getattr(params, name)
        if value is not None and value > limit:
            raise ValueError(f"{name} must be <= {limit} ({what}), got {value}")

    for index, token_id in enumerate(params.stop_token_ids or ()):
        check_token(f"stop_token_ids[{index}]", token_id)
    for token_id in params.logit_bias or ():
        check_token("logit_bias key", token_id)
    for index, word in enumerate(params.bad_words_token_ids):
        for token_id in word:
            check_token(f"bad_words_token_ids[{index}]", token_id)
    check_at_most("logprobs", vocab_size, "the vocabulary size")
    check_at_most("prompt_logprobs", vocab_size, "the vocabulary size")
    check_at_most("min_tokens", max_model_len - 1, "the model's length less one prompt token")
    check_at_most("truncate_prompt_tokens", max_model_len, "the model's length")
