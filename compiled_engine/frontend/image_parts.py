"""Reads the image parts of messages in the forms that callers use, and converts them for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from compiled_engine.frontend.client_text import texts_in

# Unicode noncharacters. One that all texts lack stands for images in a rendered text, for templates that read no parts.
MARKS = tuple(chr(plane << 16 | 0xFFFE) for plane in range(1, 17))
# Types of parts, each with whether its image is a URL.
KINDS = {"image_url": True, "input_image": True, "image": False, "image_pil": False}
SCHEMES = ("data:", "http:", "https:", "file:")
FORMS = "{'type': 'image_url', 'image_url': {'url': str}} or {'type': 'image', 'image': an image}"
DETAILS = ("auto", "low", "high", "original")


class ImageUrl(msgspec.Struct, frozen=True):
    """An image that a message names by a URL."""

    name: str  # of the message's field, for errors
    url: str


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and _kind_of(part) in KINDS


def _kind_of(part: Mapping[str, Any]) -> Any:
    """Return a part's type; without one, the type whose key the part has, as in {"image_url": "https://..."}."""
    return part["type"] if "type" in part else next((kind for kind in KINDS if kind in part), None)


def image_of(name: str, part: Mapping[str, Any]) -> Any:
    """Return the image of a part: an ImageUrl, or the object that the caller gave.

    Raises TypeError or ValueError with the part's name.
    """
    kind = _kind_of(part)
    key = "image_url" if kind == "input_image" else kind
    image, field = part.get(key), f"{name}[{key!r}]"
    if isinstance(image, Mapping):
        detail = image.get("detail")
        image, field = image.get("url"), f"{field}['url']"
    else:
        detail = part.get("detail")
    if detail is not None and detail not in DETAILS:
        raise ValueError(f"{name} has the detail {detail!r}; allowed: {', '.join(DETAILS)}")
    if image is None or (KINDS[kind] and not isinstance(image, str)):
        raise ValueError(f"{name} must be {FORMS}, got {dict(part)!r}"[:400])
    is_url = KINDS[kind] or (isinstance(image, str) and image.lower().startswith(SCHEMES))
    return ImageUrl(field, image) if is_url else image


def read_by(
    template: str, messages: Sequence[dict[str, Any]], values: Any
) -> tuple[Sequence[dict[str, Any]], str | None]:
    """Return the messages with images in the form that the template reads, and the mark of images in texts.

    Parts of type "image" are kept if the template renders such parts for the message's role. Otherwise the message
    becomes a text with the mark, a character, in place of each image. The mark is None if no message has it. `values`
    is all that the template reads; the mark occurs in none of its texts.

    Raises ValueError if the texts contain every character that can be the mark (MARKS).
    """
    marked = [_has_images(message) and not _reads_images(template, message.get("role", "user")) for message in messages]
    if not any(marked):
        return messages, None
    texts = "".join((template, *texts_in(values)))
    if (mark := next((each for each in MARKS if each not in texts), None)) is None:
        raise ValueError(
            "texts beside images must not hold every code point from U+1FFFE to U+10FFFE that ends with FFFE"
        )
    of_messages = zip(messages, marked, strict=True)
    return [_marked(message, mark) if is_marked else message for message, is_marked in of_messages], mark


def _has_images(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list | tuple) and any(map(is_image_part, content))


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    texts = [mark if is_image_part(part) else part["text"] for part in message["content"]]
    return {**message, "content": [{"type": "text", "text": "\n".join(texts)}]}


@cache
def _reads_images(template: str, role: str) -> bool:
    """Return whether the template renders something for an image in a message of this role."""
    from compiled_engine.frontend.template_forms import rendered_probe

    text = [{"type": "text", "text": "probe"}]
    without, with_image = (rendered_probe(template, role, content) for content in (text, [{"type": "image"}, *text]))
    return "probe" in with_image and with_image != without and "'type'" not in with_image


def with_placeholders(parts: Sequence[str | int], mark: str, placeholder: int | None) -> list[str | int]:
    """Replace each mark in a text's parts by `placeholder`. Raises ValueError for a mark if `placeholder` is None."""
    found: list[str | int] = []
    for part in parts:
        if isinstance(part, int) or mark not in part:
            found.append(part)
            continue
        if placeholder is None:
            raise ValueError("the chat template has no place for images")
        before, *others = part.split(mark)
        found.append(before)
        for text in others:
            found += [placeholder, text]
    return found
