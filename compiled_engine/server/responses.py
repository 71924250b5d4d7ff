"""/v1/responses, without a memory: what it returns is not kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.chat_prompt import ChatPrompt, chat_prompt
from compiled_engine.server.chat_protocol import ChatRequest
from compiled_engine.server.errors import UNEXPECTED, ApiError, bad_request, shown
from compiled_engine.server.event_stream import EventStream, event, unless_gone
from compiled_engine.server.generation import begun, generate
from compiled_engine.server.logprob_shapes import TokenLogprob
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.pieces import Content, Reasoning
from compiled_engine.server.replies import Reply, json_response, read_body, warned
from compiled_engine.server.response_events import Event, ResponseEvents, new_id
from compiled_engine.server.responses_input import messages_of, tools_of
from compiled_engine.server.responses_protocol import (
    RESPONSES_HABITS,
    RESPONSES_REFUSED,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from compiled_engine.server.sampling_fields import SAME, check_bounds
from compiled_engine.server.serving import Serving, serving_of
from compiled_engine.server.text_logprobs import TextLogprobs
from compiled_engine.server.usage import UsageCounter

log = logging.getLogger("compiled_engine")

LOGPROBS = "message.output_text.logprobs"


async def responses(request: Request) -> Reply:
    """POST /v1/responses."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, ResponsesRequest, RESPONSES_REFUSED, RESPONSES_HABITS)
    model = serving.model(fields.model)
    check_bounds(fields, serving.options.limits, serving.max_answer_tokens, None)  # by the names that fields have here
    chat = _as_chat(fields, ignored)
    prompt = await unless_gone(request.receive, chat_prompt(serving, chat, "text.format"))
    events = ResponseEvents(_begun(serving, fields, model, prompt), prompt.make_call_id)
    # Always in parts: how many tokens are reasoning shows only while they come.
    salt = cache_salt(request, fields)
    outputs = generate(serving, [prompt.prompt], prompt.params, "delta", fields.priority or 0, "input", salt)
    hidden = serving.chat_format().guard.is_special if prompt.params.skip_special_tokens else None
    logprobs = TextLogprobs(prompt.make_parser(), chat.top_logprobs or 0, hidden)
    if fields.streams:
        return EventStream(_stream(events, _events(events, prompt, logprobs, await begun(outputs))), warned(ignored))
    return json_response(await unless_gone(request.receive, _whole(events, prompt, logprobs, outputs)), ignored)


def _as_chat(fields: ResponsesRequest, ignored: list[str]) -> ChatRequest:
    """The same request in the terms of chats. Raises ApiError 400 for what is not supported."""
    if (fields.n or 1) > 1:
        raise bad_request("n", f"n must be 1, got {fields.n}")
    text, reasoning = fields.text or {}, fields.reasoning or {}
    if not isinstance(text.get("format", {}), dict | None):
        raise bad_request("text.format", f"text.format must be an object, got {shown(text['format'])}")
    if text.get("verbosity") not in (None, "medium"):
        raise bad_request("text.verbosity", f"text.verbosity {shown(text['verbosity'])} is not supported")
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad_request("reasoning.effort", f"reasoning.effort must be text, got {shown(effort)}")
    choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise bad_request("tool_choice", f"tool_choice {shown(choice)} is not supported: only functions are")
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
    logprobs: list[TokenLogprob] = []  # of text that has not come yet
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
    """As server-sent events; a failure is an event too."""
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
