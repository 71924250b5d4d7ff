"""Whatever is asked of a completion, the server answers it or says what is wrong; it never fails."""

from __future__ import annotations

import re
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer, error_of

JSON = {"content-type": "application/json"}


def test_numbers_of_more_than_64_bits(server: RunningServer) -> None:
    body = '{"prompt": "x", "max_tokens": 2, "top_k": %d, "temperature": 1.0, "extra_args": {"a": [%d, -1.7e308]}}'
    response = httpx.post(f"{server.url}/v1/completions", content=body % (2**70, 2**70), headers=JSON, timeout=30)
    assert response.status_code == 200, response.text


NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "min_tokens", "logprobs", "echo"),
    *("presence_penalty", "logit_bias", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "stream"),
    *("prompt_logprobs", "ignore_eos", "detokenize"),
)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3), st.lists(st.integers(-1, 5000), max_size=3), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.integers(0, 5000).map(str), st.integers(-5, 5), max_size=3),
)  # fmt: skip

forms = st.one_of(
    values,
    st.sampled_from(
        [
            {"json_object": True},
            {"choice": ["yes", "no"]},
            {"regex": "[a-z]{1,3}"},
            {"regex": "("},
            {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            {"json": {"type": "strng"}},
            {"grammar": 'start: "a" | start "b"'},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "a"]}}},
        ]
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=st.dictionaries(st.sampled_from(NAMES), values, max_size=6),
    formed=st.dictionaries(st.sampled_from(("structured_outputs", "response_format")), forms, max_size=2),
)
def test_no_combination_of_parameters_is_an_error_of_the_server(
    server: RunningServer, asked: dict[str, Any], formed: dict[str, Any]
) -> None:
    body = {"prompt": "x = 1", **{"max_tokens": 3}, **asked, **formed}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400 and error_of(response)["code"] != "no_token_allowed":
        assert re.split(r"[.\[]", error_of(response)["param"])[0] in body
