"""/v1/responses: conversion of its input to a chat, the endpoint, and the events of a response."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.chat_format import BUDGETS
from compiled_engine.server.chat_messages import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    InputImagePart,
    MessageToolCall,
    Part,
    Tool,
)
from compiled_engine.server.chat_prompt import ChatPrompt, chat_prompt
from compiled_engine.server.errors import UNEXPECTED, ApiError, bad_request, require, shown
from compiled_engine.server.generation import begun, generate
from compiled_engine.server.logprob_shapes import TextLogprobs, TokenLogprob
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.call_object import is_whole
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.protocol import (
    RESPONSES_HABITS,
    RESPONSES_REFUSED,
    ChatRequest,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    UsageCounter,
)
from compiled_engine.server.replies import EventStream, Reply, event, json_response, read_body, unless_gone, warned
from compiled_engine.server.request_fields import convert
from compiled_engine.server.sampling_fields import SAME, check_bounds
from compiled_engine.server.serving import Serving, serving_of

# Conversion of `input` and `tools` to a chat's messages and tools.

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
IMAGE_KEYS = ("type", "image_url", "detail")
ROLES = ("system", "developer", "user", "assistant")


def messages_of(given: Any, instructions: str | None) -> list[ChatMessage]:
    """Convert `given`, the request field `input`, to messages. `instructions` becomes a system message.

    A call becomes part of the assistant's message before it, or of a new one. Reasoning becomes part of the assistant's
    message or call that follows directly; if anything else follows, the reasoning is dropped. Raises ApiError 400 with
    the invalid item.
    """
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    is_list = isinstance(given, list) and len(given) > 0
    require(is_list, "input", "a string, or a list of items that is not empty", given)
    reasoning: str | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        require(isinstance(item, dict), where, "an object", item)
        kind = "message" if item.get("type") is None else item["type"]
        if kind == "message":
            messages.append(_message(where, item))
        elif kind == "function_call_output":
            output = _text(f"{where}.output", item.get("output"))
            messages.append(ChatMessage(role="tool", content=output, tool_call_id=_name(where, item, "call_id")))
        elif kind == "function_call":
            _assistant(messages).tool_calls.append(_call(where, item))  # type: ignore[union-attr]
        elif kind == "reasoning":
            reasoning = _text(f"{where}.content", item.get("content") or item.get("summary") or "")
            continue
        else:
            raise _unsupported(where, kind)
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content = reasoning
        reasoning = None
    return messages


def tools_of(given: list[dict[str, Any]] | None, ignored: list[str]) -> list[Tool] | None:
    """Return the functions among the tools `given`, or None if there are none.

    A tool of another type is ignored with a warning in `ignored`, since the model need not call it.
    """
    tools: list[Tool] = []
    for index, tool in enumerate(given or ()):
        if tool.get("type") == "function":
            fields = {key: value for key, value in tool.items() if value is not None}
            tools.append(Tool(type="function", function=convert(fields, FunctionDefinition, f"tools[{index}].")))
        else:
            ignored.append(f"tools[{index}] of type {shown(tool.get('type'))} is ignored: only functions are supported")
    return tools or None


def _message(where: str, item: dict[str, Any]) -> ChatMessage:
    role = item.get("role")
    require(role in ROLES, f"{where}.role", f"one of {', '.join(ROLES)}", role)
    tool_calls: list[MessageToolCall] | None = [] if role == "assistant" else None
    content = _content(f"{where}.content", item.get("content"))
    return ChatMessage(role=role, content=content, tool_calls=tool_calls)  # type: ignore[arg-type]


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    """Return the last message if it is the assistant's. Otherwise append an empty one and return it."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content="", tool_calls=[]))
    return messages[-1]


def _call(where: str, item: dict[str, Any]) -> MessageToolCall:
    arguments = item.get("arguments")
    require(isinstance(arguments, str), f"{where}.arguments", "a JSON object as a string", arguments)
    function = FunctionCall(name=_name(where, item, "name"), arguments=str(arguments))
    return MessageToolCall(id=_name(where, item, "call_id"), type="function", function=function)


def _name(where: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    require(isinstance(value, str) and value != "", f"{where}.{key}", "a string", value)
    return str(value)


def _content(where: str, content: Any) -> str | list[Part]:
    """Return a message's content as text, or as a list of parts if it has images.

    Raises ApiError 400 for invalid content. `where` is the content's place in the request, for errors.
    """
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if "input_image" not in kinds:
        return _text(where, content)
    parts: list[Part] = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "input_image":
            if part.get("image_url") is None:
                raise bad_request(f"{where}[{index}]", f"{where}[{index}] must have an image_url: files are not kept")
            given = {key: value for key, value in part.items() if key in IMAGE_KEYS and value is not None}
            parts.append(convert(given, InputImagePart, f"{where}[{index}]."))
        else:
            parts.append(ContentPart(text=_text(where, [part])))
    return parts


def _text(where: str, content: Any) -> str:
    """Return the text of `content`: a string, or a list of parts, whose texts are joined with line breaks.

    Refusals are left out. Raises ApiError 400 for anything else. `where` is the content's place in the request.
    """
    if isinstance(content, str):
        return content
    require(isinstance(content, list), where, "a string or a list of parts", content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "refusal":
            continue
        if kind not in TEXT_PARTS:
            raise _unsupported(f"{where}[{index}]", kind)
        texts.append(_text(f"{where}[{index}].text", part.get("text")))
    return "\n".join(texts)


def _unsupported(where: str, kind: Any) -> ApiError:
    return bad_request(where, f"{where} of type {shown(kind)} is not supported", code="unsupported_parameter")


log = logging.getLogger("compiled_engine")

LOGPROBS = "message.output_text.logprobs"


async def responses(request: Request) -> Reply:
    """Handle POST /v1/responses."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, ResponsesRequest, RESPONSES_REFUSED, RESPONSES_HABITS)
    model = serving.model(fields.model)
    check_bounds(fields, serving.options.limits, serving.max_answer_tokens, None)  # errors must name this API's fields
    chat = as_chat(fields, ignored)
    if not serving.options.strict:
        ignored += serving.chat_format().drop_unread(chat)
    prompt = await unless_gone(request.receive, chat_prompt(serving, chat, "text.format"))
    events = ResponseEvents(_begun(serving, fields, model, prompt), prompt.make_call_id)
    # Always as deltas: reasoning tokens can only be counted while streaming.
    salt = cache_salt(request, fields)
    outputs = generate(serving, [prompt.prompt], prompt.params, "delta", fields.priority or 0, "input", salt, model)
    hidden = serving.chat_format().guard.is_special if prompt.params.skip_special_tokens else None
    logprobs = TextLogprobs(prompt.make_parser(), chat.top_logprobs or 0, hidden)
    if fields.streams:
        return EventStream(_stream(events, _events(events, prompt, logprobs, await begun(outputs))), warned(ignored))
    return json_response(await unless_gone(request.receive, _whole(events, prompt, logprobs, outputs)), ignored)


def as_chat(fields: ResponsesRequest, ignored: list[str]) -> ChatRequest:
    """Convert the request to a chat request. Add a warning to `ignored` for each part of it that has no effect.

    Raises ApiError 400 for unsupported values.
    """
    require((fields.n or 1) == 1, "n", "1", fields.n)
    text, reasoning = fields.text or {}, fields.reasoning or {}
    stated = text.get("format")
    require(isinstance(stated, dict | None), "text.format", "an object", stated)
    verbosity = text.get("verbosity")
    require(verbosity in (None, "medium"), "text.verbosity", "'medium'", verbosity)
    effort = reasoning.get("effort")
    require(isinstance(effort, str | None), "reasoning.effort", "a string", effort)
    choice = fields.tool_choice
    is_function = not isinstance(choice, dict) or choice.get("type") == "function"
    require(is_function, "tool_choice", "a function, or 'auto', 'none' or 'required'", choice)
    logprobs = LOGPROBS in (fields.include or ())
    ignored += [f"include {shown(each)} is ignored" for each in fields.include or () if each != LOGPROBS]
    return ChatRequest(
        **{name: getattr(fields, name) for name in SAME},
        logit_bias=fields.logit_bias,
        stream=fields.stream,
        messages=messages_of(fields.input, fields.instructions),
        max_completion_tokens=fields.max_output_tokens,
        logprobs=logprobs or None,
        top_logprobs=fields.top_logprobs if logprobs else None,
        tools=tools_of(fields.tools, ignored),
        tool_choice=choice,
        response_format=text.get("format"),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=effort,
        chat_template_kwargs=fields.chat_template_kwargs,
        **{name: getattr(fields, name) for name in BUDGETS},
    )


def _begun(serving: Serving, fields: ResponsesRequest, model: str, prompt: ChatPrompt) -> ResponseObject:
    return ResponseObject(
        id=new_id("resp"),
        created_at=serving.now(),
        status="in_progress",
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        model=model,
        output=[],
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        reasoning={"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        temperature=prompt.params.temperature,
        text={"format": (fields.text or {}).get("format") or {"type": "text"}},
        tool_choice=fields.tool_choice or "auto",
        tools=[tool for tool in fields.tools or () if tool.get("type") == "function"],
        top_p=prompt.params.top_p,
        metadata={},
    )


async def _events(
    events: ResponseEvents,
    prompt: ChatPrompt,
    text_logprobs: TextLogprobs,
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[Event, None]:
    usage, reasoning_tokens = UsageCounter(), 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = []  # for text that was not emitted yet
    parser = prompt.make_parser()
    for each in events.begin():
        yield each
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            for completion in output.outputs:
                pieces = parser.push(completion.text)
                if completion.finish_reason is not None:
                    finish_reason = completion.finish_reason
                    pieces += parser.finish()
                logprobs += text_logprobs.push(completion)
                for piece in joined(pieces):
                    if isinstance(piece, Reasoning):
                        reasoning_tokens = usage.usage().completion_tokens
                    for each in events.piece(piece, logprobs):
                        yield each
                    if isinstance(piece, Content):
                        logprobs = []
    counted = usage.usage()
    total = ResponseUsage(
        input_tokens=counted.prompt_tokens,
        input_tokens_details=InputTokensDetails(counted.prompt_tokens_details.cached_tokens),
        output_tokens=counted.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens),
        total_tokens=counted.total_tokens,
    )
    for each in events.end(total, finish_reason):
        yield each


async def _whole(
    events: ResponseEvents, prompt: ChatPrompt, text_logprobs: TextLogprobs, outputs: Any
) -> ResponseObject:
    async with aclosing(_events(events, prompt, text_logprobs, outputs)) as all_events:
        async for _ in all_events:
            pass
    return events.response


async def _stream(events: ResponseEvents, all_events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events as encoded bytes. If the answer fails, the last event is the error."""
    async with aclosing(all_events):
        try:
            async for each in all_events:
                yield event(each, each["type"])
        except ApiError as error:
            failed = events.fail(error.code or "server_error", error.response().error.message)
            yield event(failed, failed["type"])
        except Exception:
            log.exception("a stream failed")
            failed = events.fail("server_error", UNEXPECTED)
            yield event(failed, failed["type"])


Event = dict[str, Any]


class ResponseEvents:
    """Converts the pieces of an answer to stream events, and assembles the pieces into `response`.

    One output item is open at a time. A piece of another kind or a new call closes it and opens the next.
    """

    def __init__(self, response: ResponseObject, make_call_id: Callable[[], str]) -> None:
        self.response = response
        self._make_call_id = make_call_id
        self._number = 0
        self._open: Item | None = None

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def piece(self, piece: Piece, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        """Add a piece of the answer to the response, and yield its events. `logprobs` belong to the piece's text."""
        match piece:
            case Content(text):
                if not isinstance(self._open, MessageItem):
                    item = MessageItem(id=new_id("msg"), status="in_progress", content=[])
                    yield from self._add(item)
                    item.content.append(OutputText(text="", annotations=[], logprobs=[]))
                    yield self._part("response.content_part.added", part=item.content[0])
                yield from self._add_text(text, logprobs)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    reasoning = ReasoningItem(id=new_id("rs"), status="in_progress", content=[])
                    yield from self._add(reasoning)
                    reasoning.content.append(ReasoningText(text=""))
                assert isinstance(self._open, ReasoningItem)
                self._open.content[0].text += text
                yield self._part("response.reasoning_text.delta", delta=text)
            case CallStart(_, name, call_id):
                call_id = call_id or self._make_call_id()
                call = FunctionCallItem(id=new_id("fc"), status="in_progress", call_id=call_id, name=name, arguments="")
                yield from self._add(call)
            case CallArguments(_, text):
                assert isinstance(self._open, FunctionCallItem)
                self._open.arguments += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def end(self, usage: ResponseUsage, finish_reason: str | None) -> Iterator[Event]:
        """Complete the response with its usage and status, and yield the events that end it."""
        cut = finish_reason in ("length", "abort")  # a pause has ended it
        yield from self._close("incomplete" if cut else "completed")
        self.response.usage = usage
        self.response.status = "incomplete" if cut else "completed"
        if finish_reason == "length":  # no reason of the API's fits a pause
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        yield self._event(f"response.{self.response.status}", response=self.response)

    def fail(self, code: str, message: str) -> Event:
        """Mark the response as failed with this error, and return its final event."""
        self.response.status = "failed"
        self.response.error = ResponseError(code, message)
        return self._event("response.failed", response=self.response)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        assert isinstance(self._open, MessageItem)
        part, new = self._open.content[0], list(logprobs)
        part.text += text
        part.logprobs += new
        yield self._part("response.output_text.delta", delta=text, logprobs=new)

    def _add(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: Any) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        item.status = status
        if isinstance(item, MessageItem):
            part = item.content[0]
            yield self._part("response.output_text.done", text=part.text, logprobs=part.logprobs)
            yield self._part("response.content_part.done", part=part)
        elif isinstance(item, ReasoningItem):
            yield self._part("response.reasoning_text.done", text=item.content[0].text)
        else:
            if status == "completed" and not is_whole(item.arguments):  # a stop string may have cut it off
                item.status = "incomplete"
            yield self._of_item("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _of_item(self, kind: str, **values: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=self._index, **values)

    def _part(self, kind: str, **values: Any) -> Event:
        return self._of_item(kind, content_index=0, **values)


def new_id(kind: str) -> str:
    """Return a new unique id that begins with `kind`."""
    return f"{kind}_{uuid.uuid4().hex}"
