"""Converts conversations to prompts with the tokenizer's chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from compiled_engine.frontend.image_parts import image_of, is_image_part, read_by, with_placeholders
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.process.smallest_first import Stopped, WorkStopped, never

Message: TypeAlias = "Mapping[str, Any]"
Conversation: TypeAlias = "Sequence[Message]"

# Variables of a template that have separate arguments.
SETTINGS = {
    *("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
}
ROLES = ("system", "developer", "user", "assistant", "tool")


def split_conversations(messages: Conversation | Sequence[Conversation]) -> list[tuple[str, Conversation]]:
    """Return the conversations in `messages`, each paired with its name for error messages.

    `messages` is one conversation or a list of conversations. Raises TypeError or ValueError for anything else.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(f"messages must be a list of messages, or a list of such lists, got {messages!r}")
    if not messages:
        raise ValueError("messages must not be empty")
    if isinstance(messages[0], list | tuple):
        return [(f"messages[{index}]", conversation) for index, conversation in enumerate(messages)]
    return [("messages", messages)]


def read_chat_template(given: str | Path | None, tokenizer: Tokenizer) -> str | None:
    """Return the chat template that `given` stands for; None if `given` is None.

    `given` is a Jinja template, the path of a file with a template, or the name of one of the tokenizer's templates. A
    name is returned unchanged. Raises TypeError or ValueError with the value given.
    """
    if given is None:
        return None
    if not isinstance(given, str | Path):
        raise TypeError(f"chat_template must be a Jinja template, the path of a file with one, or None, got {given!r}")
    own = tokenizer.chat_template
    if isinstance(given, str) and ("{" in given or (isinstance(own, Mapping) and given in own)):
        return given
    if not os.path.isfile(given):  # Path.is_file raises for a text that is too long for a path
        raise ValueError(f"chat_template is {str(given)!r}, which is neither a Jinja template nor an existing file")
    return Path(given).read_text(encoding="utf-8")


def render_chat(
    tokenizer: Tokenizer,
    conversation: Conversation,
    *,
    name: str = "messages",
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    check: Callable[[str], None] = lambda text: None,
    is_stopped: Stopped = never,
    placeholder: int | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return a conversation's prompt: text and token ids, and the images of its messages.

    Only the template produces special tokens: text in messages, tools and chat_template_kwargs stays text. `name` is
    the conversation's name in errors. `check` may reject the rendered text before it is tokenised. `is_stopped` is
    polled while the template runs. `placeholder` is the token of an image, for templates that read text alone.
    `mm_processor_kwargs` are for the images.

    Raises WorkStopped if stopped. Raises TypeError or ValueError with the message and the reason: no template, a
    malformed message, a role or tools that the template does not support, or the template's own error.
    """
    from compiled_engine.frontend.chat_template import choose_template, plain, schema_of
    from compiled_engine.frontend.template_forms import forms_of

    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt must be False when continue_final_message is True")
    template = choose_template(tokenizer.chat_template, chat_template, tools)
    if tools and "tools" not in template:
        raise ValueError(f"tools has {len(tools)} entries, but the chat template has no place for them; allowed: None")
    further = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(further, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict or None, got {further!r}")
    if taken := sorted(SETTINGS & further.keys()):
        raise ValueError(f"chat_template_kwargs must not have {', '.join(taken)}, got {further!r}")
    images: list[Any] = []
    checked = _check_conversation(name, conversation, template, images)

    def render(values: Any) -> str:
        return _rendered(
            name,
            template,
            values[0],
            tools=values[1],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**tokenizer.special_tokens, **values[2]},
            is_stopped=is_stopped,
        )

    forms = forms_of(template)
    schemas = None if tools is None else forms.tools([schema_of(tool) for tool in tools])
    mark = None
    if images:
        checked, mark = read_by(template, checked, plain([checked, schemas, further]))
    values = plain([forms.conversation(checked), schemas, further])
    data = {"multi_modal_data": {"image": images}, "mm_processor_kwargs": mm_processor_kwargs} if images else {}
    if mark is None and not tokenizer.client_text.concerns(values):
        check(text := render(values))
        return Prompt(name, text, tuple(tokenizer.encode(text, add_special_tokens=False)), data=data)
    text, parts = tokenizer.client_text.render(values, render)
    if mark is not None:  # marks become placeholders, which are special tokens
        parts = with_placeholders(parts, mark, placeholder)
        text = "".join(tokenizer.entry(part) if isinstance(part, int) else part for part in parts)
    check(text)
    return Prompt(name, text, tuple(tokenizer.encode_parts(parts)), data=data)


def _rendered(name: str, template: str, conversation: Any, **settings: Any) -> str:
    from compiled_engine.frontend.chat_template import render_template

    try:
        return render_template(template, conversation, **settings)
    except WorkStopped:
        raise
    except Exception as error:  # templates may raise anything
        raise ValueError(f"{name}: the chat template cannot render it: {error}") from error


def _check_conversation(name: str, conversation: Any, template: str, images: list[Any]) -> Sequence[dict[str, Any]]:
    """Return copies of the messages, and append their images to `images`.

    name: the conversation's, for errors. Raises TypeError or ValueError unless the messages are valid and their
    contents are text and images.
    """
    if not isinstance(conversation, list | tuple):
        raise TypeError(f"{name} must be a list of messages, got {conversation!r}")
    if not conversation:
        raise ValueError(f"{name} must not be empty")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(conversation):
        where = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{where} must be a dict with 'role' and 'content', got {message!r}")
        role, content = message.get("role"), message.get("content")
        # A template may have special roles; a role that it never names would be dropped silently.
        if not isinstance(role, str) or (role not in ROLES and role not in template):
            raise ValueError(f"{where}['role'] must be one of {', '.join(ROLES)}, got {role!r}")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"{where}['content'] must be a string, got {content!r}")
        checked.append({**message, "content": _checked_content(f"{where}['content']", content, images)})
        if "content" not in message:
            del checked[-1]["content"]
    return checked


def _checked_content(name: str, content: Any, images: list[Any]) -> Any:
    """Return a message's content with images replaced by parts of type "image", and append the images to `images`.

    name: the content's, for errors. Raises TypeError or ValueError for other contents than text and images.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TypeError(f"{name} must be a string or a list of {{'type': 'text', 'text': str}}, got {content!r}")
    parts: list[Any] = []
    for index, part in enumerate(content):
        where = f"{name}[{index}]"
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        if is_image_part(part):
            images.append(image_of(where, part))
            parts.append({"type": "image"})
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} must be {{'type': 'text', 'text': str}} or an image, got {part!r}"[:400])
        parts.append(part)
    return parts
