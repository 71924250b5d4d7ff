"""Errors in the shapes that clients of OpenAI's and of Anthropic's API read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import Any

import msgspec

LONGEST_MESSAGE = 2000
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# The types of Anthropic's API, which its clients ask at paths that begin so.
MESSAGES = "/v1/messages"
MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
UNEXPECTED = "the server failed; its log has the reason"
# Possible paths of the server, or addresses in its memory.
_INTERNAL = re.compile(r"(?:(?<![\w/])/[\w.+-]+(?:/[\w.+-]*)+)|(?:0x[0-9a-fA-F]{4,})")


class ErrorDetails(msgspec.Struct, kw_only=True):
    """An error for the client; `param` names the field of the request at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every response that is no success."""

    error: ErrorDetails


class MessageErrorDetails(msgspec.Struct, kw_only=True):
    """An error for a client of Anthropic's API; the message names the field of the request at fault."""

    type: str
    message: str


class MessageErrorResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """The body of every response of /v1/messages that is no success, and the event of a stream that fails."""

    error: MessageErrorDetails


class ApiError(Exception):
    """Ends a request with this HTTP status. The message is for the client: it holds nothing of the server's insides."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> bytes:
        """The response's body, as JSON, in the shape that clients of the path read."""
        return msgspec.json.encode(self.message_response() if path.startswith(MESSAGES) else self.response())

    def message_response(self) -> MessageErrorResponse:
        """The response's body in the shape of Anthropic's API."""
        kind = MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return MessageErrorResponse(error=MessageErrorDetails(type=kind, message=shortened(str(self))))

    def response(self) -> ErrorResponse:
        """The response's body in the shape of OpenAI's API."""
        message = shortened(str(self))
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorResponse(ErrorDetails(message=message, type=kind, param=self.param, code=self.code))


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that blames the field `param`."""
    return ApiError(400, message, param=param, code=code)


def require(holds: bool, field: str, allowed: str, value: Any, *, param: str | None = None) -> None:
    """Raise a 400 with what the field must be, and its value, unless that holds. param: the field to blame, where
    `field` is a part of it or a text."""
    if not holds:
        raise bad_request(param or field, f"{field} must be {allowed}, got {shown(value)}")


def require_absent(field: str, value: Any, because: str, code: str | None = None) -> None:
    """Raise a 400 if a field is given that others, or the model, rule out. because: how, after "must be absent"."""
    if value is not None:
        raise bad_request(field, f"{field} must be absent {because}, got {shown(value)}", code)


def require_at_most(field: str, values: Sized | int | None, most: int, what: str) -> None:
    """Raise a 400 if there are more than `most`. values: what is counted, or its number."""
    count = values if isinstance(values, int) else len(values or ())
    if count > most:
        raise bad_request(field, f"{field} must have at most {most} {what}, got {count}")


def blamed_on_request(error: Exception, **fields: str) -> ApiError:
    """Make the 400 for a TypeError or ValueError of the engine's checks, with a text that begins with the field's name.

    fields: the request's names for parameters of the engine; `prompts` are its prompt unless it says otherwise.
    """
    text = str(error).removeprefix("sampling_params: ").removeprefix("sampling_params[0]: ")
    for name, field in {"prompts": "prompt", **fields}.items():
        text = re.sub(rf"^{name}(\['\w+'\]|\[0\])*", field, text)
    text = re.sub(r"\w+Params\(truncate_prompt_tokens=\.\.\.\)", "truncate_prompt_tokens", text)
    found = re.match(r"(?!the\b)\w+", text)  # no field where it tells of the model
    code = "context_length_exceeded" if "max_model_len" in text and "must have at most" in text else None
    return ApiError(400, text, param=found[0] if found else None, code=code)


def engine_failure(reason: str) -> ApiError:
    """Make the 500 for a request that the engine could not complete; details of the server are removed from
    `reason`."""
    return ApiError(500, f"the engine failed: {without_internals(reason)}", code="engine_error")


def without_internals(text: str) -> str:
    """The text without paths and addresses."""
    return _INTERNAL.sub("...", text)


def shown(value: Any) -> str:
    """A value of a request as errors show it."""
    return shortened(repr(value), 200)


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """The text, without its middle if it is longer than allowed; always valid Unicode."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
