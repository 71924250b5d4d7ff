"""Others' parameters of sampling that are not ours: what becomes of each, so that their scripts run or say why not.

Of vLLM these are all names of its signature, and some of earlier versions. A value that asks for nothing is taken
without a word. Any other is either without effect here, with a warning, or an error that says what to do instead.
A name of transformers' `generate` is an error that has our name for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from compiled_engine.schema import unknown_name_message

Settle = Callable[[str, Any], None]


def _without_effect(why: str, *asks_nothing: Any) -> Settle:
    def settle(name: str, value: Any) -> None:
        if not _is_one_of(value, asks_nothing):
            _warn(name, value, why)

    return settle


def _refused(what: str, instead: str, *asks_nothing: Any) -> Settle:
    def settle(name: str, value: Any) -> None:
        if not _is_one_of(value, asks_nothing):
            raise ValueError(f"{name} is {value!r}: {what} not supported; {instead}")

    return settle


def _output_kind(name: str, value: Any) -> None:
    """An enumeration of vLLM's, or its number."""
    kind = getattr(value, "name", value)
    if _is_one_of(kind, ("FINAL_ONLY", 2)):
        _warn(name, value, "generate returns finished outputs, and stream all text so far")
    elif not _is_one_of(kind, ("CUMULATIVE", 0)):
        raise ValueError(
            f"{name} is {value!r}, which is not supported; LLM.stream yields all text so far: "
            "leave out as much of it as was there before"
        )


_BEAM_SEARCH = "beam search is"
_NO_BEAMS = "use n, and logprobs to choose by cumulative_logprob"
_STRUCTURED = "use structured_outputs=StructuredOutputs(json=...), or regex, choice, grammar, json_object"

OTHER_PARAMS: dict[str, Settle] = {
    "flat_logprobs": _without_effect("log-probabilities come as a list of dicts", False),
    "output_kind": _output_kind,
    "stream_interval": _without_effect("LLM.stream yields at each step", None, 1),
    "skip_clone": _without_effect("each request has a copy of its parameters", False),
    "output_text_buffer_length": _without_effect("it follows from stop", 0),
    "skip_reading_prefix_cache": _without_effect("what is read from the prefix cache changes no token", None, False),
    "routed_experts_prompt_start": _without_effect("no model here returns its experts", 0),
    "prompt_logprob_token_ids": _refused(
        "log-probabilities of chosen tokens are", "use prompt_logprobs=-1 and look them up by token id", None
    ),
    "prompt_logprob_start": _refused(
        "log-probabilities of a part of the prompt are", "use prompt_logprobs, which begins at the start", None, 0
    ),
    "logprob_token_ids": _refused(
        "log-probabilities of chosen tokens are", "use logprobs=-1 and look them up by token id", None
    ),
    "guided_decoding": _refused("the older name of structured_outputs is", _STRUCTURED, None),
    "thinking_token_budget": _refused("a limit on thinking alone is", "use max_tokens", None, -1),
    "repetition_detection": _refused(
        "ending a request because it repeats itself is", "watch LLM.stream and close the iterator", None
    ),
    "trace_decode_token_ids": _refused(
        "generating given tokens is", "put them in the prompt and use prompt_logprobs", None
    ),
    "logits_processors": _refused(
        "a function for a single request is", "use LLM(logits_processors=[...]), which reads extra_args", None, []
    ),
    "best_of": _refused("generating more completions than are returned is", _NO_BEAMS, None, 1),
    "use_beam_search": _refused(_BEAM_SEARCH, _NO_BEAMS, False),
    "length_penalty": _refused(_BEAM_SEARCH, _NO_BEAMS, 1.0),
    "early_stopping": _refused(_BEAM_SEARCH, _NO_BEAMS, False),
}

# What transformers' names are here.
OF_TRANSFORMERS = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "min_length": "use min_tokens, which does not count the prompt",
    "do_sample": "temperature=0 takes the most likely token, any above samples",
    "num_return_sequences": "use n",
    "num_beams": f"{_BEAM_SEARCH} not supported; {_NO_BEAMS}",
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
    "bad_words_ids": "use bad_words, which are texts",
    "output_scores": "use logprobs",
    "output_logits": "use logprobs",
}


def settle_other_param(name: str, value: Any, known: Iterable[str], unknown: type[Exception]) -> None:
    """What becomes of a parameter that is none of the `known` fields; nothing, if it is without effect.

    Raises ValueError if it is not supported, and `unknown` for a name that vLLM does not have either, with our name
    where it is one of transformers'. For the warning's place, called from what the user calls.
    """
    settle = OTHER_PARAMS.get(name)
    if name in OF_TRANSFORMERS:
        raise unknown(f"SamplingParams has no field {name!r}; {OF_TRANSFORMERS[name]}")
    if settle is None:
        raise unknown(unknown_name_message("SamplingParams has no field", name, known))
    settle(name, value)


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Where 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)


def _warn(name: str, value: Any, why: str) -> None:
    warnings.warn(f"{name}={value!r} has no effect here: {why}", stacklevel=5)
