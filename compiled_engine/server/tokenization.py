"""The endpoints /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.frontend.prompts import has_long_text
from compiled_engine.frontend.tokenizer import find_tokenizer_folder, read_json_if_there
from compiled_engine.frontend.tokenizer_files import CONFIG_FILE
from compiled_engine.server.chat_messages import (
    ChatMessage,
    Tool,
    begins_an_answer,
    messages_for_template,
    tools_for_template,
)
from compiled_engine.server.chat_prompt import with_images
from compiled_engine.server.errors import bad_request
from compiled_engine.server.replies import json_response, read_body, unless_gone
from compiled_engine.server.sampling_fields import TokenId
from compiled_engine.server.serving import Serving, serving_of

TOKENIZER_INFO = "/tokenizer_info"
# Fields of tokenizer_config.json with local file names of its author.
PATHS = frozenset({"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"})


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /tokenize: either `prompt` or `messages`.

    With `add_special_tokens`, the tokenizer adds its special tokens around a prompt. `return_token_strs` adds the
    vocabulary entries. The other fields apply to messages, as in a chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct):
    """The token ids. `count` is their number; `max_model_len` is the context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to decode, including special tokens."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    """The text of the tokens."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Handle POST /tokenize."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, TokenizeRequest)
    serving.model(fields.model)
    return json_response(await unless_gone(request.receive, _tokenized(serving, fields)), ignored)


async def _tokenized(serving: Serving, fields: TokenizeRequest) -> TokenizeResponse:
    tokenizer = serving.tokenizer()
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("prompt", "either prompt or messages must be given, and not both")
    chat = serving.chat if fields.messages is None else serving.chat_format()
    tools, settings = None, {}
    if chat is not None:
        tools = tools_for_template(fields.tools, chat, serving.options.limits)
        settings = chat.settings(fields.chat_template_kwargs)
    if chat is not None and fields.messages is not None:
        rendered = await chat.render(
            messages_for_template(fields.messages, chat, serving.options.limits),
            tools,
            settings,
            add_generation_prompt=begins_an_answer(fields.add_generation_prompt, fields.continue_final_message),
            continue_final_message=bool(fields.continue_final_message),
        )
        ids = list((await with_images(serving, rendered))["prompt_token_ids"])
    else:
        add_special_tokens = fields.add_special_tokens is not False
        text = fields.prompt or ""
        encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        try:
            ids = await serving.texts.run("prompt", len(text), encode) if has_long_text(text) else encode()
        except UnicodeEncodeError as error:
            raise bad_request("prompt", "prompt must be valid Unicode") from error
    texts = None
    if fields.return_token_strs:
        texts = await serving.texts.run("return_token_strs", len(ids), lambda: list(map(tokenizer.entry, ids)))
    return TokenizeResponse(len(ids), serving.max_model_len, ids, texts)


async def detokenize(request: Request) -> Response:
    """Handle POST /detokenize."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, DetokenizeRequest)
    serving.model(fields.model)
    vocab_size = serving.engine.limits.vocab_size
    if (largest := max(fields.tokens, default=0)) >= vocab_size:
        place = fields.tokens.index(largest)
        raise bad_request(
            "tokens", f"tokens[{place}] must be within the vocabulary, 0 to {vocab_size - 1}, got {largest}"
        )
    decode = partial(serving.tokenizer().decode, fields.tokens)
    text = await unless_gone(request.receive, serving.texts.run("tokens", len(fields.tokens), decode))
    return json_response(DetokenizeResponse(text), ignored)


async def tokenizer_info(request: Request) -> Response:
    """Handle GET /tokenizer_info: send the fields of tokenizer_config.json and the chat template in use."""
    serving = serving_of(request)
    tokenizer, config = serving.tokenizer(), serving.engine.config
    folder = find_tokenizer_folder(config.tokenizer, config.model.path)
    assert folder is not None  # the tokenizer was loaded from it
    stated = await asyncio.to_thread(read_json_if_there, folder / CONFIG_FILE)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens, **stated}
    template = tokenizer.chat_template if serving.chat is None else serving.chat.given or tokenizer.chat_template
    if template is not None:
        fields["chat_template"] = template
    return json_response({name: value for name, value in fields.items() if name not in PATHS})
