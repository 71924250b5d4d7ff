"""/openapi.json: what the server takes and gives, made of the types that it reads and writes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.server.chat_protocol import ChatChunk, ChatRequest, ChatResponse
from compiled_engine.server.completion_protocol import CompletionRequest, CompletionResponse
from compiled_engine.server.errors import ErrorResponse
from compiled_engine.server.middleware import OPEN_PATHS
from compiled_engine.server.model_list import Load, ModelCard, ModelList, Version
from compiled_engine.server.openapi_bounds import bound_schemas
from compiled_engine.server.replies import json_response
from compiled_engine.server.responses_protocol import ResponseObject, ResponsesRequest
from compiled_engine.server.serving import Serving, serving_of
from compiled_engine.server.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

SCHEMAS = "#/components/schemas/{name}"
ERRORS = {
    400: "The request cannot be honoured; `param` names the field. What no schema can say: a prompt that has too many "
    "tokens for the model's length (code `context_length_exceeded`), parameters that together forbid every token "
    "(`no_token_allowed`).",
    401: "The API key is missing or wrong.",
    404: "There is no such path, or no such model.",
    405: "The path does not know this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    500: "The server failed.",
    503: "The server is busy, shutting down, or has lost its engine.",
}
OF_ALL = (401, 405, 500)
OF_BODIES = (400, 404, 408, 413, 415, 503)


@dataclass(frozen=True)
class Operation:
    """text: what it does. takes, gives: the bodies' types; a `str` is text, None is nothing. event: of its stream."""

    path: str
    method: str
    text: str
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | type[str] | None = None
    event: type[msgspec.Struct] | type[str] | None = None
    errors: tuple[int, ...] = ()


OPERATIONS = (
    Operation("/v1/completions", "post", "Complete prompts.", CompletionRequest, CompletionResponse,
              CompletionResponse, OF_BODIES),
    Operation("/v1/chat/completions", "post", "Continue a conversation.", ChatRequest, ChatResponse, ChatChunk,
              OF_BODIES),
    Operation("/v1/responses", "post", "Respond to a conversation; nothing is kept.", ResponsesRequest, ResponseObject,
              str, OF_BODIES),
    Operation("/tokenize", "post", "Token ids of a text or a conversation.", TokenizeRequest, TokenizeResponse,
              None, OF_BODIES),
    Operation("/detokenize", "post", "The text of token ids.", DetokenizeRequest, DetokenizeResponse, None, OF_BODIES),
    Operation("/v1/models", "get", "The names of the model.", None, ModelList),
    Operation("/v1/models/{model}", "get", "One name of the model.", None, ModelCard, None, (404,)),
    Operation("/version", "get", "The engine's version.", None, Version),
    Operation("/health", "get", "Whether the engine lives.", None, None, None, (503,)),
    Operation("/ping", "get", "Whether the engine lives.", None, None, None, (503,)),
    Operation("/load", "get", "Completions that run or wait.", None, Load),
    Operation("/ready", "get", "Whether requests are taken.", None, None, None, (503,)),
    Operation("/metrics", "get", "Figures for Prometheus.", None, str, None, (503,)),
)  # fmt: skip


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return json_response(document(serving_of(request)))


def document(serving: Serving) -> dict[str, Any]:
    """The OpenAPI document of a server, with the bounds of its options and its model."""
    from compiled_engine import __version__

    types = {each for one in OPERATIONS for each in (one.takes, one.gives, one.event) if each not in (None, str)}
    ordered = sorted((*types, ErrorResponse), key=str)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=SCHEMAS)
    bound_schemas(schemas, serving)
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one)
    components: dict[str, Any] = {"schemas": schemas}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "compiled_engine", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if serving.options.api_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
        for path in OPEN_PATHS:
            paths[path]["get"]["security"] = []
    return result


def _operation(one: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.gives is str:
        content["text/plain"] = {"schema": {"type": "string"}}
    elif one.gives is not None:
        content["application/json"] = {"schema": _schema(one.gives)}
    if one.event is not None:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot say what events are
    success: dict[str, Any] = {"description": "Done."} | ({"content": content} if content else {})
    result: dict[str, Any] = {"summary": one.text, "responses": {"200": success}}
    for status in sorted({*one.errors, *OF_ALL}):
        result["responses"][str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _schema(ErrorResponse)}},
        }
    if one.takes is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(one.takes)}}}
    if "{model}" in one.path:
        result["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return result


def _schema(kind: Any) -> dict[str, str]:
    return {"$ref": SCHEMAS.format(name=kind.__name__)}
