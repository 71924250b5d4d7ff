"""What the types of requests cannot say: bounds that depend on the server's options and on the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiled_engine.server.chat_format import LONGEST_SETTING
from compiled_engine.server.openapi_forms import bound_forms, tool_choices
from compiled_engine.server.serving import Serving

REQUESTS = ("CompletionRequest", "ChatRequest", "ResponsesRequest")


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
# What a logits processor may be told: any JSON whose names are not empty.
EXTRA_VALUE = {
    "anyOf": [
        {"type": ["string", "number", "boolean", "null"]},
        {"type": "array", "items": {"$ref": EXTRA}},
        {"type": "object", "propertyNames": {"minLength": 1}, "additionalProperties": {"$ref": EXTRA}},
    ]
}


def bound_schemas(schemas: dict[str, Any], serving: Serving) -> None:
    """Complete the JSON schemas of requests in place."""
    limits, last_token = serving.options.limits, serving.engine.limits.vocab_size - 1
    token_id = {"type": "integer", "minimum": 0, "maximum": last_token}
    token_ids = {"type": "array", "items": token_id, "minItems": 1}
    most_logprobs = {} if limits.max_logprobs == -1 else {"maximum": limits.max_logprobs, "minimum": 0}
    for name in REQUESTS:
        fields = schemas[name]["properties"]
        _narrow(fields, ("n",), maximum=1 if name == "ResponsesRequest" else limits.max_completions)
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
            fields["model"] = {"enum": [*serving.names, None]}
        if "tool_choice" in fields:
            fields["tool_choice"] = tool_choices(has_tools=serving.chat is not None and serving.chat.tools is not None)
        bound_forms(schemas[name])
        if "tools" in fields and (serving.chat is None or serving.chat.tools is None):
            fields["tools"] = {"enum": [[], None]}
        if "chat_template_kwargs" in fields:
            fields["chat_template_kwargs"] = _settings(serving)
        _narrow(fields, ("reasoning_effort",), maxLength=LONGEST_SETTING)
        if "reasoning_effort" in fields and (serving.chat is None or not serving.chat.knows("reasoning_effort")):
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
    items = {"type": "array", "minItems": 1, "items": {"anyOf": INPUT_ITEMS}}
    schemas["ResponsesRequest"]["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}
    for name in ("ChatRequest", "TokenizeRequest"):
        _narrow(schemas[name]["properties"], ("messages",), minItems=1, maxItems=limits.max_messages)
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] = token_id


def up_to(most: int) -> str:
    """A regular expression for the decimal numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    several = len(digits) > 1
    branches = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if several else []
    for place, digit in enumerate(digits):
        least = 1 if several and place == 0 else 0
        if int(digit) > least:
            branches.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return "|".join([*branches, digits])


def _settings(serving: Serving) -> dict[str, Any]:
    """What requests may give to the chat template."""
    value = {"type": ["string", "number", "boolean"], "maxLength": LONGEST_SETTING}
    properties = dict.fromkeys(serving.options.chat_template_kwargs, value)
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _narrow(fields: dict[str, Any], names: tuple[str, ...], **bounds: Any) -> None:
    """Give fields bounds, each where its kind of value stands."""
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
