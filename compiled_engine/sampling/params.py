"""SamplingParams: the sampling parameters of one request, checked on creation and on every change."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from compiled_engine.sampling.other_params import settle_other_param
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.sampling.value_checks import (
    ARGUMENTS,
    FLAG,
    LARGEST_SCALE,
    SEED,
    SMALLEST_SCALE,
    SOME_TOKEN_IDS,
    TEXT,
    TEXT_OR_TEXTS,
    TOKEN_BIASES,
    TOKEN_ID,
    TOKEN_IDS,
    having,
    integer,
    list_of,
    number,
    optional,
    tuple_of,
)
from compiled_engine.schema import Check, Kind, declarations, declare, documented

# Requests below this temperature are greedy: dividing the logits by it could overflow float32.
SMALLEST_TEMPERATURE = 1e-5
MAX_COMPLETIONS = 16384
PENALTY = number(-2, 2)
NUM_LOGPROBS = optional(integer(0, or_minus_one=True, or_flag=True))

_CHECKS: dict[str, Check] = {}

_CONTAINERS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "extra_args")

_Params = TypeVar("_Params")


def _checked_when_made(cls: type[_Params]) -> type[_Params]:
    """Decorate a dataclass so that its constructor checks the given arguments; defaults are checked once, here.

    The constructor's signature is unchanged.
    """
    generated = cls.__init__
    signature = inspect.signature(generated)
    declared = declarations(cls)
    _CHECKS.update({each.name: each.kind.check for each in declared})
    defaults = {each.name: each.kind.check(each.name, each.default) for each in declared}
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
    """Sampling, stopping and output parameters of a request.

    Fields have vLLM's names, defaults and meaning; vLLM's other parameters are handled by OTHER_PARAMS. Assignments to
    fields are checked like arguments. They do not affect requests already made, which have copies. Lists and dicts are
    copied, and numpy numbers are stored as Python's. None is stored as an empty list in stop, stop_token_ids and
    bad_words.

    Raises TypeError or ValueError, naming the field, its value and what is allowed; AttributeError for an assignment to
    an unknown field. A refused assignment changes nothing.
    """

    n: int = declare(1, integer(1, MAX_COMPLETIONS), "completions of each prompt", "1 when greedy")
    presence_penalty: float = declare(0.0, PENALTY, "subtracted from the logits of tokens generated so far, once")
    frequency_penalty: float = declare(
        0.0, PENALTY, "subtracted from the logits of tokens generated so far, once for each occurrence"
    )
    repetition_penalty: float = declare(
        1.0,
        number(SMALLEST_SCALE, LARGEST_SCALE),
        "above 1, tokens of prompt and output become less likely",
        "their logits are divided by it if positive, multiplied by it if negative",
    )
    temperature: float = declare(
        1.0,
        number(0, LARGEST_SCALE),
        "divides the logits; 0 takes the most likely token",
        "below 1e-5 is 0, which is greedy",
    )
    top_p: float = declare(
        1.0, number(0, 1, above_low=True), "sample from the most likely tokens that reach this probability together"
    )
    top_k: int = declare(0, integer(0, or_minus_one=True), "sample from this many most likely tokens; 0 or -1 for all")
    min_p: float = declare(0.0, number(0, 1), "leave out tokens less likely than this times the most likely one")
    seed: int | None = declare(
        None,
        SEED,
        "seed of the request's random choices: an integer of 64 bits, signed or not; None or -1: the engine chooses",
        flag=None,  # on the command line --seed is the engine's
    )
    stop: str | Sequence[str] | None = declare(
        None,
        TEXT_OR_TEXTS,
        "end generation at this string",
        "a list for several; needs `detokenize`; it is looked for in the text as it is given out, but the whole text "
        "of a special token ends it also where `skip_special_tokens` leaves that out",
    )
    stop_token_ids: Sequence[int] | None = declare(
        None, TOKEN_IDS, "end generation at these token ids", flag="--stop-token-id"
    )
    ignore_eos: bool = declare(False, FLAG, "continue after an end-of-sequence token")
    max_tokens: int | None = declare(
        16,
        optional(integer(1)),
        "most tokens to generate",
        "None: up to the context length, or what the KV cache can hold",
    )
    min_tokens: int = declare(
        0, TOKEN_ID, "tokens to generate before an end-of-sequence or stop token may come", "at most `max_tokens`"
    )
    logprobs: int | None = declare(
        None,
        NUM_LOGPROBS,
        "return log-probabilities of the chosen token and the N most likely tokens at each position",
        "-1 for all; True is 1, False 0",
    )
    prompt_logprobs: int | None = declare(None, NUM_LOGPROBS, "the same for the prompt", flag=None)
    detokenize: bool = declare(True, FLAG, "return text", flag=None)
    skip_special_tokens: bool = declare(True, FLAG, "leave special tokens out of the text", flag=None)
    spaces_between_special_tokens: bool = declare(
        True, FLAG, "keep the space that some tokenizers put between special tokens", flag=None
    )
    include_stop_str_in_output: bool = declare(
        False, FLAG, "whether the text includes the stop string or token", flag=None
    )
    logit_bias: dict[int, float] | None = declare(None, TOKEN_BIASES, "added to the logits, by token id")
    allowed_token_ids: Sequence[int] | None = declare(
        None,
        optional(SOME_TOKEN_IDS),
        "the only tokens that may be sampled, at least one; an end-of-sequence token only if it is among them",
        flag=None,
    )
    bad_words: Sequence[str] | None = declare(
        None,
        list_of(TEXT),
        "words that must not be generated: the token sequences of each word alone and after a space are forbidden",
        "the same letters may still come from other tokens; leading spaces and line ends are ignored",
        flag=None,
    )
    truncate_prompt_tokens: int | None = declare(
        None,
        optional(integer(1, or_minus_one=True)),
        "use only this many last tokens of the prompt; -1 for the context length",
        flag=None,
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = declare(
        (),
        tuple_of(tuple_of(TOKEN_ID, may_be_empty=False)),
        "token sequences that must not be generated; the engine adds those of `bad_words`",
    )
    disable_spec_decode: bool = declare(
        False, FLAG, "generate one token a step, without [drafts](speculation.md)", "the tokens are the same"
    )
    extra_args: Mapping[str, Any] | None = declare(
        None, ARGUMENTS, "arguments for logits processors, by name; not used otherwise"
    )
    token_mask: TokenMask | None = declare(
        None,
        optional(having("allowed")),
        "your own constraint on the next token (see [token masks](logits_processors.md#token-masks))",
    )
    structured_outputs: StructuredOutputs | None = declare(
        None,
        Kind(StructuredOutputs.of, {"type": "object"}),
        "constraint on the text (see [structured outputs](#structured-outputs))",
        "`StructuredOutputs`, or a dict with its fields; cannot be combined with `token_mask` or `ignore_eos`",
    )

    if not TYPE_CHECKING:  # type checkers would allow assigning to any name

        def __setattr__(self, name: str, value: Any) -> None:
            check = _CHECKS.get(name)
            if check is None:
                settle_other_param(name, value, _CHECKS, AttributeError)
                return
            checked = check(name, value)
            _check_together(vars(self) | {name: checked})
            vars(self)[name] = checked

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters made of values that may be None.

        None stands for a field's default; for max_tokens, it stands for no limit.
        """
        given = {name: value for name, value in values.items() if value is not None or name not in _WITH_DEFAULT}
        return cls(**given)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edits_by_output(self) -> bool:
        """Whether edits of logits depend on the tokens generated so far."""
        return self.has_penalties or bool(self.bad_words_token_ids)

    def clone(self) -> SamplingParams:
        """Return a copy that has its own lists and dicts.

        The items in them, and token_mask, are shared with this object.
        """
        values = vars(self).copy()
        for name in _CONTAINERS:
            if values[name] is not None:
                values[name] = values[name].copy()
        return _made_of(values)


SamplingParams.__doc__ = documented(SamplingParams)
# Fields for which None means the default.
_WITH_DEFAULT = _CHECKS.keys() - {"max_tokens"}


def _made_of(values: dict[str, Any]) -> SamplingParams:
    made = object.__new__(SamplingParams)
    vars(made).update(values)
    return made


def checked_again(params: SamplingParams) -> SamplingParams:
    """Return a copy of parameters whose lists and dicts are checked again, since their content may have changed.

    Raises TypeError or ValueError as an assignment does.
    """
    values = vars(params).copy()
    for name in _CONTAINERS:
        if values[name] is not None:
            values[name] = _CHECKS[name](name, values[name])
    _check_together(values)
    return _made_of(values)


def derived(params: SamplingParams, **values: Any) -> SamplingParams:
    """Return a copy of parameters with these values, which are not checked. Lists and dicts are shared."""
    return _made_of({**vars(params), **values})


def of_completion(params: SamplingParams, index: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of completion `index` (from 0) of a request with n completions.

    If the request has a seed, each completion has a seed of its own. Only the first has prompt_logprobs. Token mask and
    structured outputs are left out, since the engine receives them separately.
    """
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


def _check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError if values contradict each other. values: all fields by name."""
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
    """Raise ValueError if a model of this vocabulary and length (in tokens) cannot satisfy `params`."""

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
    check_at_most("min_tokens", max_model_len - 1, "the context length less one prompt token")
    check_at_most("truncate_prompt_tokens", max_model_len, "the context length")
