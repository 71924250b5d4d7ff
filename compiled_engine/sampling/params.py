"""SamplingParams: what one request asks of sampling, checked when it is made and whenever it is changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from compiled_engine.sampling.other_params import settle_other_param
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.sampling.value_checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Check,
    arguments,
    flag,
    having,
    integer,
    list_of,
    number,
    optional,
    seed,
    some_token_ids,
    text,
    text_or_texts,
    token_biases,
    token_ids,
    tuple_of,
)

# Below this a request is greedy: the logits divided by the temperature could leave the range of float32.
SMALLEST_TEMPERATURE = 1e-5
MAX_COMPLETIONS = 16384

_CHECKS: dict[str, Check] = {
    "n": integer(1, MAX_COMPLETIONS),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(SMALLEST_SCALE, LARGEST_SCALE),
    "temperature": number(0, LARGEST_SCALE),
    "top_p": number(0, 1, above_low=True),
    "top_k": integer(0, or_minus_one=True),
    "min_p": number(0, 1),
    "seed": seed,
    "stop": text_or_texts,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "max_tokens": optional(integer(1)),
    "min_tokens": integer(0),
    "logprobs": optional(integer(0, or_minus_one=True, or_flag=True)),
    "prompt_logprobs": optional(integer(0, or_minus_one=True, or_flag=True)),
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "include_stop_str_in_output": flag,
    "logit_bias": token_biases,
    "allowed_token_ids": optional(some_token_ids),
    "bad_words": list_of(text),
    "truncate_prompt_tokens": optional(integer(1, or_minus_one=True)),
    "bad_words_token_ids": tuple_of(tuple_of(integer(0), may_be_empty=False)),
    "extra_args": arguments,
    "token_mask": optional(having("allowed")),
    "structured_outputs": StructuredOutputs.of,
}

_CONTAINERS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "extra_args")

_Params = TypeVar("_Params")


def _checked_when_made(cls: type[_Params]) -> type[_Params]:
    """Have the constructor of a dataclass check what it is given, and only that; its signature stays as it was."""
    generated = cls.__init__
    signature = inspect.signature(generated)
    defaults = {field.name: _CHECKS[field.name](field.name, field.default) for field in fields(cls)}  # type: ignore[arg-type]
    lists = [name for name, value in defaults.items() if isinstance(value, list)]

    @functools.wraps(generated)
    def initialise(self: Any, *positional: Any, **named: Any) -> None:
        if positional:
            own = {name: value for name, value in named.items() if name in _CHECKS}
            named |= signature.bind(self, *positional, **own).arguments
            del named["self"]
        values = defaults.copy()
        for name in lists:
            values[name] = []
        for name, value in named.items():
            check = _CHECKS.get(name)
            if check is None:
                settle_other_param(name, value, _CHECKS, TypeError)
            else:
                values[name] = check(name, value)
        _check_together(values)
        vars(self).update(values)

    cls.__init__ = initialise  # type: ignore[method-assign]
    return cls


@_checked_when_made
@dataclass
class SamplingParams:
    """How the tokens of a request are chosen, when generation ends, and what is returned.

    Fields have vLLM's names, defaults and meaning; what becomes of its other parameters is in other_params.py. Fields
    may be assigned to, checked like arguments; a request has a copy of its own. Lists and dicts are copies too, None
    for a list is an empty one, and numbers of numpy are stored as Python's.

    n: how many completions to generate from the prompt, at most 16384; 1 if greedy.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens generated so far, once, or once
        for each occurrence; in [-2, 2].
    repetition_penalty: logits of tokens in the prompt or the output are divided by it if positive, multiplied
        by it if negative; in [1e-37, 1e37].
    temperature: divides the logits; at most 1e37; below 1e-5 the most likely token is taken (greedy).
    top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum; in (0, 1].
    top_k: sample from this many most likely tokens; 0 or -1 for all.
    min_p: leave out tokens less likely than this times the most likely one; in [0, 1].
    seed: an integer of 64 bits, signed or not, that decides all that is random; None or -1: chosen for the request.
    stop: a string or several that end generation; needs detokenize. stop_token_ids: token ids that do.
    ignore_eos: go on after an end-of-sequence token.
    max_tokens: generate at most this many; None for as many as the model's length allows.
    min_tokens: generate this many before an end-of-sequence or stop token may come.
    logprobs: return log-probabilities of the chosen token and of this many most likely ones, for each
        generated token; -1 for the whole vocabulary; True is 1, False 0.
    prompt_logprobs: the same for the prompt's tokens.
    detokenize: return text. skip_special_tokens, spaces_between_special_tokens: how it looks.
    include_stop_str_in_output: whether the text keeps the stop string.
    logit_bias: added to the logits, by token id.
    allowed_token_ids: only these may be generated; None for all. An end-of-sequence token has to be among them to come.
    bad_words: words whose tokens are not to be generated. bad_words_token_ids: these tokens, from the frontend.
    truncate_prompt_tokens: use only this many last tokens of the prompt; -1 for the model's length.
    extra_args: what the request has to say to the engine's logits processors, by name; nothing else reads it.
    token_mask: decides before each token which ones are allowed (see TokenMask).
    structured_outputs: the form that the text must have: a JSON schema, a regular expression, one of several texts, a
        grammar (see StructuredOutputs, or a dict with its fields). Not beside token_mask or ignore_eos.

    Raises TypeError or ValueError, naming the field, its value and what is allowed; AttributeError for an assignment to
    a field that there is not. What an assignment refuses leaves the object as it was.
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
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    extra_args: Mapping[str, Any] | None = None
    token_mask: TokenMask | None = None
    structured_outputs: StructuredOutputs | None = None

    if not TYPE_CHECKING:  # with this method any name could be assigned to

        def __setattr__(self, name: str, value: Any) -> None:
            check = _CHECKS.get(name)
            if check is None:
                settle_other_param(name, value, _CHECKS, AttributeError)
                return
            checked = check(name, value)
            _check_together(vars(self) | {name: checked})
            vars(self)[name] = checked

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    def clone(self) -> SamplingParams:
        """A copy with lists and dicts of its own; what they hold, and token_mask, is the same."""
        values = vars(self).copy()
        for name in _CONTAINERS:
            if values[name] is not None:
                values[name] = values[name].copy()
        return _made_of(values)


def _made_of(values: dict[str, Any]) -> SamplingParams:
    """Of values that were checked."""
    made = object.__new__(SamplingParams)
    vars(made).update(values)
    return made


def checked_again(params: SamplingParams) -> SamplingParams:
    """A copy. Its lists and dicts are checked: what they hold may have changed since they were assigned.

    Raises TypeError or ValueError as an assignment does.
    """
    values = vars(params).copy()
    for name in _CONTAINERS:
        if values[name] is not None:
            values[name] = _CHECKS[name](name, values[name])
    _check_together(values)
    return _made_of(values)


def derived(params: SamplingParams, **values: Any) -> SamplingParams:
    """A copy that differs in these values, which are not checked; lists and dicts are shared."""
    return _made_of({**vars(params), **values})


def _check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError where one field's value rules out another's."""
    if values["n"] > 1 and values["temperature"] < SMALLEST_TEMPERATURE:
        raise ValueError(f"n must be 1 when temperature is 0 (greedy), got {values['n']}")
    min_tokens, max_tokens = values["min_tokens"], values["max_tokens"]
    if max_tokens is not None and min_tokens > max_tokens:
        raise ValueError(f"min_tokens must be <= max_tokens ({max_tokens}), got {min_tokens}")
    if values["structured_outputs"] is not None:
        if values["token_mask"] is not None:
            raise ValueError("token_mask must be None where structured_outputs is given")
        if values["ignore_eos"]:
            raise ValueError("ignore_eos must be False where structured_outputs is given: the text ends with its form")
    if values["stop"] and not values["detokenize"]:
        raise ValueError(f"stop must be empty when detokenize is False, got {values['stop']!r}")


def validate_for_model(params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if a model of this vocabulary and length (in tokens) cannot do what `params` asks."""

    def check_tokens(name: str, token_ids: Sequence[int]) -> None:
        if max(token_ids, default=0) >= vocab_size:
            index, token_id = next((i, each) for i, each in enumerate(token_ids) if each >= vocab_size)
            where = name.format(index)
            raise ValueError(f"{where} must be within the vocabulary, 0 to {vocab_size - 1}, got {token_id}")

    def check_at_most(name: str, limit: int, what: str) -> None:
        value = getattr(params, name)
        if value is not None and value > limit:
            raise ValueError(f"{name} must be <= {limit} ({what}), got {value}")

    check_tokens("stop_token_ids[{}]", params.stop_token_ids or ())
    check_tokens("allowed_token_ids[{}]", params.allowed_token_ids or ())
    check_tokens("logit_bias key", tuple(params.logit_bias or ()))
    for index, word in enumerate(params.bad_words_token_ids):
        check_tokens(f"bad_words_token_ids[{index}]", word)
    check_at_most("logprobs", vocab_size, "the vocabulary size")
    check_at_most("prompt_logprobs", vocab_size, "the vocabulary size")
    check_at_most("min_tokens", max_model_len - 1, "the model's length less one prompt token")
    check_at_most("truncate_prompt_tokens", max_model_len, "the model's length")
