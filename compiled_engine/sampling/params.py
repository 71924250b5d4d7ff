"""SamplingParams: the sampling parameters of one request, checked on creation and on every change.

Other engines' parameters are handled too, so that scripts either run or fail with a reason. All names of vLLM's
signature are known, and some of its earlier versions. A value that requests nothing is accepted silently; any other
either has no effect here, with a warning, or is an error that names the alternative. Names from transformers'
`generate` are errors that give this engine's name.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
from compiled_engine.schema import Check, Kind, declarations, declare, documented, unknown_name_message


class OtherParam(Protocol):
    """A parameter of another engine. Called with its name and a value, it does nothing, warns or raises ValueError.

    asks_nothing: values without any effect. result: the result of any other value, for the documents.
    """

    @property
    def asks_nothing(self) -> tuple[Any, ...]: ...

    @property
    def result(self) -> str: ...

    def __call__(self, name: str, value: Any) -> None: ...


class _WithoutEffect:
    def __init__(self, why: str, *asks_nothing: Any) -> None:
        self.why, self.asks_nothing = why, asks_nothing
        self.result = f"no effect: {why}"

    def __call__(self, name: str, value: Any) -> None:
        if not _is_one_of(value, self.asks_nothing):
            _warn(name, value, self.why)


class _Refused:
    def __init__(self, what: str, instead: str, *asks_nothing: Any) -> None:
        self.why, self.asks_nothing = f"{what} not supported; {instead}", asks_nothing
        self.result = f"error: {self.why}"

    def __call__(self, name: str, value: Any) -> None:
        if not _is_one_of(value, self.asks_nothing):
            raise ValueError(f"{name} is {value!r}: {self.why}")


class _OutputKind:
    """vLLM's output_kind: an enumeration member, or its number."""

    asks_nothing = ("CUMULATIVE",)
    why = "generate returns finished outputs, and stream all text so far"
    instead = "LLM.stream yields all text so far: drop the part that was already there"
    result = f"FINAL_ONLY has no effect: {why}; DELTA is an error: {instead}"

    def __call__(self, name: str, value: Any) -> None:
        kind = getattr(value, "name", value)
        if _is_one_of(kind, ("FINAL_ONLY", 2)):
            _warn(name, value, self.why)
        elif not _is_one_of(kind, (*self.asks_nothing, 0)):
            raise ValueError(f"{name} is {value!r}, which is not supported; {self.instead}")


_BEAM_SEARCH = "beam search is"
_NO_BEAMS = "use n, and logprobs to choose by cumulative_logprob"
_STRUCTURED = "use structured_outputs=StructuredOutputs(json=...), or regex, choice, grammar, json_object"

OTHER_PARAMS: dict[str, OtherParam] = {
    "flat_logprobs": _WithoutEffect("log-probabilities come as a list of dicts", False),
    "output_kind": _OutputKind(),
    "stream_interval": _WithoutEffect("LLM.stream yields at each step", None, 1),
    "skip_clone": _WithoutEffect("each request has a copy of its parameters", False),
    "output_text_buffer_length": _WithoutEffect("it follows from stop", 0),
    "skip_reading_prefix_cache": _WithoutEffect("reading the prefix cache changes no token", None, False),
    "routed_experts_prompt_start": _WithoutEffect("no model here returns its experts", 0),
    "prompt_logprob_token_ids": _Refused(
        "log-probabilities of chosen tokens are", "use prompt_logprobs=-1 and look them up by token id", None
    ),
    "prompt_logprob_start": _Refused(
        "log-probabilities of a part of the prompt are", "use prompt_logprobs, which begins at the start", None, 0
    ),
    "logprob_token_ids": _Refused(
        "log-probabilities of chosen tokens are", "use logprobs=-1 and look them up by token id", None
    ),
    "guided_decoding": _Refused("this older name of structured_outputs is", _STRUCTURED, None),
    "thinking_token_budget": _Refused(
        "a separate limit on thinking is", "use max_tokens, or give it to a chat of the server", None, -1
    ),
    "repetition_detection": _Refused(
        "ending a request because it repeats itself is", "watch LLM.stream and close the iterator", None
    ),
    "trace_decode_token_ids": _Refused(
        "generating given tokens is", "put them in the prompt and use prompt_logprobs", None
    ),
    "logits_processors": _Refused(
        "a function for a single request is", "use LLM(logits_processors=[...]), which reads extra_args", None, []
    ),
    "best_of": _Refused("generating more completions than are returned is", _NO_BEAMS, None, 1),
    "use_beam_search": _Refused(_BEAM_SEARCH, _NO_BEAMS, False),
    "length_penalty": _Refused(_BEAM_SEARCH, _NO_BEAMS, 1.0),
    "early_stopping": _Refused(_BEAM_SEARCH, _NO_BEAMS, False),
}

# transformers' names of parameters, with this engine's alternative.
OF_TRANSFORMERS = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "min_length": "use min_tokens, which does not count the prompt",
    "do_sample": "use temperature: 0 takes the most likely token, values above it sample",
    "num_return_sequences": "use n",
    "num_beams": f"{_BEAM_SEARCH} not supported; {_NO_BEAMS}",
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
    "bad_words_ids": "use bad_words, which are strings",
    "output_scores": "use logprobs",
    "output_logits": "use logprobs",
}


def settle_other_param(name: str, value: Any, known: Iterable[str], unknown: type[Exception]) -> None:
    """Handle a parameter that is not among the `known` fields: ignore it, warn or raise.

    Raises ValueError if it is not supported, and `unknown` for a name that vLLM lacks too, with this engine's name if
    transformers has it. Call it directly from the user's call, so that the warning shows the right location.
    """
    settle = OTHER_PARAMS.get(name)
    if name in OF_TRANSFORMERS:
        raise unknown(f"SamplingParams has no field {name!r}; {OF_TRANSFORMERS[name]}")
    if settle is None:
        raise unknown(unknown_name_message("SamplingParams has no field", name, known))
    settle(name, value)


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return whether the value is one of these, of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)


def _warn(name: str, value: Any, why: str) -> None:
    warnings.warn(f"{name}={value!r} has no effect here: {why}", stacklevel=5)


# Requests below this temperature are greedy: dividing the logits by it could overflow float32.
SMALLEST_TEMPERATURE = 1e-5
MAX_COMPLETIONS = 16384
PENALTY = number(-2, 2)
NUM_LOGPROBS = optional(integer(0, or_minus_one=True, or_flag=True))

_CHECKS: dict[str, Check] = {}

_CONTAINERS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "extra_args")

_Params = TypeVar("_Params")


def _checked_when_made(cls: type[_Params]) -> type[_Params]:
    """Make a dataclass's constructor check the given arguments only; its signature is unchanged."""
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
    fields are checked like arguments; a request has its own copy. Lists and dicts are copied too, None for a list means
    an empty one, and numpy numbers are stored as Python's.

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
        """Make parameters from values that may be None, which stands for the field's default; for max_tokens it means
        no limit."""
        given = {name: value for name, value in values.items() if value is not None or name not in _WITH_DEFAULT}
        return cls(**given)

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is always taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edits_by_output(self) -> bool:
        """Return whether edits of a token's logits depend on the tokens generated before it."""
        return self.has_penalties or bool(self.bad_words_token_ids)

    def clone(self) -> SamplingParams:
        """Return a copy with its own lists and dicts; their items, and token_mask, are shared."""
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
    """Return a copy with its lists and dicts checked, whose content may have changed since they were assigned.

    Raises TypeError or ValueError as an assignment does.
    """
    values = vars(params).copy()
    for name in _CONTAINERS:
        if values[name] is not None:
            values[name] = _CHECKS[name](name, values[name])
    _check_together(values)
    return _made_of(values)


def derived(params: SamplingParams, **values: Any) -> SamplingParams:
    """Return a copy with these values, which are not checked; lists and dicts are shared."""
    return _made_of({**vars(params), **values})


def _check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError for fields whose values contradict each other."""
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
