"""Parts of an answer join to the whole one, field by field, for outputs of the engine that are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_streams_join import joined, joined_choice

from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server import chat_completions, completions
from compiled_engine.server.chat_prompt import ChatPrompt
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.registry import TOOL_FORMATS, reasoning_parser
from compiled_engine.server.protocol import ChatRequest, CompletionRequest
from compiled_engine.server.request_fields import read_request

PROMPT = [11, 12, 13]


def entry(token_id: int, text: str) -> dict[int, Logprob]:
    return {token_id: Logprob(-0.5, 2, text), 99: Logprob(-0.25, 1, "best")}


class Script:
    """Completions of some prompts, as the engine gives them: whole, or in parts. Each token has one text."""

    def __init__(self, texts: list[list[list[str]]], ends: str = "stop", *, prompt_logprobs: bool = False) -> None:
        """texts: of each token, by prompt and completion."""
        self._texts = texts
        self._ends = ends
        self._prompt_logprobs = prompt_logprobs

    def _completion(self, index: int, tokens: list[str], first: int, last: bool) -> CompletionOutput:
        ids = [20 + first + place for place in range(len(tokens))]
        entries = [entry(token_id, text) for token_id, text in zip(ids, tokens, strict=True)]
        ended = (self._ends, 7 if self._ends == "stop" else None) if last else (None, None)
        return CompletionOutput(index, "".join(tokens), ids, None, entries, *ended)

    def _output(self, completions: list[CompletionOutput], first: bool, last: bool) -> RequestOutput:
        of_prompt: Any = [None, entry(12, "b"), entry(13, "c")] if self._prompt_logprobs and first else None
        return RequestOutput("0", "abc", PROMPT, of_prompt, completions, last, 2, RequestMetrics(0.0))

    async def whole(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The last prompt first."""
        for prompt, texts in reversed(list(enumerate(self._texts))):
            yield prompt, self._output([self._completion(i, each, 0, True) for i, each in enumerate(texts)], True, True)

    async def parts(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """A token at a time, of each completion in turn."""
        for place in range(max(len(tokens) for texts in self._texts for tokens in texts)):
            for prompt, texts in enumerate(self._texts):
                for index, tokens in enumerate(texts):
                    if place < len(tokens):
                        last = place == len(tokens) - 1
                        part = self._completion(index, tokens[place : place + 1], place, last)
                        yield prompt, self._output([part], place == 0 and index == 0, last)


def collected(events: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    async def run() -> list[bytes]:
        return [each async for each in events]

    found = asyncio.run(run())
    assert all(each.startswith(b"data: ") and each.endswith(b"\n\n") for each in found)
    return [json.loads(each.removeprefix(b"data: ")) for each in found]


def built(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(response))
    return found


TOKENIZER = SimpleNamespace(
    decode=lambda ids: {(): "", (11,): "a"}.get(tuple(ids), f"decoded {list(ids)}"),
    decode_token=lambda token_id: TOKENIZER.decode([token_id]),
    knows=lambda token_id: True,
    special_ids=frozenset(),
    byte_ids={},
)


def completion_answer(n: int = 1, tokenizer: Any = TOKENIZER, **given: Any) -> Any:
    fields, _ = read_request({"prompt": "abc", "return_token_ids": True, **given}, CompletionRequest)
    unwanted = fields.max_tokens == 0
    return completions.Answer("cmpl-1", 5, "small", fields, SamplingParams(n=n), unwanted, tokenizer)


TEXTS = [[["x", "yz"], ["u", "v", "w"]], [["p"], ["q", "r"]]]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_parts_of_completions_join_to_the_whole(logprobs: int | None, echo: bool, ends: str) -> None:
    """For several prompts and completions, in the order of their indices."""
    more = {"echo": echo, "logprobs": logprobs, "stream_options": {"include_usage": True}}
    script = Script(TEXTS, ends, prompt_logprobs=echo and logprobs is not None)
    whole = built(asyncio.run(completions.whole_answer(completion_answer(2, **more), script.whole())))
    *parts, last = collected(completions.answer_events(completion_answer(2, **more), script.parts()))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    begin = "abc" if echo else ""
    assert [choice["text"] for choice in whole["choices"]] == [begin + text for text in ("xyz", "uvw", "p", "qr")]
    for expected in whole["choices"]:
        own = [choice for part in parts for choice in part["choices"] if choice["index"] == expected["index"]]
        assert expected.pop("prompt_logprobs") is None
        assert joined_choice(own) == expected
        assert expected["stop_reason"] == (7 if ends == "stop" else None)
        assert (expected["finish_reason"], expected["prompt_token_ids"]) == (ends, PROMPT)
        shown = expected["logprobs"]
        if logprobs is not None:
            assert "".join(shown["tokens"]) == expected["text"]
            places = [0]
            for token in shown["tokens"]:
                places.append(places[-1] + len(token))
            assert shown["text_offset"] == places[:-1]
            assert shown["token_logprobs"] == [
                None if echo and place == 0 else -0.5 for place in range(len(places) - 1)
            ]
        else:
            assert shown is None
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert whole["usage"]["prompt_tokens"] == 2 * len(PROMPT)
    assert whole["usage"]["completion_tokens"] == 8
    assert {(part["id"], part["created"], part["model"], part.get("usage")) for part in parts} == {
        ("cmpl-1", 5, "small", None)
    }


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_as_ids_change_only_how_tokens_are_written(echo: bool) -> None:
    """In whole answers and in parts; the places are those of the text."""
    given: dict[str, Any] = {"echo": echo, "logprobs": 1}
    script = Script(TEXTS, prompt_logprobs=echo)
    plain = built(asyncio.run(completions.whole_answer(completion_answer(2, **given), script.whole())))
    given["return_tokens_as_token_ids"] = True
    whole = built(asyncio.run(completions.whole_answer(completion_answer(2, **given), script.whole())))
    parts = collected(completions.answer_events(completion_answer(2, **given), script.parts()))
    for expected, found in zip(plain["choices"], whole["choices"], strict=True):
        own = [choice for part in parts for choice in part["choices"] if choice["index"] == found["index"]]
        for shown in (found["logprobs"], joined_choice(own)["logprobs"]):
            ids = [*(PROMPT if echo else ()), *found["token_ids"]]
            assert shown["tokens"] == [f"token_id:{each}" for each in ids]
            tops = [None if echo and i == 0 else {f"token_id:{ids[i]}", "token_id:99"} for i in range(len(ids))]
            assert [top and set(top) for top in shown["top_logprobs"]] == tops
            assert shown["text_offset"] == expected["logprobs"]["text_offset"]
            assert shown["token_logprobs"] == expected["logprobs"]["token_logprobs"]
        assert found["text"] == expected["text"]


def test_a_prompt_that_is_scored_has_no_completion() -> None:
    """The token that was generated for it is in no field and no count."""
    more = {"echo": True, "logprobs": 1, "max_tokens": 0, "stream_options": {"include_usage": True}}
    script = Script([[["x"]], [["y"]]], prompt_logprobs=True)
    whole = built(asyncio.run(completions.whole_answer(completion_answer(**more), script.whole())))
    *parts, last = collected(completions.answer_events(completion_answer(**more), script.parts()))
    for choice in (*whole["choices"], *(choice for part in parts for choice in part["choices"])):
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert whole["usage"] == last["usage"]
    assert whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("scored", [0, 2])
def test_an_aborted_prompt_is_echoed_with_the_log_probabilities_that_it_has(scored: int) -> None:
    def given() -> Any:
        return completion_answer(echo=True, logprobs=1)

    async def outputs() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        whole = Script([[[]]], prompt_logprobs=True)._output([], True, True)
        completion = CompletionOutput(0, "", [], None, [], "abort", "the engine is paused")
        yield 0, replace(whole, prompt_logprobs=list(whole.prompt_logprobs or ())[:scored], outputs=[completion])

    (choice,) = built(asyncio.run(completions.whole_answer(given(), outputs())))["choices"]
    (part,) = collected(completions.answer_events(given(), outputs()))
    for each in (choice, *part["choices"]):
        assert (each["text"], each["finish_reason"]) == ("abc", "abort")
        assert each["logprobs"]["tokens"] == ["a", "b"][:scored]


def test_fields_that_were_not_requested() -> None:
    """Null in whole answers, absent in events; texts that were cut are what the engine took of them."""
    script = Script([[["x", ""]]], "length")
    plain = completion_answer(return_token_ids=None)
    (choice,) = built(asyncio.run(completions.whole_answer(plain, script.whole())))["choices"]
    assert {name: choice[name] for name in ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids")} == {
        **{"logprobs": None, "prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
    }
    parts = collected(completions.answer_events(completion_answer(return_token_ids=None), script.parts()))
    assert len(parts) == 2  # no usage, as none was asked for
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & {
        key for part in parts for key in part["choices"][0]
    }
    scored = completion_answer(prompt_logprobs=1)
    (choice,) = built(asyncio.run(completions.whole_answer(scored, Script([[["x"]]], prompt_logprobs=True).whole())))[
        "choices"
    ]
    assert [None if each is None else list(each) for each in choice["prompt_logprobs"]] == [
        None,
        ["12", "99"],
        ["13", "99"],
    ]
    assert choice["logprobs"] is None
    cut = completion_answer(echo=True, truncate_prompt_tokens=3)
    assert (
        built(asyncio.run(completions.whole_answer(cut, script.whole())))["choices"][0]["text"] == f"decoded {PROMPT}x"
    )
    blind = completion_answer(tokenizer=None, echo=True, truncate_prompt_tokens=3)
    assert built(asyncio.run(completions.whole_answer(blind, script.whole())))["choices"][0]["text"] == "abcx"


def test_usage_so_far_comes_with_every_event_if_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = collected(
        completions.answer_events(completion_answer(stream_options=options), Script([[["x", "y"]]]).parts())
    )
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 2]
    unasked = completion_answer(stream_options={"include_usage": False, "continuous_usage_stats": True})
    parts = collected(completions.answer_events(unasked, Script([[["x", "y"]]]).parts()))
    assert [part.get("usage") for part in parts] == [None] * len(parts)
    answer = chat_answer(stream_options=options)
    parts = collected(chat_completions.answer_events(answer, Script([[["x", "y"]]]).parts()))
    assert [part["usage"]["completion_tokens"] for part in parts] == [0, 1, 2, 2, 2]
    assert {part["usage"]["prompt_tokens"] for part in parts} == {3}


CALL = ["<tool_call>", '{"name": "add", ', '"arguments": {"a"', ": 1}}", "</tool_call>"]
THOUGHT = ["<think>", "hm", "</think>"]


def chat_answer(n: int = 1, **given: Any) -> Any:
    fields, _ = read_request({"messages": [], "return_token_ids": True, **given}, ChatRequest)
    numbers = count()

    def parser() -> AnswerParser:
        return AnswerParser(reasoning_parser("qwen3", ""), TOOL_FORMATS["hermes"].parser({"add": {}}))

    prompt: dict[str, Any] = {"prompt": "abc", "prompt_token_ids": tuple(PROMPT)}
    made = ChatPrompt(prompt, SamplingParams(n=n), parser, lambda: f"call_{next(numbers)}")
    return chat_completions.Answer("chatcmpl-1", 5, "small", fields, made)


def message_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a choice make."""
    deltas = [choice["delta"] for choice in choices]
    found: dict[str, Any] = {
        name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning", "reasoning_content")
    }
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                function = {"name": part["function"]["name"], "arguments": ""}
                calls[part["index"]] = {"id": part["id"], "type": part["type"], "function": function}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    found |= {name: found[name] or None for name in ("reasoning", "reasoning_content")}
    found["content"] = None if calls and not found["content"] else found["content"]
    return {"role": "assistant", **found, **({"tool_calls": list(calls.values())} if calls else {})}


@pytest.mark.parametrize("hides_reasoning", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_parts_of_a_chat_join_to_the_whole(ends: str, logprobs: bool, hides_reasoning: bool) -> None:
    """Text, reasoning and calls; of several completions at once."""
    texts = [["x", "y"], [*THOUGHT, "z"], [*THOUGHT, *CALL], ["a ", *CALL, *CALL]]
    given: dict[str, Any] = {"logprobs": logprobs, "top_logprobs": 1 if logprobs else None}
    given |= {"include_reasoning": not hides_reasoning, "stream_options": {"include_usage": True}}
    whole = built(asyncio.run(chat_completions.whole_answer(chat_answer(4, **given), Script([texts], ends).whole())))
    *parts, last = collected(chat_completions.answer_events(chat_answer(4, **given), Script([texts], ends).parts()))
    assert [choice["index"] for choice in whole["choices"]] == list(range(4))
    assert [part["choices"][0]["delta"] for part in parts[:4]] == [{"role": "assistant", "content": ""}] * 4
    for expected in whole["choices"]:
        own = [choice for part in parts for choice in part["choices"] if choice["index"] == expected["index"]]
        found = message_of(own)
        for call in (*found.get("tool_calls", ()), *expected["message"].get("tool_calls", ())):
            assert call.pop("id").startswith("call_")
        assert found == expected["message"]
        for name in ("finish_reason", "stop_reason", "token_ids"):
            assert joined([choice.get(name) for choice in own]) == expected[name]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        if logprobs:
            shown = [each for choice in own for each in (choice.get("logprobs") or {"content": []})["content"]]
            assert {"content": shown} == expected["logprobs"]
            assert [each["token"] for each in shown] == texts[expected["index"]]
            assert {len(each["top_logprobs"]) for each in shown} == {1}
        else:
            assert expected["logprobs"] is None
    messages = [choice["message"] for choice in whole["choices"]]
    assert [message["content"] for message in messages] == ["xy", "z", None, "a"]
    thought = None if hides_reasoning else "hm"
    assert [message["reasoning"] for message in messages] == [None, thought, thought, None]
    assert [message["reasoning_content"] for message in messages] == [None, thought, thought, None]
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    assert calls == [[], [], *([{"name": "add", "arguments": '{"a": 1}'}] * number for number in (1, 2))]
    reasons = ["stop", "stop", "tool_calls", "tool_calls"] if ends == "stop" else ["length"] * 4
    assert [choice["finish_reason"] for choice in whole["choices"]] == reasons
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == PROMPT
    assert {(part["id"], part["created"], part["model"], part.get("usage")) for part in parts} == {
        ("chatcmpl-1", 5, "small", None)
    }


def test_tokens_of_a_chat_as_ids() -> None:
    given = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    script = Script([[["x", "yz"]]])
    (choice,) = built(asyncio.run(chat_completions.whole_answer(chat_answer(**given), script.whole())))["choices"]
    parts = collected(chat_completions.answer_events(chat_answer(**given), script.parts()))
    streamed = joined([part["choices"][0].get("logprobs") for part in parts])
    for shown in (choice["logprobs"]["content"], streamed["content"]):
        assert [each["token"] for each in shown] == ["token_id:20", "token_id:21"]
        assert [each["bytes"] for each in shown] == [list(b"x"), list(b"yz")]
        assert [[top["token"] for top in each["top_logprobs"]] for each in shown] == [["token_id:99"]] * 2
    assert choice["message"]["content"] == "xyz"


def test_fields_of_a_chat_that_were_not_requested() -> None:
    plain = chat_answer(return_token_ids=None)
    whole = built(asyncio.run(chat_completions.whole_answer(plain, Script([[["x"]]]).whole())))
    assert (whole["prompt_token_ids"], whole["prompt_logprobs"], whole["choices"][0]["token_ids"]) == (None, None, None)
    scored = built(asyncio.run(chat_completions.whole_answer(plain, Script([[["x"]]], prompt_logprobs=True).whole())))
    assert len(scored["prompt_logprobs"]) == 3
    parts = collected(chat_completions.answer_events(chat_answer(return_token_ids=None), Script([[["x"]]]).parts()))
    assert len(parts) == 3  # the role, the text, and why it ended
    assert "prompt_token_ids" not in parts[0]
    assert all("token_ids" not in part["choices"][0] for part in parts)
