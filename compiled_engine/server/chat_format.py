"""The model's chat format: its template, and the formats of its tool calls and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.frontend.chat import SETTINGS, read_chat_template, render_chat
from compiled_engine.frontend.prompts import has_long_text, num_characters
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.server.errors import ApiError, bad_request, shown, without_internals
from compiled_engine.server.long_work import LongWork
from compiled_engine.server.options import ServerOptions, template_variables
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.registry import (
    TOOL_FORMATS,
    ToolFormat,
    reasoning_format_of,
    reasoning_parser,
    tool_format_of,
)

# Special tokens within a user's text are text: only the chat template writes special tokens.

# Code points that no text has: one of them is put into special tokens that come from the user.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class SpecialTokenGuard:
    """Renders conversations so that no text in them becomes a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = {tokenizer.decode([token_id]): token_id for token_id in tokenizer.special_ids}
        self._ids = {text: token_id for text, token_id in ids.items() if len(text) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def literal(self, text: str) -> str:
        """A text as a grammar in Lark has it: a special token by its id, any other in quotes."""
        token_id = self._ids.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def is_special(self, text: str) -> bool:
        """Return whether the id is that of a special token."""
        return text in self._ids

    def concerns(self, values: Any) -> bool:
        """Return whether any text of these lists, dicts and strings contains a special token."""
        return any(self._special.search(text) for text in _texts(values))

    def render(self, values: Any, render: Callable[[Any], str]) -> tuple[str, tuple[int, ...]]:
        """The text that `render` makes of the values, and its token ids."""
        joined = "".join(_texts(values))
        mark = next((each for each in NONCHARACTERS if each not in joined), None)
        if mark is None:
            raise bad_request("messages", "messages must not hold every code point from U+FDD0 to U+FDEF")

        def marked(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        text = render(_mapped(values, lambda each: self._special.sub(marked, each)))
        ids: list[int] = []
        place = 0
        for match in self._special.finditer(text):
            ids += self._tokenizer.encode_as_text(text[place : match.start()].replace(mark, ""))
            ids.append(self._ids[match[0]])
            place = match.end()
        ids += self._tokenizer.encode_as_text(text[place:].replace(mark, ""))
        return text.replace(mark, ""), tuple(ids)


def _texts(values: Any) -> list[str]:
    """Every string in lists and dicts, keys included."""
    if isinstance(values, str):
        return [values]
    if isinstance(values, Mapping):
        return [text for key, value in values.items() for text in (str(key), *_texts(value))]
    if isinstance(values, list | tuple):
        return [text for value in values for text in _texts(value)]
    return []


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {change(str(key)): _mapped(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_mapped(value, change) for value in values]
    return values


LONGEST_SETTING = 256
MOST_NAMED = 8


@dataclass(frozen=True)
class ChatFormat:
    """template: its text. given: what is passed on instead of the checkpoint's own, if anything is. tools, reasoning:
    the format's name, None if there is none."""

    tokenizer: Tokenizer
    template: str
    given: str | None
    tools: ToolFormat | None
    reasoning: str | None
    guard: SpecialTokenGuard
    texts: LongWork
    allowed_settings: tuple[str, ...]
    default_settings: Mapping[str, Any]

    def knows(self, name: str) -> bool:
        """Return whether the template uses a variable."""
        return name in self.template

    def settings(self, given: Mapping[str, Any] | None, reasoning_effort: str | None = None) -> dict[str, Any]:
        """Return the template's variables besides messages and tools. Raises ApiError 400 for what requests may not
        set."""
        settings = {**self.default_settings, **(given or {})}
        for name, value in (given or {}).items():
            if name not in self.allowed_settings:
                allowed = ", ".join(self.allowed_settings) or "none"
                raise bad_request(
                    "chat_template_kwargs", f"chat_template_kwargs must not have {shown(name)}; allowed: {allowed}"
                )
            if not isinstance(value, bool | int | float | str) or len(str(value)) > LONGEST_SETTING:
                raise bad_request(
                    "chat_template_kwargs", f"chat_template_kwargs.{name} must be a short string, a number or a boolean"
                )
        if reasoning_effort is not None:
            if not self.knows("reasoning_effort"):
                raise bad_request(
                    "reasoning_effort",
                    "reasoning_effort is not supported: this model's chat template does not know it",
                    code="unsupported_parameter",
                )
            if len(reasoning_effort) > LONGEST_SETTING:
                raise bad_request(
                    "reasoning_effort", f"reasoning_effort must have at most {LONGEST_SETTING} characters"
                )
            settings["reasoning_effort"] = reasoning_effort
        return settings

    def drop_unread(self, fields: Any) -> list[str]:
        """Drop from a request what the chat template does not read and clients send to every server; return a warning
        for each."""
        ignored = []
        if getattr(fields, "reasoning_effort", None) is not None and not self.knows("reasoning_effort"):
            fields.reasoning_effort = None
            ignored.append("reasoning_effort is ignored: this model's chat template does not read it")
        given = getattr(fields, "chat_template_kwargs", None) or {}
        unread = [name for name in given if name not in self.allowed_settings and not self._reads(name)]
        if unread:
            fields.chat_template_kwargs = {name: value for name, value in given.items() if name not in unread}
            names = ", ".join(map(shown, unread[:MOST_NAMED]))
            ignored.append(f"chat_template_kwargs: {names} ignored: this model's chat template does not read it")
        return ignored

    def _reads(self, name: str) -> bool:
        """Return whether a variable may be in the template, as a whole word."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None or name in SETTINGS

    def parser(self, prompt: str, tool_names: Sequence[str], *, one_call: bool) -> AnswerParser:
        """Make the parser of an answer to the prompt. tool_names: of the tools that it may call."""
        reasoning = None if self.reasoning is None else reasoning_parser(self.reasoning, prompt)
        tools = self.tools.parser(tool_names) if self.tools is not None and tool_names else None
        return AnswerParser(reasoning, tools, one_call=one_call)

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        settings: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        check: Callable[[str], None] = lambda text: None,
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt, as text and as token ids. check: may refuse the text before it is tokenised. Raises ApiError 400
        for what the template cannot render, or not in time."""

        def rendered(values: Any) -> tuple[str, tuple[int, ...]]:
            prompt = render_chat(
                self.tokenizer,
                values[0],
                chat_template=self.given,
                tools=values[1],
                chat_template_kwargs=values[2],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                check=check,
            )
            return prompt.text or "", prompt.token_ids or ()

        values = [messages, tools, settings]

        def render() -> tuple[str, tuple[int, ...]]:
            if self.guard.concerns(values):
                return self.guard.render(values, lambda guarded: rendered(guarded)[0])
            return rendered(values)

        try:
            if not has_long_text(values) and not self.guard.concerns(values):
                return render()
            return await self.texts.run("messages", num_characters(values), render)
        except ApiError:
            raise
        except (TypeError, ValueError) as error:
            raise bad_request("messages", without_internals(str(error))) from error


def find_chat_format(tokenizer: Tokenizer | None, options: ServerOptions, texts: LongWork) -> ChatFormat | None:
    """The format of a model with this tokenizer; None without a template. Raises ValueError for a template that is no
    template."""
    if tokenizer is None:
        return None
    given = read_chat_template(options.chat_template, tokenizer)
    template: Any = given if given is not None else tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default", next(iter(template.values()), None))
    if template is None:
        return None
    tools = _chosen(options.tool_call_parser, tool_format_of(template))
    return ChatFormat(
        tokenizer,
        template,
        given,
        None if tools is None else TOOL_FORMATS[tools],
        _chosen(options.reasoning_parser, reasoning_format_of(template)),
        SpecialTokenGuard(tokenizer),
        texts,
        options.chat_template_kwargs,
        template_variables("default_chat_template_kwargs", options.default_chat_template_kwargs or {}),
    )


def _chosen(option: str, found: str | None) -> str | None:
    return found if option == "auto" else None if option == "none" else option
