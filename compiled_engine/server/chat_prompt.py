"""Convert a chat request to the engine's input: rendered prompt, sampling parameters, and answer parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from compiled_engine.frontend.image_parts import ImageUrl
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.chat_format import BUDGETS, ChatFormat
from compiled_engine.server.chat_messages import (
    Tool,
    begins_an_answer,
    messages_for_template,
    text_of,
    tools_for_template,
)
from compiled_engine.server.errors import (
    bad_request,
    blamed_on_request,
    engine_failure,
    require,
    require_absent,
    require_equal,
    shown,
)
from compiled_engine.server.forms import ToolUse, answer_form, asked_form
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.registry import TOOL_FORMATS
from compiled_engine.server.protocol import ChatRequest
from compiled_engine.server.sampling_fields import sampling_params
from compiled_engine.server.serving import Serving

# The format of required calls for models without a known one. A grammar enforces it, so plain JSON works.
DEMANDED = "llama3_json"


@dataclass(frozen=True)
class ChatPrompt:
    """The engine's input for a chat, and functions that read the answer."""

    prompt: dict[str, Any]
    params: SamplingParams
    make_parser: Callable[[], AnswerParser]  # creates a parser for one answer
    make_call_id: Callable[[], str]  # creates the id of one call


async def chat_prompt(serving: Serving, fields: ChatRequest, form_field: str = "response_format") -> ChatPrompt:
    """Convert a chat request to the engine's input.

    `form_field` is the name that the request's API has for response_format. Raises ApiError 400 with the field that is
    invalid or not supported.
    """
    chat = serving.chat_format()
    asked = await asked_form(serving.forms, fields.response_format, fields.structured_outputs, form_field)
    use = tool_use(fields.tool_choice, fields.tools, one_call=fields.parallel_tool_calls is False)
    tools = None if use is None else fields.tools
    limits = serving.options.limits
    shown_tools = tools_for_template(tools, chat, limits)
    if use is not None and chat.tools is None:
        if not use.required:
            raise bad_request(
                "tools",
                "tools are not supported: it is not known how this model calls them (option --tool-call-parser); "
                "allowed: a tool_choice that demands a call",
            )
        chat = replace(chat, tools=TOOL_FORMATS[DEMANDED])
    more = renamed_fields(fields)
    if fields.skip_special_tokens is None and chat.has_special_markup(with_tools=bool(tools)):
        more["skip_special_tokens"] = False
    if (ending_ids := chat.ending_ids()) and not fields.ignore_eos:
        more["stop_token_ids"] = [*(fields.stop_token_ids or ()), *ending_ids]
    params = sampling_params(fields, serving.default_chat_params(), limits, serving.max_answer_tokens, **more)
    rendered = await chat.render(
        messages_for_template(fields.messages, chat, limits),
        shown_tools,
        chat.settings(fields.chat_template_kwargs, fields.reasoning_effort),
        add_generation_prompt=begins_an_answer(fields.add_generation_prompt, fields.continue_final_message),
        continue_final_message=bool(fields.continue_final_message),
        check=lambda text: serving.check_text(text, params, "messages"),
    )
    prompt, text = await with_images(serving, rendered, params), rendered.text or ""
    continued = text_of(fields.messages[-1]) if fields.continue_final_message else None
    form = await answer_form(serving.forms, chat, text, use, asked, continued, _budget(fields, chat))
    try:
        params.structured_outputs = form
    except ValueError as error:
        raise blamed_on_request(error) from error
    schemas = {} if use is None else {tool.function.name: tool.function.parameters or {} for tool in use.tools}
    one_call = fields.parallel_tool_calls is False
    return ChatPrompt(
        prompt,
        params,
        lambda: chat.parser(text, schemas, one_call=one_call, continued=continued),
        _no_call if chat.tools is None else chat.tools.call_id,
    )


async def with_images(serving: Serving, prompt: Prompt, params: SamplingParams | None = None) -> dict[str, Any]:
    """Return a rendered prompt in a form that the engine accepts, with its images processed.

    `params`, the request's parameters, may truncate the prompt.

    Raises ApiError: 400 for images that cannot be used, 503 if too many wait, 500 if the processor fails.
    """
    plain = {"prompt": prompt.text or "", "prompt_token_ids": prompt.token_ids or ()}
    if not prompt.data:
        return plain
    images = prompt.data["multi_modal_data"]["image"]
    most = serving.engine.features.images.most_bytes(len(images))
    urls = sum(len(image.url) for image in images if isinstance(image, ImageUrl))
    async with serving.images.admit(urls, most):
        try:
            return await serving.engine.attach({**plain, **prompt.data}, params)
        except (TypeError, ValueError, OSError) as error:
            raise blamed_on_request(error, prompts="messages") from error
        except RuntimeError as error:
            raise engine_failure(str(error)) from error
        finally:
            serving.metrics.count_images(serving.engine.frontend_metrics())


def tool_use(tool_choice: Any, tools: list[Tool] | None, *, one_call: bool) -> ToolUse | None:
    """Return the tools that the answer may call according to the field `tool_choice`, or None if it may call none.

    With `one_call`, the answer has at most one call. Raises ApiError 400 for an invalid choice.
    """
    if tool_choice == "none" or (tool_choice in (None, "auto") and not tools):
        return None
    tools = tools or []
    if tool_choice in (None, "auto"):
        return ToolUse(tools, required=False, several=not one_call)
    if tool_choice == "required":
        if not tools:
            raise bad_request("tool_choice", "tool_choice must not be 'required' where there are no tools")
        return ToolUse(tools, required=True, several=not one_call)
    is_function = isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
    require(is_function, "tool_choice", "'auto', 'none', 'required', or a function", tool_choice)
    function = tool_choice.get("function", tool_choice)  # in the Responses API, the name is beside the type
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise bad_request("tool_choice", f"tool_choice must name one of the tools, got {shown(name)}")
    return ToolUse(named[:1], required=True, several=False)


def renamed_fields(fields: ChatRequest) -> dict[str, Any]:
    """Return the sampling parameters that fields with other names determine in chat requests.

    They are logprobs, from `logprobs` and `top_logprobs`, and max_tokens, from `max_completion_tokens`. Raises ApiError
    400 for contradictory fields.
    """
    more: dict[str, Any] = {}
    if not fields.logprobs:
        require_absent("top_logprobs", fields.top_logprobs, "unless logprobs is true")
    if fields.logprobs:
        more["logprobs"] = fields.top_logprobs or 0
    names = ("max_tokens", "max_completion_tokens")
    require_equal({name: value for name in names if (value := getattr(fields, name)) is not None}, "max_tokens")
    if fields.max_completion_tokens is not None:
        more["max_tokens"] = fields.max_completion_tokens
    return more


def _budget(fields: ChatRequest, chat: ChatFormat) -> int | None:
    """Return the bound on reasoning tokens, or None. Raises ApiError 400 if the model's reasoning cannot be bounded."""
    given = {name: value for name in BUDGETS if (value := getattr(fields, name)) not in (None, -1)}
    require_equal(given, BUDGETS[1])
    for name, value in given.items():
        if (why := chat.why_unbounded) is not None:
            require_absent(name, value, f"as {why}", "unsupported_parameter")
        return value
    return None


def _no_call() -> str:
    raise AssertionError("a model without a format for calls made one")
