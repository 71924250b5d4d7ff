"""Read request bodies that are multipart forms (multipart/form-data, RFC 7578), which may contain files."""

from __future__ import annotations

import re
from email.message import Message

from compiled_engine.server.errors import ApiError, bad_request, shown

MOST_PARTS, LONGEST_HEAD = 64, 4096


def parts_of(content_type: str, body: bytes) -> dict[str, list[bytes]]:
    """Return the contents of a form's parts by field name. Parts with the same name stay in the form's order.

    `content_type` is the header of that name. Raises ApiError 415 if it is not multipart/form-data, and 400 for a
    damaged form or too many parts.
    """
    kind = _parameters(content_type)
    if kind.get_content_type() != "multipart/form-data":
        raise ApiError(415, f"the body must be a form (content type multipart/form-data), got {content_type[:80]!r}")
    boundary = kind.get_param("boundary")
    if not isinstance(boundary, str) or not re.fullmatch(r"[\x20-\x7e]{0,69}[\x21-\x7e]", boundary):
        raise bad_request(None, "the content type must have a boundary of 1 to 70 characters")
    border = b"--" + boundary.encode()
    first, *rest = (b"\r\n" + body).split(b"\r\n" + border)
    if len(rest) > MOST_PARTS + 1:
        raise bad_request(None, f"the form must have at most {MOST_PARTS} parts")
    if not rest or not rest[-1].startswith(b"--") or first.strip():
        raise bad_request(None, "the form must begin with its boundary, and end with it and two hyphens")
    found: dict[str, list[bytes]] = {}
    for part in rest[:-1]:
        head, blank, content = part.partition(b"\r\n\r\n")
        if not blank or len(head) > LONGEST_HEAD:
            raise bad_request(None, f"each part must have a head of at most {LONGEST_HEAD} bytes and a blank line")
        found.setdefault(_name(head), []).append(content)
    return found


def _name(head: bytes) -> str:
    """Return the field name in a part's head. Raises ApiError 400 if there is none."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            field = _parameters(value).get_param("name")
            if isinstance(field, str) and field:
                return field
    raise bad_request(None, f"each part must have a name in its content-disposition, got {shown(head[:100])}")


def _parameters(value: str) -> Message:
    """Return an email message whose content type is a header's value, to parse the value's parameters.

    A value without a slash, such as `form-data; name="file"`, gets the prefix form/.
    """
    message = Message()
    message["content-type"] = value.strip() if "/" in value.partition(";")[0] else f"form/{value.strip()}"
    return message
