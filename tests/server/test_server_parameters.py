"""Whatever is asked of a completion, the server answers it or says what is wrong; it never fails."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer, ScriptedEngine, error_of, running

from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.server.errors import ApiError
from compiled_engine.server.logprob_shapes import LOWEST, chat_logprobs, completion_logprobs
from compiled_engine.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from compiled_engine.server.request_fields import read_request

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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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


@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("truncation_side", "right", "left"),
        ("vllm_xargs", {"a": 1}, {}),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: Any, nothing: Any, server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    response = httpx.post(f"{server.url}/v1/completions", json={**body, name: value}, timeout=30)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert httpx.post(f"{server.url}/v1/completions", json={**body, name: nothing}, timeout=30).status_code == 200


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_the_likeliest_of_tokens_with_one_text_is_shown(order: tuple[int, ...]) -> None:
    """Whichever comes first, and where all are impossible."""
    entries = [(7, Logprob(-3.0, 3, "a")), (8, Logprob(-1.0, 1, "a")), (9, Logprob(-2.0, 2, "b"))]
    impossible = {7: Logprob(-math.inf, 1, "a"), 8: Logprob(-math.inf, 2, "a")}
    shaped, _ = completion_logprobs([dict(entries[place] for place in order), impossible], [7, 7])
    assert shaped.top_logprobs == [{"a": -1.0, "b": -2.0}, {"a": LOWEST}]
    assert shaped.token_logprobs == [-3.0, LOWEST]


def test_tokens_as_ids_tell_tokens_with_one_text_apart() -> None:
    """The places in the text, and the bytes, stay those of the text."""
    entry = {7: Logprob(-3.0, 3, "ab"), 8: Logprob(-1.0, 1, "ab"), 9: Logprob(-2.0, 2, "b")}
    shaped, end = completion_logprobs([entry, entry], [7, 7], 10, as_ids=True)
    assert shaped.tokens == ["token_id:7", "token_id:7"]
    assert (shaped.text_offset, end) == ([10, 12], 14)
    assert shaped.top_logprobs[0] == {"token_id:7": -3.0, "token_id:8": -1.0, "token_id:9": -2.0}
    (token,) = chat_logprobs([entry], -1, as_ids=True).content
    assert (token.token, token.bytes) == ("token_id:7", list(b"ab"))
    assert [(each.token, each.bytes) for each in token.top_logprobs] == [
        ("token_id:8", list(b"ab")),
        ("token_id:9", list(b"b")),
        ("token_id:7", list(b"ab")),
    ]


@pytest.mark.parametrize(
    ("kind", "name", "prompt"),
    [
        (CompletionRequest, "logprobs", {"prompt": "x"}),
        (CompletionRequest, "prompt_logprobs", {"prompt": "x"}),
        (ChatRequest, "top_logprobs", {"messages": []}),
        (ResponsesRequest, "top_logprobs", {"input": "x"}),
    ],
)
def test_minus_one_asks_for_all_log_probabilities(kind: Any, name: str, prompt: dict[str, Any]) -> None:
    fields, ignored = read_request({**prompt, name: -1}, kind)
    assert (getattr(fields, name), ignored) == (-1, [])
    with pytest.raises(ApiError, match=name):
        read_request({**prompt, name: -2}, kind)


def test_entries_of_the_vocabulary(server: RunningServer) -> None:
    asked = {"prompt": "def a b", "return_token_strs": True}
    answer = httpx.post(f"{server.url}/tokenize", json=asked, timeout=30).json()
    hf = server.engine.tokenizer.hf
    assert answer["token_strs"] == hf.convert_ids_to_tokens(answer["tokens"])
    assert any(entry.startswith("\u0120") for entry in answer["token_strs"])


def test_the_configuration_of_the_tokenizer(server: RunningServer, bundled_model_path: Path) -> None:
    """On request only, without paths of whoever wrote it, and with the template that the server renders."""
    refused = httpx.get(f"{server.url}/tokenizer_info", timeout=60)
    assert refused.status_code == 404
    assert "--tokenizer-info" in error_of(refused)["message"]
    stated = json.loads((bundled_model_path / "tokenizer_config.json").read_text())
    for template in (None, "{{ messages }}"):
        own = ScriptedEngine(server.engine)
        with running(own, tokenizer_info=True, chat_template=template) as informing:
            found = httpx.get(f"{informing.url}/tokenizer_info", timeout=60).json()
        assert found["chat_template"] == (template or server.engine.tokenizer.chat_template)
        assert found.items() >= {name: value for name, value in stated.items() if name != "chat_template"}.items()
        assert found["eos_token"] == server.engine.tokenizer.special_tokens["eos_token"]
        assert isinstance(found["tokenizer_class"], str)


class Counted(list[dict[int, Logprob] | None]):
    """Counts how often it is gone through."""

    num_read = 0

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        self.num_read += 1
        return super().__iter__()


def test_log_probabilities_of_a_prompt_are_converted_once_for_all_its_completions(server: RunningServer) -> None:
    """Once as they are, and once for the echo."""
    entry = {5: Logprob(-1.0, 1, "a")}
    of_prompt, scripted = Counted([None, entry]), ScriptedEngine(server.engine)
    completions = [CompletionOutput(index, "a", [5], None, [entry], "stop", None) for index in range(8)]
    scripted.outputs = [RequestOutput("0", "aa", [5, 5], of_prompt, completions, True, 0, RequestMetrics(0.0))]
    asked = {"prompt": [5, 5], "n": 8, "prompt_logprobs": 1, "logprobs": 1, "echo": True, "max_tokens": 1}
    with running(scripted) as asking:
        choices = httpx.post(f"{asking.url}/v1/completions", json=asked, timeout=30).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -1.0, -1.0]] * 8
    assert all(len(choice["prompt_logprobs"]) == 2 for choice in choices)
    assert of_prompt.num_read == 2
