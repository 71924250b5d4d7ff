"""Every parameter of vLLM's SamplingParams: honoured, without effect, or an error that says what to do instead."""

from __future__ import annotations

import dataclasses
import enum
import re
import warnings
from typing import Any

import pytest
from transformers import GenerationConfig

from compiled_engine.sampling.other_params import OF_TRANSFORMERS, OTHER_PARAMS
from compiled_engine.sampling.params import SamplingParams

# vLLM's public signature, and what earlier versions had; names that begin with an underscore are not for callers.
SIGNATURE = re.findall(
    r"\w+",
    """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
    logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs
    logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
    repetition_detection routed_experts_prompt_start trace_decode_token_ids
    """,
)
EARLIER = [
    "truncate_prompt_tokens",
    "guided_decoding",
    "logits_processors",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
]


class OutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


ASK_NOTHING: list[tuple[str, Any]] = [
    ("flat_logprobs", False),
    ("output_kind", OutputKind.CUMULATIVE),
    ("output_kind", 0),
    ("stream_interval", None),
    ("stream_interval", 1),
    ("skip_clone", False),
    ("output_text_buffer_length", 0),
    ("skip_reading_prefix_cache", None),
    ("skip_reading_prefix_cache", False),
    ("routed_experts_prompt_start", 0),
    ("prompt_logprob_token_ids", None),
    ("prompt_logprob_start", None),
    ("prompt_logprob_start", 0),
    ("logprob_token_ids", None),
    ("guided_decoding", None),
    ("thinking_token_budget", None),
    ("thinking_token_budget", -1),
    ("repetition_detection", None),
    ("trace_decode_token_ids", None),
    ("logits_processors", None),
    ("logits_processors", []),
    ("best_of", None),
    ("best_of", 1),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("length_penalty", 1),
    ("early_stopping", False),
]
WITHOUT_EFFECT: list[tuple[str, Any]] = [
    ("flat_logprobs", True),
    ("output_kind", OutputKind.FINAL_ONLY),
    ("output_kind", 2),
    ("stream_interval", 8),
    ("skip_clone", True),
    ("output_text_buffer_length", 5),
    ("skip_reading_prefix_cache", True),
    ("routed_experts_prompt_start", 7),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("output_kind", OutputKind.DELTA, "stream yields all text so far"),
    ("output_kind", 1, "stream yields all text so far"),
    ("prompt_logprob_token_ids", [1, 2], "use prompt_logprobs=-1"),
    ("prompt_logprob_start", 5, "use prompt_logprobs"),
    ("logprob_token_ids", [1], "use logprobs=-1"),
    ("guided_decoding", {"regex": "a"}, "use structured_outputs="),
    ("thinking_token_budget", 100, "use max_tokens"),
    ("repetition_detection", object(), "close the iterator"),
    ("trace_decode_token_ids", [5, 6], "use prompt_logprobs"),
    ("logits_processors", [print], r"LLM\(logits_processors="),
    ("best_of", 4, "use n"),
    ("use_beam_search", True, "use n"),
    ("length_penalty", 0.5, "use n"),
    ("early_stopping", True, "use n"),
]


def test_every_name_has_a_row_and_every_row_a_test() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {*SIGNATURE, *EARLIER} <= fields | OTHER_PARAMS.keys()
    assert OTHER_PARAMS.keys() <= {*SIGNATURE, *EARLIER}
    assert not fields & OTHER_PARAMS.keys()
    assert {name for name, *_ in ASK_NOTHING} == OTHER_PARAMS.keys()
    assert {name for name, *_ in (*WITHOUT_EFFECT, *REFUSED)} == OTHER_PARAMS.keys()


def test_what_asks_for_nothing_is_taken_without_a_word() -> None:
    for name, value in ASK_NOTHING:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            params = SamplingParams(max_tokens=3, **{name: value})
            setattr(params, name, value)
        assert params == SamplingParams(max_tokens=3), name


def test_what_has_no_effect_is_a_warning_at_the_line_that_asks_for_it() -> None:
    for name, value in WITHOUT_EFFECT:
        with pytest.warns(UserWarning, match=f"^{name}=.* has no effect here: ") as when_made:
            params = SamplingParams(max_tokens=3, **{name: value})
        with pytest.warns(UserWarning, match=f"^{name}=.* has no effect here: ") as when_assigned:
            setattr(params, name, value)
        assert [warning.filename for warning in (*when_made, *when_assigned)] == [__file__, __file__]
        assert params == SamplingParams(max_tokens=3)


def test_a_line_that_is_run_often_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            SamplingParams(flat_logprobs=True)  # type: ignore[call-arg]
    assert len(caught) == 1


def test_what_is_not_supported_says_what_to_do_instead() -> None:
    for name, value, instead in REFUSED:
        with pytest.raises(ValueError, match=f"^{name} is .* not supported; .*{instead}"):
            SamplingParams(**{name: value})
        params = SamplingParams()
        with pytest.raises(ValueError, match=instead):
            setattr(params, name, value)
        assert params == SamplingParams()


def test_a_near_name_is_proposed_only_if_it_is_near() -> None:
    params: Any = SamplingParams()
    for name, ending in (("temprature", "'temprature'; did you mean 'temperature'?"), ("zeal", "'zeal'")):
        for error, ask in (
            (TypeError, SamplingParams),
            (AttributeError, lambda **named: params.__setattr__(*named.popitem())),
        ):
            with pytest.raises(error) as caught:
                ask(**{name: 1})
            assert str(caught.value) == f"SamplingParams has no field {ending}"
    assert not hasattr(params, "temprature")


def test_a_name_of_transformers_is_an_error_with_ours() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in OF_TRANSFORMERS:
        assert hasattr(GenerationConfig(), name)
        assert name not in fields
        with pytest.raises(TypeError, match=rf"no field '{name}'; .+"):
            SamplingParams(**{name: 1})
