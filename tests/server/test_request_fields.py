"""Fields of requests on every endpoint that has them: each one reaches the engine, or the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from running_server import MODEL, RunningServer, ScriptedEngine, error_of, running

from compiled_engine.features.pooling.frontend.task import PoolingParams
from compiled_engine.server.app import POST
from compiled_engine.server.chat_messages import ChatMessage
from compiled_engine.server.options import Limits
from compiled_engine.server.protocol import ResponseObject, ResponsesRequest
from compiled_engine.server.sampling_fields import DECLARED

DUMP = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{# reasoning_effort, tools #}"
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
POOLING: dict[str, dict[str, Any]] = {
    **{path: {"input": "x"} for path in ("/v1/embeddings", "/pooling", "/classify")},
    "/score": {"queries": "x", "documents": ["y"]},
    "/rerank": {"query": "x", "documents": ["y"]},
}
SCORING = ["/score", "/rerank"]
# A value of each sampling parameter that is none of its defaults.
SAMPLING: dict[str, Any] = {
    **{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "min_tokens": 2},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "prompt_logprobs": 1},
    **{"stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True, "detokenize": True, "bad_words": ["c"]},
    **{"skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True},
    **{"allowed_token_ids": [4, 5, 6], "truncate_prompt_tokens": 9, "bad_words_token_ids": [[7, 8]]},
    **{"disable_spec_decode": True, "extra_args": {"a": 1}, "structured_outputs": None},
}


class RecordingEngine(ScriptedEngine):
    """`given`: the arguments of each call, besides prompts and parameters; what pools fails after that."""

    given: list[dict[str, Any]]

    async def generate(self, prompt: Any, params: Any, **others: Any) -> Any:
        self.given.append(others)
        async for output in super().generate(prompt, params, **others):
            yield output

    async def encode(self, prompts: Any, params: PoolingParams, **others: Any) -> Any:
        self.given.append(others | {"prompts": prompts, "params": params})
        raise ValueError("seen")

    async def score(self, queries: Any, documents: Any, params: PoolingParams, **others: Any) -> Any:
        self.given.append(others | {"prompts": [*queries, *documents], "params": params})
        raise ValueError("seen")


@contextmanager
def recording_server(server: RunningServer, *, has_priorities: bool = True, **options: Any) -> Iterator[RunningServer]:
    engine = RecordingEngine(server.engine, ["a"])
    engine.given = []
    engine.limits = replace(server.engine.limits, has_priorities=has_priorities)
    with running(engine, **options) as own:
        yield own


@pytest.fixture(scope="module")
def recording(server: RunningServer) -> Iterator[RunningServer]:
    with recording_server(server, chat_template=DUMP) as own:
        yield own


@pytest.fixture(scope="module")
def keyed(server: RunningServer) -> Iterator[RunningServer]:
    with recording_server(server, api_key=("one", "two"), prefix_cache_salt_per_key=True) as own:
        yield own


@pytest.fixture(scope="module")
def few(server: RunningServer) -> Iterator[RunningServer]:
    with recording_server(server, has_priorities=False, limits=Limits(max_in_flight=4)) as own:
        yield own


def post(server: RunningServer, path: str, body: dict[str, Any], key: str = "one") -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)


def salt_of(server: RunningServer, path: str) -> str | None:
    """The salt that the last call was given: as an argument, or with each prompt."""
    if path in GENERATING:
        prompt = server.engine.asked[-1][0]
    elif path in SCORING:
        return server.engine.given[-1]["cache_salt"]
    else:
        (prompt,) = server.engine.given[-1]["prompts"]
    return prompt.get("cache_salt") if isinstance(prompt, dict) else None


def test_paths_with_one_meaning_have_one_handler() -> None:
    assert POST["/v1/score"] is POST["/score"]
    assert POST["/v1/rerank"] is POST["/v2/rerank"] is POST["/rerank"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_every_sampling_parameter_is_the_engines(recording: RunningServer, path: str, stream: bool) -> None:
    """Except those that the endpoint or a stream cannot have."""
    assert SAMPLING.keys() == DECLARED.keys() - {"max_tokens", "logit_bias"}
    longest = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    left_out = {"n": path == "/v1/responses", "prompt_logprobs": stream or path == "/v1/responses"}
    asked = {name: value for name, value in SAMPLING.items() if not left_out.get(name)}
    body = {**GENERATING[path], **asked, longest: 6, "logit_bias": {"9": 1.5}, "stream": stream}
    response = post(recording, path, body)
    assert response.status_code == 200, response.text
    params = recording.engine.asked[-1][1]
    found = {name: getattr(params, name) for name in asked}
    found["bad_words_token_ids"] = [list(word) for word in params.bad_words_token_ids]
    assert found == asked
    assert (params.max_tokens, params.logit_bias) == (6, {9: 1.5})


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
def test_every_endpoint_has_priorities(recording: RunningServer, path: str) -> None:
    for priority in (None, 0, -7):
        post(recording, path, {**(GENERATING | POOLING)[path], "priority": priority})
        assert recording.engine.given[-1]["priority"] == (priority or 0)


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
def test_a_priority_without_effect_is_named(few: RunningServer, path: str) -> None:
    response = post(few, path, {**(GENERATING | POOLING)[path], "priority": 3})
    if path in GENERATING:
        assert response.headers["x-compiled-engine-warning"].startswith("priority has no effect unless")
    assert few.engine.given[-1]["priority"] == 0


@pytest.mark.product(one_in=1000, each=("path",))
@pytest.mark.parametrize("priority", [1 << 63, -(1 << 63) - 1, 1 << 64, 1.5, "1", True])
@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
def test_a_priority_is_an_integer_of_64_bits_even_without_effect(
    few: RunningServer, path: str, priority: object
) -> None:
    response = post(few, path, {**(GENERATING | POOLING)[path], "priority": priority})
    assert (response.status_code, "priority" in error_of(response)["message"]) == (400, True)


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
def test_every_endpoint_has_salts(recording: RunningServer, keyed: RunningServer, path: str) -> None:
    """With one for each key, salts of two keys are never equal, with or without those of requests."""
    body = (GENERATING | POOLING)[path]
    found = []
    for salt in (None, "s"):
        post(recording, path, {**body, "cache_salt": salt})
        assert salt_of(recording, path) == salt
        for key in ("one", "two"):
            post(keyed, path, {**body, "cache_salt": salt}, key)
            found.append(salt_of(keyed, path))
    assert None not in found
    assert len({*found, "s"}) == 5


# By endpoint: fields with which a request counts as five completions.
OF_FIVE: dict[str, dict[str, Any]] = {
    **{path: {"n": 5} for path in ("/v1/completions", "/v1/chat/completions")},
    **{path: {"input": ["x"] * 5} for path in ("/v1/embeddings", "/pooling", "/classify")},
    **{path: {"documents": ["y"] * 5} for path in SCORING},
}


@pytest.mark.parametrize("path", OF_FIVE)
def test_every_endpoint_counts_all_that_is_asked_of_it(few: RunningServer, path: str) -> None:
    """Four are taken at a time, and nothing is held after an answer."""
    body = (GENERATING | POOLING)[path]
    response = post(few, path, body | OF_FIVE[path])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_busy")
    assert response.headers["retry-after"] == "1"
    assert post(few, path, body).status_code == (200 if path in GENERATING else 400)
    assert few.serving.admission.in_flight == 0


def test_prompts_count_as_often_as_they_have_completions(few: RunningServer) -> None:
    found = [post(few, "/v1/completions", {"prompt": ["x", "y"], "n": n}).status_code for n in (1, 2, 3)]
    assert found == [200, 200, 503]


@pytest.mark.parametrize("path", POOLING)
def test_every_parameter_of_pooling_is_the_engines(recording: RunningServer, path: str) -> None:
    embeds = path in ("/v1/embeddings", "/pooling")
    asked: dict[str, Any] = {"use_activation": False, "truncate_prompt_tokens": 9}
    asked |= {"dimensions": 3, "normalize": False} if embeds else {}
    others: dict[str, Any] = {"instruction": "i"} if path in SCORING else {"prompt_name": "p"} if embeds else {}
    post(recording, path, {**POOLING[path], **asked, **others})
    given = recording.engine.given[-1]
    assert given["params"] == PoolingParams(**asked)
    assert {name: given[name] for name in others} == others


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def rendered(server: RunningServer) -> list[dict[str, Any]]:
    """The messages of the last prompt. Some templates have reasoning as `thinking`, and the same must be there."""
    messages = [json.loads(line) for line in server.engine.asked[-1][0]["prompt"].splitlines()]
    for message in messages:
        assert message.pop("thinking", None) == message.get("reasoning_content")
    return messages


def test_the_template_has_every_field_of_a_message(recording: RunningServer) -> None:
    """Arguments as an object, and reasoning under one name."""
    said: dict[str, Any] = {"role": "assistant", "content": "b", "name": "me"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "name": "you"},
        {**said, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    given = json.loads(json.dumps(messages))
    given[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    given += [{**said, "reasoning": "r"}]
    assert {*ChatMessage.__struct_fields__} == {key for message in given for key in message}
    assert post(recording, "/v1/chat/completions", {"messages": given}).status_code == 200
    assert rendered(recording) == [*messages, {**said, "reasoning_content": "r"}]


def test_the_template_has_every_item_of_a_response(recording: RunningServer) -> None:
    """Reasoning belongs to the message or the call that follows it, and to no later one."""

    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *(reasoning("r"), said, call, {**call, "call_id": "call_2"}),
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        *(reasoning("s"), call, {"role": "user", "content": "c"}, said),
        *(reasoning("of nobody"), {"role": "user", "content": "d"}, said),
    ]
    assert post(recording, "/v1/responses", {"input": given, "instructions": "Calculate."}).status_code == 200
    answer = {"role": "assistant", "content": "b"}
    assert rendered(recording) == [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "a"},
        {**answer, "reasoning_content": "r", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "reasoning_content": "s", "tool_calls": [CALL]},
        *({"role": "user", "content": "c"}, answer, {"role": "user", "content": "d"}, answer),
    ]


def test_a_response_repeats_what_was_asked(recording: RunningServer) -> None:
    """In each field that it shares with its request; what was not asked for is as it holds."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    asked: dict[str, Any] = {
        **{"instructions": "Calculate.", "max_output_tokens": 7, "parallel_tool_calls": False, "temperature": 0.5},
        **{"text": {"format": {"type": "json_object"}}, "tools": [tool], "tool_choice": "none", "top_p": 0.25},
        "reasoning": {"effort": "low", "summary": None},
    }
    answer = post(recording, "/v1/responses", {"input": "x", **asked}).json()
    shared = {*ResponsesRequest.__struct_fields__} & {*ResponseObject.__struct_fields__}
    assert shared == {*asked, "model"}
    assert {name: answer[name] for name in asked} == asked
    plain = post(recording, "/v1/responses", {"input": "x"}).json()
    assert {name: plain[name] for name in shared - {"temperature", "top_p"}} == {
        **{"instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "model": MODEL},
        **{"text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto"},
        "reasoning": {"effort": None, "summary": None},
    }
