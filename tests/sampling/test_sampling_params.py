"""SamplingParams: defaults, what is accepted and how it is stored, and every refusal."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from compiled_engine.sampling.params import SamplingParams, validate_for_model
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.schema import declarations

INFINITY, NAN = float("inf"), float("nan")


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "truncate_prompt_tokens": None,
        "bad_words_token_ids": (),
        "disable_spec_decode": False,
        "extra_args": None,
        "token_mask": None,
        "structured_outputs": None,
    }


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("stop", "end", ["end"]),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop", None, []),
        ("stop_token_ids", [3, 1, 3], [3, 1, 3]),
        ("stop_token_ids", (3, np.int32(4)), [3, 4]),
        ("stop_token_ids", None, []),
        ("allowed_token_ids", [5, 2], [5, 2]),
        ("allowed_token_ids", (np.int64(5), 2), [5, 2]),
        ("allowed_token_ids", None, None),
        ("bad_words", ["no"], ["no"]),
        ("bad_words", None, []),
        ("bad_words_token_ids", [[1, 2], [3]], ((1, 2), (3,))),
        ("logit_bias", {"7": 1, np.int64(8): -2.5}, {7: 1.0, 8: -2.5}),
        ("logit_bias", {}, None),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.9), 0.9),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("min_p", 1, 1.0),
        ("top_k", -1, -1),
        ("top_k", np.int64(5), 5),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -1, None),
        ("seed", -2, -2),
        ("temperature", 1e37, 1e37),
        ("repetition_penalty", 1e-37, 1e-37),
        ("max_tokens", None, None),
        ("logprobs", -1, -1),
        ("prompt_logprobs", 0, 0),
        ("truncate_prompt_tokens", -1, -1),
        ("extra_args", {"a": [1]}, {"a": [1]}),
        ("extra_args", MappingProxyType({"a": 1}), {"a": 1}),
    ],
)
def test_what_is_stored(field: str, given: Any, stored: Any) -> None:
    assigned = SamplingParams()
    setattr(assigned, field, given)
    for params in (SamplingParams(**{field: given}), assigned):
        value = getattr(params, field)
        assert value == stored
        assert type(value) is type(stored)


def test_of_optional_values_none_is_the_default() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens"]
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams.from_optional(temperature=0.5, top_p=None) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams.from_optional(top_p=2)
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams.from_optional(temperatur=None)


def test_it_is_plain_serialisable_data() -> None:
    given: dict[str, Any] = {"seed": np.int64(3), "top_k": np.int32(4), "temperature": np.float32(0.5)}
    params = SamplingParams(logit_bias={1: 2}, **given)
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params)))) == params


def test_a_copy_is_checked_too() -> None:
    params = dataclasses.replace(SamplingParams(bad_words=["x y"]), bad_words_token_ids=((5, 6),))
    assert params.bad_words_token_ids == ((5, 6),)
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)


def test_it_keeps_its_own_copy_of_lists_and_dicts() -> None:
    given: dict[str, Any] = {name: ["a"] for name in ("stop", "bad_words")}
    given |= {name: [1] for name in ("stop_token_ids", "allowed_token_ids")}
    given |= {"logit_bias": {1: 1.0}, "extra_args": {"a": 1}}
    params, expected = SamplingParams(**given), SamplingParams(**given)
    clone = params.clone()
    assert clone == expected
    for value in given.values():
        value.clear()
    assert params == expected
    for name in given:
        getattr(clone, name).clear()
    assert params == expected
    assert SamplingParams().stop is not SamplingParams().stop


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


WRONG_TYPES: list[tuple[str, Any, str]] = [
    (field, value, allowed)
    for fields, values, allowed in [
        (("n",), ("1", 1.0, True), "an integer from 1 to 16384"),
        (("max_tokens",), ("1", 1.0, True), "an integer >= 1"),
        (("min_tokens",), ("1", 1.0, True, None), "an integer >= 0"),
        (("seed",), ("1", 1.0, True), "an integer from -9223372036854775808 to 18446744073709551615"),
        (("top_k",), ("1", 1.0, True), "an integer >= 0, or -1"),
        (("logprobs", "prompt_logprobs"), ("1", 1.0), "an integer >= 0, or -1"),
        (("truncate_prompt_tokens",), ("1", 1.0, True), "an integer >= 1, or -1"),
        (("presence_penalty", "frequency_penalty"), ("1", None, True), "a finite number >= -2 and <= 2"),
        (("repetition_penalty",), ("1", None, True), "a finite number >= 1e-37 and <= 1e+37"),
        (("temperature",), ("1", None, True), "a finite number >= 0 and <= 1e+37"),
        (("top_p",), ("1", None, True), "a finite number > 0 and <= 1"),
        (("min_p",), ("1", None, True), "a finite number >= 0 and <= 1"),
        (
            (
                "ignore_eos",
                "detokenize",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "include_stop_str_in_output",
            ),
            (1, "yes", None),
            "True or False",
        ),
        (
            ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids"),
            (5, {"a": 1}),
            "a list or a tuple",
        ),
        (("stop_token_ids", "allowed_token_ids", "bad_words"), ("word",), "a list or a tuple"),
        (("logit_bias",), ([1, 2], 5), "a dict of token id to bias"),
        (("extra_args",), ([1, 2], 5, "a"), "a dict of names to values"),
        (("token_mask",), (5, lambda ids: ids, TokenMask), "an object with a method 'allowed'"),
    ]
    for field in fields
    for value in values
]

WRONG_ITEMS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"stop": ["a", 5]}, "stop[1]", 5, "a string"),
    ({"bad_words": [None]}, "bad_words[0]", None, "a string"),
    ({"stop_token_ids": [1, 2.0]}, "stop_token_ids[1]", 2.0, "an integer >= 0"),
    ({"allowed_token_ids": [1, True]}, "allowed_token_ids[1]", True, "an integer >= 0"),
    ({"bad_words_token_ids": [[1], 2]}, "bad_words_token_ids[1]", 2, "a list or a tuple"),
    ({"bad_words_token_ids": [["a"]]}, "bad_words_token_ids[0][0]", "a", "an integer >= 0"),
    ({"logit_bias": {"a": 1}}, "logit_bias key", "a", "an integer >= 0"),
    ({"logit_bias": {1.5: 1}}, "logit_bias key", 1.5, "an integer >= 0"),
    ({"extra_args": {5: 1}}, "extra_args key", 5, "a string"),
    ({"logit_bias": {1: "2"}}, "logit_bias[1]", "2", "a finite number"),
]


@pytest.mark.parametrize(
    ("given", "name", "value", "allowed"),
    [({field: value}, field, value, allowed) for field, value, allowed in WRONG_TYPES] + WRONG_ITEMS,
)
def test_wrong_types(given: dict[str, Any], name: str, value: Any, allowed: str) -> None:
    assert_refused(given, TypeError, f"{name} must be {allowed}", f"got {value!r}")


def assert_refused(given: dict[str, Any], kind: type[Exception], beginning: str, end: str) -> None:
    """Check that the constructor refuses the values, and that assigning each field is refused and changes nothing."""
    with pytest.raises(kind) as error:
        SamplingParams(**given)
    assert str(error.value).startswith(beginning)
    assert str(error.value).endswith(end)
    *before, (field, value) = given.items()
    params = SamplingParams(**dict(before))
    was = params.clone()
    with pytest.raises(kind) as error:
        setattr(params, field, value)
    assert str(error.value).endswith(end) or before
    assert params == was


@pytest.mark.parametrize(
    ("given", "name", "value", "allowed"),
    [
        ({"n": 0}, "n", 0, "be an integer from 1 to 16384"),
        ({"n": 2, "temperature": 0}, "n", 2, "be 1 when temperature is 0 (greedy)"),
        ({"presence_penalty": 2.1}, "presence_penalty", 2.1, "be a finite number >= -2 and <= 2"),
        ({"presence_penalty": NAN}, "presence_penalty", NAN, "be a finite number >= -2 and <= 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", -2.1, "be a finite number >= -2 and <= 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", 0.0, "be a finite number >= 1e-37 and <= 1e+37"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", 1e-300, "be a finite number >= 1e-37"),
        ({"repetition_penalty": 1e38}, "repetition_penalty", 1e38, "be a finite number >= 1e-37"),
        ({"repetition_penalty": INFINITY}, "repetition_penalty", INFINITY, "be a finite number >= 1e-37"),
        ({"temperature": -0.1}, "temperature", -0.1, "be a finite number >= 0"),
        ({"temperature": INFINITY}, "temperature", INFINITY, "be a finite number >= 0"),
        ({"temperature": NAN}, "temperature", NAN, "be a finite number >= 0"),
        ({"temperature": 1e308}, "temperature", 1e308, "be a finite number >= 0 and <= 1e+37"),
        ({"temperature": 1e38}, "temperature", 1e38, "be a finite number >= 0 and <= 1e+37"),
        ({"temperature": 10**400}, "temperature", 10**400, "be a finite number >= 0"),
        ({"top_p": 0}, "top_p", 0, "be a finite number > 0 and <= 1"),
        ({"top_p": 1.1}, "top_p", 1.1, "be a finite number > 0 and <= 1"),
        ({"top_p": NAN}, "top_p", NAN, "be a finite number > 0 and <= 1"),
        ({"top_k": -2}, "top_k", -2, "be an integer >= 0, or -1"),
        ({"min_p": -0.1}, "min_p", -0.1, "be a finite number >= 0 and <= 1"),
        ({"min_p": 1.1}, "min_p", 1.1, "be a finite number >= 0 and <= 1"),
        ({"seed": 2**64}, "seed", 2**64, "be an integer from"),
        ({"seed": -(2**63) - 1}, "seed", -(2**63) - 1, "be an integer from"),
        ({"stop": ""}, "stop[0]", "", "not be empty"),
        ({"stop": ["a", ""]}, "stop[1]", "", "not be empty"),
        ({"stop": "a", "detokenize": False}, "stop", ["a"], "be empty when detokenize is False"),
        ({"detokenize": False, "stop": ["a"]}, "stop", ["a"], "be empty when detokenize is False"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", -1, "be an integer >= 0"),
        ({"max_tokens": 0}, "max_tokens", 0, "be an integer >= 1"),
        ({"min_tokens": -1}, "min_tokens", -1, "be an integer >= 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", 9, "be <= max_tokens (8)"),
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens", 9, "be <= max_tokens (8)"),
        ({"temperature": 0, "n": 2}, "n", 2, "be 1 when temperature is 0 (greedy)"),
        ({"allowed_token_ids": []}, "allowed_token_ids", [], "have at least one token id"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids[1]", -1, "be an integer >= 0"),
        ({"logprobs": -2}, "logprobs", -2, "be an integer >= 0, or -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", -2, "be an integer >= 0, or -1"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias key", -1, "be an integer >= 0"),
        ({"logit_bias": {1: NAN}}, "logit_bias[1]", NAN, "be a finite number"),
        ({"logit_bias": {1: 1e39}}, "logit_bias[1]", 1e39, "be a finite number"),
        ({"bad_words": [""]}, "bad_words[0]", "", "not be empty"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids[0]", [], "not be empty"),
        ({"bad_words_token_ids": [[-1]]}, "bad_words_token_ids[0][0]", -1, "be an integer >= 0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", 0, "be an integer >= 1, or -1"),
    ],
)
def test_wrong_values(given: dict[str, Any], name: str, value: Any, allowed: str) -> None:
    assert_refused(given, ValueError, f"{name} must {allowed}", f"got {value!r}")


def test_arguments_may_be_given_by_position() -> None:
    assert SamplingParams(2, 0.5, min_p=0.25) == SamplingParams(n=2, presence_penalty=0.5, min_p=0.25)
    with pytest.raises(TypeError, match="multiple values for argument 'n'"):
        SamplingParams(2, n=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="too many positional arguments"):
        SamplingParams(*range(40))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n must be"):
        SamplingParams(0)
    assert SamplingParams(2, use_beam_search=False) == SamplingParams(n=2)  # type: ignore[call-arg]


def test_parameters_of_python_alone() -> None:
    """All other parameters are command-line options too; there `--seed` is the engine's."""
    flags = {each.name: each.flag for each in declarations(SamplingParams) if each.flag != ""}
    assert flags == {"stop_token_ids": "--stop-token-id"} | dict.fromkeys(
        (
            *("seed", "prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "truncate_prompt_tokens"),
        )
    )


def test_the_signature_is_that_of_its_fields() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(SamplingParams)]
    assert parameters["max_tokens"].default == 16


def test_a_later_assignment_may_make_room_for_another() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    params.temperature = 0.5
    params.n = 3
    params.max_tokens = None
    params.min_tokens = 9
    assert params == SamplingParams(n=3, temperature=0.5, max_tokens=None, min_tokens=9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids[1] must be within the vocabulary, 0 to 9, got 10"),
        (
            {"allowed_token_ids": [9, 12, 10]},
            "allowed_token_ids[1] must be within the vocabulary, 0 to 9, got 12",
        ),
        ({"logit_bias": {10: 1}}, "logit_bias key must be within the vocabulary, 0 to 9, got 10"),
        (
            {"bad_words_token_ids": [[1], [2, 12]]},
            "bad_words_token_ids[1] must be within the vocabulary, 0 to 9, got 12",
        ),
        ({"logprobs": 11}, "logprobs must be <= 10 (the vocabulary size), got 11"),
        ({"prompt_logprobs": 11}, "prompt_logprobs must be <= 10 (the vocabulary size), got 11"),
        (
            {"min_tokens": 20, "max_tokens": None},
            "min_tokens must be <= 19 (the context length less one prompt token), got 20",
        ),
        ({"truncate_prompt_tokens": 21}, "truncate_prompt_tokens must be <= 20 (the context length), got 21"),
    ],
)
def test_what_a_model_cannot_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        validate_for_model(SamplingParams(**given), vocab_size=10, max_model_len=20)
    assert str(error.value) == message


def test_what_a_model_can_do() -> None:
    params = SamplingParams(
        stop_token_ids=[9],
        allowed_token_ids=[0, 9],
        logit_bias={9: 1},
        bad_words_token_ids=((9, 0),),
        logprobs=10,
        prompt_logprobs=-1,
        min_tokens=19,
        max_tokens=100,
        truncate_prompt_tokens=20,
        top_k=50,
    )
    validate_for_model(params, vocab_size=10, max_model_len=20)
