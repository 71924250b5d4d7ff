"""Generate /openapi.json from the server's request and response types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.server.chat_format import LONGEST_SETTING
from compiled_engine.server.embed import EmbedRequest, EmbedResponse
from compiled_engine.server.errors import ErrorResponse, MessageErrorResponse
from compiled_engine.server.message_blocks import CountTokensRequest, MessagesRequest
from compiled_engine.server.messages import InputTokens, Message
from compiled_engine.server.middleware import OPEN_PATHS
from compiled_engine.server.model_list import Load, ModelCard, ModelList, Version
from compiled_engine.server.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
)
from compiled_engine.server.protocol import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ResponseObject,
    ResponsesRequest,
)
from compiled_engine.server.replies import json_response
from compiled_engine.server.rerank import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from compiled_engine.server.serving import Serving, serving_of
from compiled_engine.server.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from compiled_engine.server.transcriptions import TranscriptionForm, TranscriptionResponse

SCHEMAS = "#/components/schemas/{name}"
ERRORS = {
    400: "The request cannot be honoured; `param` names the field. What no schema can say: a prompt that has too many "
    "tokens for the context length (code `context_length_exceeded`), parameters that together forbid every token "
    "(`no_token_allowed`).",
    401: "The API key is missing or wrong.",
    404: "There is no such path, or no such model.",
    405: "The path does not know this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is no JSON, or no form.",
    500: "The server failed.",
    503: "The server is busy, shutting down, or has lost its engine.",
}
OF_ALL = (401, 405, 500)
OF_BODIES = (400, 404, 408, 413, 415, 503)


@dataclass(frozen=True)
class Operation:
    """An operation of the API: an HTTP method of a path, with its types and errors."""

    path: str
    method: str
    text: str  # its summary
    takes: type[msgspec.Struct] | None = None  # type of the request body, which is JSON
    gives: type[msgspec.Struct] | type[str] | None = None  # type of the response body; `str` is plain text
    event: type[msgspec.Struct] | type[str] | None = None  # type of the events of a stream
    errors: tuple[int, ...] = ()  # status codes of its errors
    error: type[msgspec.Struct] = ErrorResponse
    form: type[msgspec.Struct] | None = None  # type of the request body, if it is a form with a file


OPERATIONS = (
    Operation("/v1/completions", "post", "Complete prompts.", CompletionRequest, CompletionResponse,
              CompletionResponse, OF_BODIES),
    Operation("/v1/chat/completions", "post", "Continue a conversation.", ChatRequest, ChatResponse, ChatChunk,
              OF_BODIES),
    Operation("/v1/responses", "post", "Respond to a conversation; nothing is kept.", ResponsesRequest, ResponseObject,
              str, OF_BODIES),
    Operation("/v1/messages", "post", "Continue a conversation, in the shape of Anthropic's API.", MessagesRequest,
              Message, str, OF_BODIES, MessageErrorResponse),
    Operation("/v1/messages/count_tokens", "post", "The number of a conversation's tokens.", CountTokensRequest,
              InputTokens, None, OF_BODIES, MessageErrorResponse),
    Operation("/v1/embeddings", "post", "A vector for each text.", EmbeddingRequest, EmbeddingResponse, None,
              OF_BODIES),
    Operation("/v2/embed", "post", "Vectors of texts, in the shape of Cohere's API.", EmbedRequest, EmbedResponse, None,
              OF_BODIES),
    Operation("/pooling", "post", "The model's result for each text.", PoolingRequest, PoolingResponse, None,
              OF_BODIES),
    Operation("/classify", "post", "Probabilities of labels for each text.", ClassificationRequest,
              ClassificationResponse, None, OF_BODIES),
    *(Operation(f"/v1/audio/{name}", "post", text, None, TranscriptionResponse, None, OF_BODIES, form=TranscriptionForm)
      for name, text in (("transcriptions", "The text of an audio file."), ("translations", "Its text in English."))),
    *(Operation(path, "post", "A score for each pair of texts.", ScoreRequest, ScoreResponse, None, OF_BODIES)
      for path in ("/score", "/v1/score")),
    *(Operation(path, "post", "Documents in the order of their scores.", RerankRequest, RerankResponse, None, OF_BODIES)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
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
    """Handle GET /openapi.json."""
    return json_response(document(serving_of(request)))


def document(serving: Serving) -> dict[str, Any]:
    """Return the OpenAPI document. Its schemas have the bounds that the server's options and model set."""
    from compiled_engine import __version__

    types = {
        each for one in OPERATIONS for each in (one.takes, one.gives, one.event, one.form) if each not in (None, str)
    }
    ordered = sorted({*types, *(one.error for one in OPERATIONS)}, key=str)
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
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe events
    success: dict[str, Any] = {"description": "Done."} | ({"content": content} if content else {})
    result: dict[str, Any] = {"summary": one.text, "responses": {"200": success}}
    for status in sorted({*one.errors, *OF_ALL}):
        result["responses"][str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _schema(one.error)}},
        }
    if one.takes is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(one.takes)}}}
    if one.form is not None:
        result["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _schema(one.form)}}}
    if "{model}" in one.path:
        result["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return result


def _schema(kind: Any) -> dict[str, str]:
    return {"$ref": SCHEMAS.format(name=kind.__name__)}


# Constraints that request types cannot express: bounds that depend on the server's options and on the model.

OF_MESSAGES = ("MessagesRequest", "CountTokensRequest")
REQUESTS = ("CompletionRequest", "ChatRequest", "ResponsesRequest", *OF_MESSAGES)


def _item(kind: str, required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [*required, *(["type"] if kind != "message" else [])],
        "properties": {"type": {"const": kind} if kind != "message" else {"enum": [kind, None]}, **properties},
    }


TEXT = {"type": "string"}
NAME = {"type": "string", "minLength": 1}
PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": TEXT},
}
CONTENT = {"anyOf": [TEXT, {"type": "array", "items": PART}]}
INPUT_ITEMS = [
    _item("message", ("role", "content"), role={"enum": ["system", "developer", "user", "assistant"]}, content=CONTENT),
    _item("function_call", ("call_id", "name", "arguments"), call_id=NAME, name=NAME, arguments=TEXT),
    _item("function_call_output", ("call_id", "output"), call_id=NAME, output=CONTENT),
]
EXTRA = "#/components/schemas/ExtraValue"
# Arguments of logits processors: any JSON with non-empty names.
EXTRA_VALUE = {
    "anyOf": [
        {"type": ["string", "number", "boolean", "null"]},
        {"type": "array", "items": {"$ref": EXTRA}},
        {"type": "object", "propertyNames": {"minLength": 1}, "additionalProperties": {"$ref": EXTRA}},
    ]
}


def bound_schemas(schemas: dict[str, Any], serving: Serving) -> None:
    """Add the bounds that depend on the server's options and the model to the request schemas, in place."""
    limits, last_token = serving.options.limits, serving.engine.limits.vocab_size - 1
    token_id = {"type": "integer", "minimum": 0, "maximum": last_token}
    token_ids = {"type": "array", "items": token_id, "minItems": 1}
    most_logprobs = {} if limits.max_logprobs == -1 else {"maximum": limits.max_logprobs, "minimum": 0}
    for name in REQUESTS:
        fields = schemas[name]["properties"]
        _narrow(fields, ("n",), maximum=limits.max_completions if name in ("CompletionRequest", "ChatRequest") else 1)
        lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        _narrow(fields, lengths, maximum=serving.max_answer_tokens)
        _narrow(fields, ("logprobs", "prompt_logprobs", "top_logprobs"), **most_logprobs)
        _narrow(fields, ("min_tokens",), maximum=min(serving.max_answer_tokens, serving.max_model_len - 1))
        shortened = {"type": "integer", "minimum": 1, "maximum": serving.max_model_len}
        fields["truncate_prompt_tokens"] = {"anyOf": [shortened, {"enum": [-1, None]}]}
        for branch in _branches(fields["extra_args"]):
            if branch.get("type") == "object":
                branch |= {"propertyNames": {"minLength": 1}, "additionalProperties": {"$ref": EXTRA}}
        if name != "CompletionRequest":
            _narrow(fields, ("max_tokens",), minimum=1)
        _narrow(fields, ("seed",), minimum=-(2**63), maximum=2**64 - 1)
        _narrow(fields, ("stop",), maxItems=limits.max_stop, maxLength=limits.max_stop_length)
        _narrow(fields, ("stop_token_ids", "allowed_token_ids"), items=token_id)
        _narrow(fields, ("stop_token_ids", "bad_words", "bad_words_token_ids"), maxItems=limits.max_token_list)
        _narrow(fields, ("bad_words_token_ids",), items=token_ids)
        for branch in _branches(fields["logit_bias"]):  # token ids as text
            if branch.get("type") == "object":
                branch["propertyNames"] = {"pattern": f"^({up_to(last_token)})$"}
                branch["maxProperties"] = limits.max_token_list
        if "model" in fields:
            fields["model"] = {"enum": [*serving.names, *serving.adapters, None]}
        if name in OF_MESSAGES:
            fields |= {"prompt_logprobs": NULL, "return_token_ids": {"enum": [False, None]}}
        elif "tool_choice" in fields:
            fields["tool_choice"] = tool_choices(has_tools=serving.chat is not None and serving.chat.tools is not None)
        bound_forms(schemas[name])
        if "tools" in fields and (serving.chat is None or serving.chat.tools is None):
            fields["tools"] = {"enum": [[], None]}
        if "chat_template_kwargs" in fields:
            fields["chat_template_kwargs"] = _settings(serving)
        if serving.chat is not None and serving.chat.knows("reasoning_effort"):
            _narrow(fields, ("reasoning_effort",), maxLength=LONGEST_SETTING)
        elif "reasoning_effort" in fields and serving.options.strict:
            fields["reasoning_effort"] = {"const": None}
    schemas["ExtraValue"] = EXTRA_VALUE
    if serving.chat is None or not serving.chat.knows("tools"):
        schemas["TokenizeRequest"]["properties"]["tools"] = {"enum": [[], None]}
    schemas["ChatRequest"]["anyOf"] = [
        {"properties": {"top_logprobs": {"type": "null"}}},
        {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
    ]
    schemas["ChatMessage"]["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ]
    schemas["TokenizeRequest"]["properties"]["chat_template_kwargs"] = _settings(serving)
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
    ]
    text = {"type": "string", "minLength": 1}
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": limits.max_completions}
    batch = {"type": "array", "items": token_ids, "minItems": 1, "maxItems": limits.max_completions}
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [text, texts, token_ids, batch]}
    for name in ("EmbeddingRequest", "PoolingRequest", "ClassificationRequest"):
        many = [each | {"maxItems": limits.max_inputs} for each in (texts, batch)]
        schemas[name]["properties"]["input"] = {"anyOf": [text, token_ids, *many]}
    schemas["EmbedRequest"]["properties"]["texts"] = texts | {"maxItems": limits.max_inputs}
    items = {"type": "array", "minItems": 1, "items": {"anyOf": INPUT_ITEMS}}
    schemas["ResponsesRequest"]["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}
    for name in ("ChatRequest", "TokenizeRequest", *OF_MESSAGES):
        _narrow(schemas[name]["properties"], ("messages",), minItems=1, maxItems=limits.max_messages)
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] = token_id


def up_to(most: int) -> str:
    """Return a regular expression for the decimal numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    several = len(digits) > 1
    branches = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if several else []
    for place, digit in enumerate(digits):
        least = 1 if several and place == 0 else 0
        if int(digit) > least:
            branches.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return "|".join([*branches, digits])


def _settings(serving: Serving) -> dict[str, Any]:
    value = {"type": ["string", "number", "boolean"], "maxLength": LONGEST_SETTING}
    properties = dict.fromkeys(serving.options.allow_chat_template_kwarg, value)
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _narrow(fields: dict[str, Any], names: tuple[str, ...], **bounds: Any) -> None:
    """Add JSON Schema bounds to the named fields, in place.

    The schema of a field, and each schema of its anyOf, gets only the bounds that apply to its type.
    """
    kinds = {
        "maximum": "integer",
        "minimum": "integer",
        "maxItems": "array",
        "maxLength": "string",
        "items": "array",
    } | {"minItems": "array"}
    for name in names:
        for branch in _branches(fields.get(name, {})):
            branch |= {key: value for key, value in bounds.items() if branch.get("type") == kinds[key]}


def _branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    yield from schema.get("anyOf", ())


# Schemas of answer formats. They cannot express whether a grammar compiles.

NULL: dict[str, Any] = {"type": "null"}
SCHEMA = {"type": "object", "description": "A JSON schema. Keywords that are not supported are refused."}
TEXT_OF_FORM: dict[str, Any] = {"type": "string", "minLength": 1}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"anyOf": [SCHEMA, {**TEXT_OF_FORM, "description": "The same as text."}]},
    "regex": {**TEXT_OF_FORM, "description": "In the syntax of Rust."},
    "choice": {"type": "array", "minItems": 1, "items": TEXT_OF_FORM},
    "grammar": {**TEXT_OF_FORM, "description": "Lark or GBNF."},
    "json_object": {"const": True},
}
ABSENT = {name: NULL if name != "json_object" else {"enum": [False, None]} for name in FORMS}
WHITESPACE = {
    "disable_any_whitespace": {"type": ["boolean", "null"]},
    "whitespace_pattern": {"anyOf": [TEXT_OF_FORM, NULL]},
}


def _form(name: str) -> dict[str, Any]:
    """Return a schema of structured_outputs that requires the format `name` and forbids all other formats."""
    fields = {**ABSENT, **WHITESPACE, name: FORMS[name]}
    return {"type": "object", "required": [name], "properties": fields, "additionalProperties": False}


STRUCTURED = {"anyOf": [*map(_form, FORMS), NULL]}


def _format(kind: str, **further: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *further], "properties": {"type": {"const": kind}, **further}}


TEXT_FORMAT = {"anyOf": [_format("text"), NULL]}
STRICT = {"type": ["boolean", "null"]}
DESCRIBED = {"type": "object", "properties": {"schema": {"anyOf": [SCHEMA, NULL]}, "strict": STRICT}}
FORMATS = {"anyOf": [*TEXT_FORMAT["anyOf"], _format("json_object"), _format("json_schema", json_schema=DESCRIBED)]}


def bound_forms(request: dict[str, Any]) -> None:
    """Add the schemas of structured_outputs and response_format to a request's schema, in place."""
    fields = request["properties"]
    fields["structured_outputs"] = STRUCTURED
    if "response_format" in fields:
        fields["response_format"] = FORMATS
        one = [{"properties": {"structured_outputs": NULL}}, {"properties": {"response_format": TEXT_FORMAT}}]
        request.setdefault("allOf", []).append({"anyOf": one})


def tool_choices(*, has_tools: bool) -> dict[str, Any]:
    """Return the JSON schema of the field tool_choice.

    If `has_tools` is false, the schema allows only "auto", "none" and null, which do not require a call.
    """
    choices: dict[str, Any] = {"enum": ["auto", "none", None]}
    if not has_tools:
        return choices
    named = {"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}}
    return {"anyOf": [choices, {"const": "required"}, named]}
