"""/v1/responses without a server: items as messages of a chat, and events that make up a response."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from compiled_engine.server.chat_messages import ChatMessage, ContentPart, InputImagePart
from compiled_engine.server.errors import ApiError
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from compiled_engine.server.request_fields import read_request
from compiled_engine.server.responses import ResponseEvents, as_chat, messages_of, tools_of

USAGE = ResponseUsage(
    input_tokens=1,
    input_tokens_details=InputTokensDetails(0),
    output_tokens=2,
    output_tokens_details=OutputTokensDetails(1),
    total_tokens=3,
)


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "add", "arguments": "{}", **more}


def said(text: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": text}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages without what they do not have."""
    return [
        {key: value for key, value in msgspec.to_builtins(message).items() if value not in (None, [])}
        for message in messages
    ]


def test_a_text_is_a_users_message_behind_the_instructions() -> None:
    assert plain(messages_of("x", None)) == [said("x", "user")]
    assert plain(messages_of("x", "i")) == [said("i", "system"), said("x", "user")]


def test_images_keep_their_place_among_texts() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aaaa", "detail": "low"}
    (message,) = messages_of([said([text_part("a"), image, text_part("b")], "user")], None)

    assert message.content == [
        ContentPart(text="a"),
        InputImagePart(image_url=image["image_url"], detail="low"),
        ContentPart(text="b"),
    ]
    with pytest.raises(ApiError, match=r"input\[0\]\.content\[0\] must have an image_url: files are not kept"):
        messages_of([said([{"type": "input_image", "file_id": "f"}], "user")], None)
    with pytest.raises(ApiError, match=r"input\[0\]\.content\[0\]\.detail: "):
        messages_of([said([image | {"detail": 5}], "user")], None)


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text", "reasoning_text", "summary_text"])
def test_texts_of_parts_are_lines(kind: str) -> None:
    """Refusals are left out."""
    parts = [{"type": kind, "text": "a"}, {"type": "refusal", "refusal": "no"}, {"type": kind, "text": "b"}]
    for role in ("system", "developer", "user", "assistant"):
        assert plain(messages_of([said(parts, role)], None)) == [said("a\nb", role)]


def test_calls_belong_to_the_assistants_message_before_them() -> None:
    """A new one where another has spoken since, or nobody has."""
    items = [call(0), said("a"), call(1), call(2), said("u", "user"), call(3)]
    items += [{"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "7"}]}]
    found = plain(messages_of(items, None))
    calls = [[each["id"] for each in message.get("tool_calls", ())] for message in found]
    assert [message["role"] for message in found] == ["assistant", "assistant", "user", "assistant", "tool"]
    assert calls == [["c0"], ["c1", "c2"], [], ["c3"], []]
    assert found[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert (found[4]["content"], found[4]["tool_call_id"]) == ("7", "c3")


@pytest.mark.parametrize("name", ["content", "summary"])
def test_reasoning_belongs_to_what_follows_it(name: str) -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", name: [{"type": "summary_text", "text": text}]}

    items = [thought("a"), said("x"), said("y"), thought("b"), said("u", "user"), said("z"), thought("c"), call(1)]
    found = messages_of(items, None)
    assert [message.reasoning_content for message in found] == ["a", None, None, "c"]
    assert [message.content for message in found] == ["x", "y", "u", "z"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (5, "input"),
        ([], "input"),
        (["x"], "input[0]"),
        ([said("x"), {"type": "item_reference"}], "input[1]"),
        ([said("x", "tool")], "input[0].role"),
        ([said(5)], "input[0].content"),
        ([said([{"type": "input_image"}])], "input[0].content[0]"),
        ([said(["x"])], "input[0].content[0]"),
        ([said([{"type": "text"}])], "input[0].content[0].text"),
        ([call(1, name="")], "input[0].name"),
        ([call(1, call_id=None)], "input[0].call_id"),
        ([call(1, arguments={})], "input[0].arguments"),
        ([{"type": "function_call_output", "output": "3"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "a"}], "input[0].output"),
    ],
)
def test_items_that_are_wrong_are_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages_of(given, None)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_functions_are_tools_and_others_are_ignored() -> None:
    ignored: list[str] = []
    function = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
    (tool,) = tools_of([{"type": "web_search"}, {**function, "other": 1}], ignored) or ()
    own = tool.function
    assert (own.name, own.description, own.parameters, own.strict) == ("add", "d", {"type": "object"}, True)
    assert ignored == ["tools[0] of type 'web_search' is ignored: only functions are supported"]
    assert tools_of([{"type": "web_search"}], ignored) is None
    assert tools_of(None, ignored) is None
    bare = tools_of([{"type": "function", "name": "add", "strict": None}], ignored) or []
    assert (bare[0].function.name, bare[0].function.strict) == ("add", None)
    with pytest.raises(ApiError) as caught:
        tools_of([function, {"type": "function", "name": ""}], ignored)
    assert caught.value.param == "tools[1].name"


def chat_of(**given: Any) -> tuple[Any, list[str]]:
    fields, ignored = read_request({"input": "x", **given}, ResponsesRequest)
    return as_chat(fields, ignored), ignored


def test_a_response_is_a_chat_in_other_words() -> None:
    chat, ignored = chat_of(
        max_output_tokens=7,
        text={"format": {"type": "json_object"}, "verbosity": "medium"},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs", "file_search_call.results"],
        top_logprobs=3,
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        chat_template_kwargs={"a": 1},
        temperature=0.5,
        logit_bias={"5": 1.0},
        stream=True,
    )
    assert (chat.max_completion_tokens, chat.max_tokens, chat.response_format) == (7, None, {"type": "json_object"})
    assert (chat.reasoning_effort, chat.logprobs, chat.top_logprobs) == ("low", True, 3)
    assert chat.tool_choice == {"type": "function", "name": "add"}
    assert (chat.parallel_tool_calls, chat.chat_template_kwargs, chat.temperature) == (False, {"a": 1}, 0.5)
    assert (chat.logit_bias, chat.stream) == ({"5": 1.0}, True)
    assert ignored == ["include 'file_search_call.results' is ignored"]
    chat, _ = chat_of(top_logprobs=3)  # nobody asked to see them
    assert (chat.logprobs, chat.top_logprobs) == (None, None)
    chat, _ = chat_of(text={"format": None}, n=1)
    assert (chat.response_format, chat.reasoning_effort, chat.tools) == (None, None, None)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": 2}, "n"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_a_chat_does_not_have_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_of(**given)
    assert caught.value.param == param


def response() -> ResponseObject:
    return ResponseObject(
        id="resp_1", created_at=5, status="in_progress", instructions=None, max_output_tokens=None, model="m",
        output=[], parallel_tool_calls=True, reasoning={}, temperature=1.0, text={}, tool_choice="auto", tools=[],
        top_p=1.0,
    )  # fmt: skip


PIECES: list[Piece] = [
    *(Reasoning("th"), Reasoning("ink"), Content("an"), Content("swer")),
    *(CallStart(0, "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallStart(1, "mul"), Content("more")),
]


def events_of(finish_reason: str | None) -> tuple[ResponseObject, list[dict[str, Any]]]:
    """The events of these pieces, as JSON has them when they are sent."""
    numbers = count()
    events = ResponseEvents(response(), lambda: f"call_{next(numbers)}")
    found = [msgspec.to_builtins(each) for each in events.begin()]
    for piece in PIECES:
        logprobs: Any = [{"token": piece.text}] if isinstance(piece, Content) else []
        found += [msgspec.to_builtins(each) for each in events.piece(piece, logprobs)]
    found += [msgspec.to_builtins(each) for each in events.end(USAGE, finish_reason)]
    return events.response, found


def test_each_kind_of_piece_is_an_item_that_begins_grows_and_ends() -> None:
    whole, events = events_of("stop")
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    reasoning = ["response.output_item.added", *["response.reasoning_text.delta"] * 2, "response.reasoning_text.done"]
    message = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
    message_end = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    arguments = [*["response.function_call_arguments.delta"] * 2]
    done = ["response.function_call_arguments.done", "response.output_item.done"]
    assert [each["type"] for each in events] == [
        *("response.created", "response.in_progress"),
        *(*reasoning, "response.output_item.done"),
        *(*message, "response.output_text.delta", *message_end),
        *("response.output_item.added", *arguments, *done),
        *("response.output_item.added", *done),
        *(*message, *message_end, "response.completed"),
    ]
    thought, answer, add, mul, more = whole.output
    of_items = [each for each in events if "item_id" in each]
    places = {item.id: index for index, item in enumerate(whole.output)}
    assert len(places) == 5
    assert all(each["output_index"] == places[each["item_id"]] for each in of_items)
    assert all(each["content_index"] == 0 for each in of_items if "arguments" not in each["type"])
    assert [each["output_index"] for each in events if each["type"] == "response.output_item.added"] == list(range(5))
    assert [each["item"] for each in events if each["type"] == "response.output_item.done"] == [
        msgspec.to_builtins(item) for item in whole.output
    ]
    begun = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert [each["status"] for each in begun] == ["in_progress"] * 5
    assert [each.get("content", each.get("arguments")) for each in begun] == [[], [], "", "", []]
    assert [item.status for item in whole.output] == [*["completed"] * 3, "incomplete", "completed"]  # no arguments
    assert thought.content[0].text == "think"
    assert answer.content[0].text == "answer"
    assert answer.content[0].logprobs == [{"token": "an"}, {"token": "swer"}]
    assert (add.name, add.call_id, add.arguments) == ("add", "call_0", '{"a": 1}')
    assert (mul.name, mul.call_id, mul.arguments) == ("mul", "call_1", "")
    assert more.content[0].logprobs == [{"token": "more"}]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in events:
        by_kind.setdefault(each["type"], []).append(each)
    assert [each["delta"] for each in by_kind["response.output_text.delta"]] == ["an", "swer", "more"]
    assert [each["logprobs"] for each in by_kind["response.output_text.delta"]] == [
        [{"token": text}] for text in ("an", "swer", "more")
    ]
    assert [each["text"] for each in by_kind["response.output_text.done"]] == ["answer", "more"]
    assert [len(each["logprobs"]) for each in by_kind["response.output_text.done"]] == [2, 1]
    assert [each["text"] for each in by_kind["response.reasoning_text.done"]] == ["think"]
    assert [(each["name"], each["arguments"]) for each in by_kind["response.function_call_arguments.done"]] == [
        ("add", '{"a": 1}'),
        ("mul", ""),
    ]
    assert [each["part"]["text"] for each in by_kind["response.content_part.added"]] == ["", ""]
    assert [each["part"]["text"] for each in by_kind["response.content_part.done"]] == ["answer", "more"]
    last = events[-1]["response"]
    assert last == msgspec.to_builtins(whole)
    assert (last["status"], last["usage"], last["incomplete_details"]) == (
        "completed",
        msgspec.to_builtins(USAGE),
        None,
    )


def test_a_response_that_is_cut_is_incomplete_in_its_last_item() -> None:
    whole, events = events_of("length")
    assert (events[-1]["type"], whole.status) == ("response.incomplete", "incomplete")
    assert msgspec.to_builtins(whole.incomplete_details) == {"reason": "max_output_tokens"}
    assert [item.status for item in whole.output] == ["completed"] * 3 + ["incomplete"] * 2
    whole, _ = events_of("abort")  # by a pause
    assert (whole.status, whole.incomplete_details) == ("incomplete", None)


def test_a_response_without_text_has_no_item() -> None:
    events = ResponseEvents(response(), lambda: "c")
    assert [each["type"] for each in events.end(USAGE, "stop")] == ["response.completed"]
    assert events.response.output == []


def test_a_response_that_fails_says_why() -> None:
    events = ResponseEvents(response(), lambda: "c")
    list(events.begin())
    failed = events.fail("server_error", "the engine failed")
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 2)
    assert msgspec.to_builtins(failed["response"]) == msgspec.to_builtins(events.response)
    assert events.response.status == "failed"
    assert msgspec.to_builtins(events.response.error) == {"code": "server_error", "message": "the engine failed"}
