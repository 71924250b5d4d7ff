"""/v1/messages and /v1/messages/count_tokens in the shapes of Anthropic's API: endpoints and stream events."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.chat_completions import finish_reason
from compiled_engine.server.chat_messages import messages_for_template, tools_for_template
from compiled_engine.server.chat_prompt import ChatPrompt, chat_prompt, tool_use, with_images
from compiled_engine.server.errors import UNEXPECTED, ApiError
from compiled_engine.server.generation import Outputs, begun, generate
from compiled_engine.server.message_blocks import (
    MESSAGES_HABITS,
    MESSAGES_REFUSED,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    as_chat,
)
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.protocol import ChatRequest, UsageCounter
from compiled_engine.server.replies import EventStream, Reply, event, json_response, read_body, unless_gone, warned
from compiled_engine.server.serving import Serving, serving_of

log = logging.getLogger("compiled_engine")

FORM_FIELD = "output_config.format"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request.

    `cache_read_input_tokens` are prompt tokens from the prefix cache; `input_tokens` are the other prompt tokens.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer, complete or as far as it has been generated. `stop_sequence` is the stop string that ended it."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class InputTokens(msgspec.Struct):
    """The number of tokens of a conversation as rendered for the model."""

    input_tokens: int


async def messages(request: Request) -> Reply:
    """Handle POST /v1/messages."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, MessagesRequest, MESSAGES_REFUSED, MESSAGES_HABITS)
    model = serving.model(fields.model)
    chat = _chat(serving, fields, ignored)
    prompt = await unless_gone(request.receive, chat_prompt(serving, chat, FORM_FIELD))
    # Always as deltas: a complete answer is assembled from the events of a stream.
    salt = cache_salt(request, fields)
    outputs = generate(serving, [prompt.prompt], prompt.params, "delta", fields.priority or 0, "messages", salt, model)
    events = MessageEvents(model, fields.stop_sequences or [], prompt.make_call_id)
    if fields.streams:
        return EventStream(_stream(_events(events, prompt, await begun(outputs))), warned(ignored))
    return json_response(await unless_gone(request.receive, _whole(events, prompt, outputs)), ignored)


async def count_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, CountTokensRequest, MESSAGES_REFUSED, MESSAGES_HABITS)
    serving.model(fields.model)
    tokens = await unless_gone(request.receive, _count(serving, _chat(serving, fields, ignored)))
    return json_response(InputTokens(tokens), ignored)


def _chat(serving: Serving, fields: CountTokensRequest, ignored: list[str]) -> ChatRequest:
    chat = as_chat(fields, serving.chat_format(), serving.options.limits, ignored)
    if not serving.options.strict:
        ignored += serving.chat_format().drop_unread(chat)
    return chat


async def _count(serving: Serving, fields: ChatRequest) -> int:
    chat, limits = serving.chat_format(), serving.options.limits
    use = tool_use(fields.tool_choice, fields.tools, one_call=fields.parallel_tool_calls is False)
    rendered = await chat.render(
        messages_for_template(fields.messages, chat, limits),
        tools_for_template(None if use is None else fields.tools, chat, limits),
        chat.settings(fields.chat_template_kwargs, fields.reasoning_effort),
        add_generation_prompt=not fields.continue_final_message,
        continue_final_message=bool(fields.continue_final_message),
    )
    return len((await with_images(serving, rendered))["prompt_token_ids"])


async def _events(events: MessageEvents, prompt: ChatPrompt, outputs: Outputs) -> AsyncGenerator[Event, None]:
    usage = UsageCounter()
    parser = prompt.make_parser()
    has_begun = False
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            if not has_begun:  # the number of cached tokens is known now
                has_begun = True
                yield events.begin(_usage(usage, before=True))
            for completion in output.outputs:
                pieces = parser.push(completion.text)
                if completion.finish_reason is not None:
                    pieces += parser.finish()
                for piece in joined(pieces):
                    for each in events.piece(piece):
                        yield each
                if completion.finish_reason is not None:
                    for each in events.end(completion, _usage(usage)):
                        yield each


def _usage(counter: UsageCounter, *, before: bool = False) -> MessageUsage:
    """Return the token counts so far; with `before`, without the answer's tokens."""
    counted = counter.usage()
    cached = counted.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=counted.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=0 if before else counted.completion_tokens,
    )


async def _whole(events: MessageEvents, prompt: ChatPrompt, outputs: Outputs) -> Message:
    async with aclosing(_events(events, prompt, outputs)) as all_events:
        async for _ in all_events:
            pass
    return events.message


async def _stream(all_events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events as encoded bytes. If the answer fails, the last event is the error."""
    async with aclosing(all_events):
        try:
            async for each in all_events:
                yield event(each, each["type"])
        except ApiError as error:
            yield event(error.message_response(), "error")
        except Exception:
            log.exception("a stream failed")
            yield event(ApiError(500, UNEXPECTED).message_response(), "error")


Event = dict[str, Any]


class MessageEvents:
    """Converts the pieces of an answer to stream events, and assembles the pieces into `message`.

    One content block is open at a time. A piece of another kind or a new call closes it and opens the next.
    """

    def __init__(self, model: str, stop_sequences: list[str], make_call_id: Callable[[], str]) -> None:
        nothing = MessageUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
        self.message = Message(id=f"msg_{uuid.uuid4().hex}", model=model, content=[], usage=nothing)
        self._stop_sequences = stop_sequences
        self._make_call_id = make_call_id
        self._open: TextBlock | ThinkingBlock | ToolUseBlock | None = None
        self._arguments: str | None = None  # arguments of the last tool call so far

    def begin(self, usage: MessageUsage) -> Event:
        self.message.usage = usage
        return {"type": "message_start", "message": self.message}

    def piece(self, piece: Piece) -> Iterator[Event]:
        """Yield the stream events for a piece of the answer."""
        match piece:
            case Content(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._add(TextBlock(text=""))
                assert isinstance(self._open, TextBlock)
                self._open.text += text
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._add(ThinkingBlock(thinking=""))
                assert isinstance(self._open, ThinkingBlock)
                self._open.thinking += text
                yield self._delta("thinking_delta", thinking=text)
            case CallStart(_, name, call_id):
                yield from self._add(ToolUseBlock(id=call_id or self._make_call_id(), name=name, input={}))
                self._arguments = ""
            case CallArguments(_, text):
                self._arguments = (self._arguments or "") + text
                yield self._delta("input_json_delta", partial_json=text)

    def end(self, completion: CompletionOutput, usage: MessageUsage) -> Iterator[Event]:
        """Yield the events that end the message."""
        yield from self._close()
        message, stop = self.message, completion.stop_reason
        message.usage = usage
        message.stop_reason = STOP_REASONS[finish_reason(completion, self._arguments) or "stop"]  # type: ignore[assignment]
        if message.stop_reason == "end_turn" and stop in self._stop_sequences:
            message.stop_reason, message.stop_sequence = "stop_sequence", str(stop)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _add(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.message.content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        block, self._open = self._open, None
        if block is None:
            return
        if isinstance(block, ThinkingBlock):
            block.signature = self.message.id
            yield self._delta("signature_delta", signature=block.signature)
        elif isinstance(block, ToolUseBlock):
            block.input = _input(self._arguments or "")
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _delta(self, kind: str, **values: Any) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **values}}


def _input(arguments: str) -> Any:
    """Return a call's arguments, parsed from JSON; {} if the answer was cut off within them."""
    try:
        return msgspec.json.decode(arguments) or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
