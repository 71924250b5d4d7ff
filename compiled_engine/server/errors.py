"""Errors in the shapes of OpenAI's and Anthropic's APIs."""

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
# Error types of Anthropic's API, used for paths with this prefix.
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
# File paths and memory addresses.
_INTERNAL = re.compile(r"(?:(?<![\w/])/[\w.+-]+(?:/[\w.+-]*)+)|(?:0x[0-9a-fA-F]{4,})")


class ErrorDetails(msgspec.Struct, kw_only=True):
    """An error. `param` is the request field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of an error response."""

    error: ErrorDetails


class MessageErrorDetails(msgspec.Struct, kw_only=True):
    """An error of Anthropic's API. The message contains the request field at fault."""

    type: str
    message: str


class MessageErrorResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """The body of an error response of /v1/messages, and the event of a failed stream."""

    error: MessageErrorDetails


class ApiError(Exception):
    """Ends a request with an HTTP error. The message is sent to the client and must not reveal server internals."""

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
        """Return the response body as JSON, in the error shape of the path's API."""
        return msgspec.json.encode(self.message_response() if path.startswith(MESSAGES) else self.response())

    def message_response(self) -> MessageErrorResponse:
        """Return the body in the shape of Anthropic's API."""
        kind = MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return MessageErrorResponse(error=MessageErrorDetails(type=kind, message=shortened(str(self))))

    def response(self) -> ErrorResponse:
        """Return the body in the shape of OpenAI's API."""
        message = shortened(str(self))
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorResponse(ErrorDetails(message=message, type=kind, param=self.param, code=self.code))


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400 error for the field `param`."""
    return ApiError(400, message, param=param, code=code)


def require(holds: bool, field: str, allowed: str, value: Any, *, param: str | None = None) -> None:
    """Raise ApiError 400, "FIELD must be ALLOWED, got VALUE", unless `holds`.

    `param` is the request field at fault if `field` is a part or a description of it.
    """
    if not holds:
        raise bad_request(param or field, f"{field} must be {allowed}, got {shown(value)}")


def require_given(field: str, value: Any, because: str = "") -> None:
    """Raise ApiError 400, "FIELD must be given BECAUSE", if the field is absent."""
    if value is None:
        raise bad_request(field, f"{field} must be given {because}".rstrip())


def require_equal(given: Mapping[str, Any], param: str) -> None:
    """Raise ApiError 400 for the field `param` if the values in `given` differ.

    `given` maps the names of fields that mean the same to their values.
    """
    if len(set(given.values())) > 1:
        values = ", ".join(map(str, given.values()))
        raise bad_request(param, f"{' and '.join(given)} must be equal, got {values}")


def require_absent(field: str, value: Any, because: str, code: str | None = None) -> None:
    """Raise ApiError 400, "FIELD must be absent BECAUSE", if the field is given."""
    if value is not None:
        raise bad_request(field, f"{field} must be absent {because}, got {shown(value)}", code)


def require_at_most(field: str, values: Sized | int | None, most: int, what: str) -> None:
    """Raise ApiError 400 if `field` has more than `most` elements, which `what` names.

    `values` is a collection or its size.
    """
    count = values if isinstance(values, int) else len(values or ())
    if count > most:
        raise bad_request(field, f"{field} must have at most {most} {what}, got {count}")


def shutting_down() -> ApiError:
    """Return the error 503 of a server that accepts no more requests."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def blamed_on_request(error: Exception, **fields: str) -> ApiError:
    """Convert a TypeError or ValueError of the engine's checks to an error 400 that names the request's field.

    `fields` maps engine parameters to request fields. Without an entry, the parameter `prompts` maps to "prompt".
    """
    text = str(error).removeprefix("sampling_params: ").removeprefix("sampling_params[0]: ")
    for name, field in {"prompts": "prompt", **fields}.items():
        text = re.sub(rf"^{name}(\['\w+'\]|\[0\])*", field, text)
    text = re.sub(r"\w+Params\(truncate_prompt_tokens=\.\.\.\)", "truncate_prompt_tokens", text)
    found = re.match(r"(?!the\b)\w+", text)  # texts that begin with "the" name no field
    code = "context_length_exceeded" if "max_model_len" in text and "must have at most" in text else None
    return ApiError(400, text, param=found[0] if found else None, code=code)


def engine_failure(reason: str) -> ApiError:
    """Return an error 500 for a request that the engine could not complete.

    Server internals are removed from `reason`.
    """
    return ApiError(500, f"the engine failed: {without_internals(reason)}", code="engine_error")


def without_internals(text: str) -> str:
    """Return the text without file paths and memory addresses."""
    return _INTERNAL.sub("...", text)


def shown(value: Any) -> str:
    """Return the repr of a request's value for error messages, shortened to 200 characters."""
    return shortened(repr(value), 200)


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return a text as valid Unicode. If it is longer than `longest` characters, its middle is removed."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
