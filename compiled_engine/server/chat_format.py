"""The model's chat format: its chat template, and the formats of its tool calls and reasoning."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.frontend.chat import SETTINGS, read_chat_template, render_chat
from compiled_engine.frontend.prompts import Prompt, rendering_size
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.server.errors import ApiError, bad_request, require, require_at_most, shown, without_internals
from compiled_engine.server.json_size import check_arguments
from compiled_engine.server.long_work import LongWork
from compiled_engine.server.options import Limits, ServerOptions, template_variables
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.call_grammars import quoted
from compiled_engine.server.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
    reasoning_format_of,
    reasoning_parser,
    tool_format_of,
)


class SpecialTokenGuard:
    """Looks up special tokens by their text, for answers and grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def literal(self, text: str) -> str:
        """Return a text as a Lark grammar literal: special tokens by id, other text quoted.

        As in the grammar library, added tokens in angle brackets count as special.
        """
        token_id = self._tokenizer.ids_of_special.get(text, self._added_id(text))
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _added_id(self, text: str) -> int | None:
        if not (text.startswith("<") and text.endswith(">")):
            return None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and self._tokenizer.decode(ids) == text else None

    def is_special(self, text: str) -> bool:
        """Return whether a special token has this text."""
        return text in self._tokenizer.ids_of_special

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        return self._tokenizer.ids_of_special.get(text)


LONGEST_SETTING = 256
MOST_NAMED = 8
# Request fields for the bound on reasoning tokens: vLLM's, and that of Qwen's service.
BUDGETS = ("thinking_token_budget", "thinking_budget")


@dataclass(frozen=True)
class ChatFormat:
    """Renders prompts with the model's chat template, and creates parsers for its tool calls and reasoning."""

    tokenizer: Tokenizer
    template: str  # template text for requests without tools
    given: str | None  # a template or its name that replaces the checkpoint's default
    tools: ToolFormat | None
    reasoning: str | None  # name of the format
    guard: SpecialTokenGuard
    texts: LongWork
    allowed_settings: tuple[str, ...]
    default_settings: Mapping[str, Any]
    tool_template: str = ""  # template text for requests with tools
    placeholder: int | None = None  # token of an image
    why_no_images: str | None = "the model takes only text"  # None if it takes images
    max_json_values: int = Limits().max_json_values  # bound on values in arguments of a conversation's calls

    def knows(self, name: str) -> bool:
        """Return whether the text `name` occurs in one of the templates."""
        return name in self.template or name in self.tool_template

    def settings(self, given: Mapping[str, Any] | None, reasoning_effort: str | None = None) -> dict[str, Any]:
        """Return the variables of the template besides messages and tools: the server's defaults, updated with `given`.

        Raises ApiError 400 for a variable that requests may not set, for a value that is not a short string, a number
        or a boolean, and for a `reasoning_effort` that the template does not read.
        """
        settings = {**self.default_settings, **(given or {})}
        for name, value in (given or {}).items():
            if name not in self.allowed_settings:
                allowed = ", ".join(self.allowed_settings) or "none"
                raise bad_request(
                    "chat_template_kwargs", f"chat_template_kwargs must not have {shown(name)}; allowed: {allowed}"
                )
            is_short = isinstance(value, bool | int | float | str) and len(str(value)) <= LONGEST_SETTING
            where, allowed = f"chat_template_kwargs.{name}", "a short string, a number or a boolean"
            require(is_short, where, allowed, value, param="chat_template_kwargs")
        if reasoning_effort is not None:
            if not self.knows("reasoning_effort"):
                raise bad_request(
                    "reasoning_effort",
                    "reasoning_effort is not supported: this model's chat template does not know it",
                    code="unsupported_parameter",
                )
            require_at_most("reasoning_effort", reasoning_effort, LONGEST_SETTING, "characters")
            settings["reasoning_effort"] = reasoning_effort
        return settings

    def drop_unread(self, fields: Any) -> list[str]:
        """Remove the fields of a request that have no effect with this model. Return a warning for each.

        `fields` is the request; it is changed in place.
        """
        ignored = []
        if getattr(fields, "reasoning_effort", None) is not None and not self.knows("reasoning_effort"):
            fields.reasoning_effort = None
            ignored.append("reasoning_effort is ignored: this model's chat template does not read it")
        for name in BUDGETS:
            if getattr(fields, name, None) is not None and (why := self.why_unbounded) is not None:
                setattr(fields, name, None)
                ignored.append(f"{name} is ignored: {why}")
        given = getattr(fields, "chat_template_kwargs", None) or {}
        unread = [name for name in given if name not in self.allowed_settings and not self._reads(name)]
        if unread:
            fields.chat_template_kwargs = {name: value for name, value in given.items() if name not in unread}
            names = ", ".join(map(shown, unread[:MOST_NAMED]))
            ignored.append(f"chat_template_kwargs: {names} ignored: this model's chat template does not read it")
        return ignored

    @property
    def why_unbounded(self) -> str | None:
        """The reason why reasoning tokens cannot be bounded, or None if they can."""
        if self.reasoning is None:
            return "no reasoning of this model is known"
        closing = REASONING_FORMATS[self.reasoning].closing
        if closing is None:
            return "reasoning of this model has several parts"
        is_text = self.guard.literal(closing) == quoted(closing)
        return f"the tokenizer has no token for {closing}, which closes reasoning" if is_text else None

    def _reads(self, name: str) -> bool:
        """Return whether a template reads the variable `name`: the name occurs in it as a whole word.

        Variables that the server sets itself (SETTINGS) count as read.
        """
        word = re.compile(rf"\b{re.escape(name)}\b")
        return name in SETTINGS or any(word.search(text) for text in (self.template, self.tool_template))

    def has_special_markup(self, *, with_tools: bool) -> bool:
        """Return whether the markup of reasoning or, with `with_tools`, of tool calls includes special tokens.

        If it does, the answer's text must keep special tokens, so that a parser can find the markup.
        """
        markup: tuple[str, ...] = () if self.reasoning is None else REASONING_FORMATS[self.reasoning].markup
        if with_tools and self.tools is not None:
            markup += self.tools.markup
        return any(map(self.guard.is_special, markup))

    def parser(
        self, prompt: str, tools: Mapping[str, Mapping[str, Any]], *, one_call: bool, continued: str | None = None
    ) -> AnswerParser:
        """Return a parser for an answer to the prompt.

        `tools` maps the name of each tool to the schema of its arguments. `continued` is the message that the answer
        continues. With `one_call`, the parser drops all calls but the first.
        """
        given = self.tools if tools else None
        read_together = given is not None and given.reasoning is not None
        reasoning = None
        if self.reasoning is not None:
            names = tools if read_together else None
            reasoning = reasoning_parser(self.reasoning, prompt, continued, names)
        calls = None if given is None or read_together else given.parser(tools)
        return AnswerParser(reasoning, calls, one_call=one_call)

    def ending_ids(self) -> list[int]:
        """Return the ids of special tokens that end an answer in this format. The checkpoint need not list them."""
        ends = () if self.reasoning is None else REASONING_FORMATS[self.reasoning].ends
        return [token_id for text in ends if (token_id := self.guard.special_id(text)) is not None]

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        settings: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        check: Callable[[str], None] = lambda text: None,
    ) -> Prompt:
        """Render a chat with the template, and return the prompt: text, token ids and images.

        `settings` are the variables of the template, see `settings`. `check` may reject the text before it is
        tokenised, by raising an error. Raises ApiError 400 if the template fails or takes too long, or if the arguments
        of tool calls in `messages` exceed the bounds of a request body; 503 if too much work is queued. A template's
        run time is unpredictable, so it never runs on the event loop.
        """
        is_over = threading.Event()

        def render() -> Prompt:
            check_arguments(_texts_of_arguments(messages), self.max_json_values)
            return render_chat(
                self.tokenizer,
                messages,
                chat_template=self.given,
                tools=tools,
                chat_template_kwargs=settings,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                check=check,
                is_stopped=is_over.is_set,
                placeholder=self.placeholder,
            )

        size = rendering_size([messages, tools, settings])
        try:
            return await self.texts.run("messages", size, render)
        except ApiError:
            raise
        except (TypeError, ValueError) as error:
            raise bad_request("messages", without_internals(str(error))) from error
        finally:
            is_over.set()


def _texts_of_arguments(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    functions = (call["function"] for message in messages for call in message.get("tool_calls") or ())
    return [function["arguments"] for function in functions if isinstance(function["arguments"], str)]


def find_chat_format(
    tokenizer: Tokenizer | None,
    options: ServerOptions,
    texts: LongWork,
    placeholder: int | None = None,
    why_no_images: str | None = "the model takes only text",
) -> ChatFormat | None:
    """Return the chat format for a tokenizer, or None without a tokenizer or a template.

    `texts`, `placeholder` and `why_no_images` become fields of the result. Raises ValueError for an invalid template,
    and for parsers that cannot be combined.
    """
    if tokenizer is None:
        return None
    from compiled_engine.frontend.chat_template import choose_template

    given = read_chat_template(options.chat_template, tokenizer)
    own = tokenizer.chat_template
    if isinstance(own, Mapping) and own and "default" not in own and given is None:
        own = {"default": next(iter(own.values())), **own}
    if own is None and given is None:
        return None
    template, tool_template = choose_template(own, given, None), choose_template(own, given, ())
    tools, reasoning = _formats(options, template, tool_template)
    _ = tokenizer.client_text  # built now: slow with thousands of special tokens
    return ChatFormat(
        tokenizer,
        template,
        given,
        tools,
        reasoning,
        SpecialTokenGuard(tokenizer),
        texts,
        options.allow_chat_template_kwarg,
        template_variables("default_chat_template_kwargs", options.default_chat_template_kwargs or {}),
        tool_template,
        placeholder,
        why_no_images,
        options.limits.max_json_values,
    )


def _formats(options: ServerOptions, template: str, tool_template: str) -> tuple[ToolFormat | None, str | None]:
    """Return (format of tool calls, name of the reasoning format), each None if the model has none.

    The options name the formats or, if they are "auto", the templates decide. Some parsers read calls and reasoning
    together; such a parser is chosen for both or for neither. Raises ValueError if the options contradict that.
    """
    name = _chosen(options.tool_call_parser, tool_format_of(tool_template))
    reasoning = _chosen(options.reasoning_parser, reasoning_format_of(template))
    tools = None if name is None else TOOL_FORMATS[name]
    if tools is None or tools.reasoning in (None, reasoning):
        return tools, reasoning
    if options.reasoning_parser == "auto":
        return tools, tools.reasoning
    if options.tool_call_parser == "auto":
        return None, reasoning
    raise ValueError(
        f"reasoning_parser must be auto or {tools.reasoning} where tool_call_parser is {name}, which reads both, "
        f"got {options.reasoning_parser!r}"
    )


def _chosen(option: str, found: str | None) -> str | None:
    return found if option == "auto" else None if option == "none" else option
