"""What a chat asks of the engine: the rendered prompt, sampling parameters, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.chat_messages import Tool, messages_for_template, tools_for_template
from compiled_engine.server.chat_protocol import ChatRequest
from compiled_engine.server.errors import bad_request, shown
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.response_format import require_text_format
from compiled_engine.server.sampling_fields import sampling_params
from compiled_engine.server.serving import Serving


@dataclass(frozen=True)
class ChatPrompt:
    """make_parser, make_call_id: for each answer, and each call in it."""

    prompt: dict[str, Any]
    params: SamplingParams
    make_parser: Callable[[], AnswerParser]
    make_call_id: Callable[[], str]


async def chat_prompt(serving: Serving, fields: ChatRequest, ignored: list[str]) -> ChatPrompt:
    """Raises ApiError 400 naming the field that cannot be honoured; `ignored` gets what has no effect."""
    chat = serving.chat_format()
    require_text_format(fields.response_format)
    tools = fields.tools if wants_tools(fields.tool_choice, fields.tools) else None
    if tools and chat.tools is None:
        raise bad_request(
            "tools", "tools are not supported: it is not known how this model calls them (option --tool-call-parser)"
        )
    if any(tool.function.strict for tool in tools or ()):
        ignored.append("tools: strict is ignored, calls are not checked against their schema")
    more = _more(fields)
    if tools and chat.tools is not None and chat.tools.has_special_tokens and fields.skip_special_tokens is None:
        more["skip_special_tokens"] = False
    params = sampling_params(
        fields, serving.default_chat_params(), serving.options.limits, serving.max_answer_tokens, **more
    )
    limits = serving.options.limits
    continues = bool(fields.continue_final_message)
    text, token_ids = await chat.render(
        messages_for_template(fields.messages, chat, limits),
        tools_for_template(tools, chat, limits),
        chat.settings(fields.chat_template_kwargs, fields.reasoning_effort),
        add_generation_prompt=not continues and fields.add_generation_prompt is not False,
        continue_final_message=continues,
    )
    names = [tool.function.name for tool in tools or ()]
    one_call = fields.parallel_tool_calls is False
    return ChatPrompt(
        {"prompt": text, "prompt_token_ids": token_ids},
        params,
        lambda: chat.parser(text, names, one_call=one_call),
        _no_call if chat.tools is None else chat.tools.call_id,
    )


def wants_tools(tool_choice: Any, tools: list[Tool] | None) -> bool:
    """Whether the model may call tools. Raises ApiError 400 for what is no choice, or not supported."""
    if tool_choice in (None, "auto"):
        return bool(tools)
    if tool_choice == "none":
        return False
    if tool_choice == "required" or isinstance(tool_choice, dict):
        raise bad_request(
            "tool_choice",
            f"tool_choice {shown(tool_choice)} is not supported yet; allowed: 'auto', 'none'",
            code="unsupported_parameter",
        )
    raise bad_request("tool_choice", f"tool_choice must be 'auto' or 'none', got {shown(tool_choice)}")


def _more(fields: ChatRequest) -> dict[str, Any]:
    """Sampling parameters that chats have under other names."""
    more: dict[str, Any] = {}
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_request("top_logprobs", "top_logprobs must be absent unless logprobs is true")
    if fields.logprobs:
        more["logprobs"] = fields.top_logprobs or 0
    given = (fields.max_tokens, fields.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise bad_request(
            "max_tokens", f"max_tokens and max_completion_tokens must be equal, got {given[0]}, {given[1]}"
        )
    if fields.max_completion_tokens is not None:
        more["max_tokens"] = fields.max_completion_tokens
    return more


def _no_call() -> str:
    raise AssertionError("a model without a format for calls made one")
