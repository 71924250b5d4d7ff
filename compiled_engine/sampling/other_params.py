"""Sampling parameters of other engines: each is accepted without effect, or is an error that says what to give instead.

OTHER_PARAMS has all names of vLLM's signature that SamplingParams lacks, and some of earlier versions. A parameter of
transformers' `generate` raises an error that names this engine's parameter for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compiled_engine.schema import unknown_name_message


@dataclass(frozen=True)
class OtherParam:
    """A sampling parameter that only other engines have, and how its values are handled.

    A value is accepted silently, accepted with a warning, or refused with an error. An enum member counts as its name.
    """

    asks_nothing: tuple[Any, ...]  # values that change nothing in other engines either; accepted silently
    no_effect: str = ""  # the reason in the warning for values that have no effect here
    without_effect: tuple[Any, ...] = ()  # accepted with that warning; if `instead` is "", all other values are
    instead: str = ""  # the alternative that the error for any other value names

    def settle(self, name: str, value: Any) -> None:
        """Accept a value silently or with a warning, or raise ValueError for it."""
        given = getattr(value, "name", value)
        if _is_one_of(given, self.asks_nothing):
            return
        if self.instead and not _is_one_of(given, self.without_effect):
            raise ValueError(f"{name} is {value!r}, which is not supported; {self.instead}")
        _warn(name, value, self.no_effect)

    @property
    def result(self) -> str:
        """Text for the documents: how values other than those in asks_nothing are handled."""
        if not self.instead:
            return f"no effect: {self.no_effect}"
        if not self.without_effect:
            return f"error: not supported; {self.instead}"
        return f"{self.without_effect[0]} has no effect: {self.no_effect}; others are not supported; {self.instead}"


def _without_effect(why: str, *asks_nothing: Any) -> OtherParam:
    return OtherParam(asks_nothing, no_effect=why)


def _refused(instead: str, *asks_nothing: Any) -> OtherParam:
    return OtherParam(asks_nothing, instead=instead)


_NO_BEAMS = "use n, and logprobs to choose by cumulative_logprob"

OTHER_PARAMS: dict[str, OtherParam] = {
    "flat_logprobs": _without_effect("log-probabilities come as a list of dicts", False),
    "output_kind": OtherParam(
        ("CUMULATIVE", 0),
        no_effect="generate returns finished outputs, and stream all text so far",
        without_effect=("FINAL_ONLY", 2),
        instead="LLM.stream yields all text so far: drop the part that was already there",
    ),
    "stream_interval": _without_effect("LLM.stream yields at each step", None, 1),
    "skip_clone": _without_effect("each request has a copy of its parameters", False),
    "output_text_buffer_length": _without_effect("it follows from stop", 0),
    "skip_reading_prefix_cache": _without_effect("reading the prefix cache changes no token", None, False),
    "routed_experts_prompt_start": _without_effect("no model here returns its experts", 0),
    "prompt_logprob_token_ids": _refused("use prompt_logprobs=-1 and look them up by token id", None),
    "prompt_logprob_start": _refused("use prompt_logprobs, which begins at the start", None, 0),
    "logprob_token_ids": _refused("use logprobs=-1 and look them up by token id", None),
    "guided_decoding": _refused(
        "use structured_outputs=StructuredOutputs(json=...), or regex, choice, grammar, json_object", None
    ),
    "thinking_token_budget": _refused("use max_tokens, or give it to a chat of the server", None, -1),
    "repetition_detection": _refused("watch LLM.stream and close the iterator", None),
    "trace_decode_token_ids": _refused("put them in the prompt and use prompt_logprobs", None),
    "logits_processors": _refused("use LLM(logits_processors=[...]), which reads extra_args", None, []),
    "best_of": _refused(_NO_BEAMS, None, 1),
    "use_beam_search": _refused(_NO_BEAMS, False),
    "length_penalty": _refused(_NO_BEAMS, 1.0, 1),
    "early_stopping": _refused(_NO_BEAMS, False),
}

# Names of parameters of transformers, with this engine's names.
OF_TRANSFORMERS = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "min_length": "use min_tokens, which does not count the prompt",
    "do_sample": "use temperature: 0 takes the most likely token, values above it sample",
    "num_return_sequences": "use n",
    "num_beams": _NO_BEAMS,
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
    "bad_words_ids": "use bad_words, which are strings",
    "output_scores": "use logprobs",
    "output_logits": "use logprobs",
}


def settle_other_param(name: str, value: Any, known: Iterable[str], unknown: type[Exception]) -> None:
    """Handle a parameter that is none of the fields `known`: accept it, perhaps with a warning, or raise an error.

    Raises ValueError for a value that is not supported. Raises `unknown`, an exception class, for a name that vLLM does
    not have either; if transformers has the name, the message says this engine's name for the parameter. Must be called
    directly by the function that the user calls, so that the warning has the user's location.
    """
    if name in OF_TRANSFORMERS:
        raise unknown(f"SamplingParams has no field {name!r}; {OF_TRANSFORMERS[name]}")
    if name not in OTHER_PARAMS:
        raise unknown(unknown_name_message("SamplingParams has no field", name, known))
    OTHER_PARAMS[name].settle(name, value)


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return whether `value` is one of `values`. Types must be equal, so that 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)


def _warn(name: str, value: Any, why: str) -> None:
    warnings.warn(f"{name}={value!r} has no effect here: {why}", stacklevel=5)
