"""The endpoints /v1/embeddings, /classify and /pooling, which return vectors or probabilities for texts."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.features.pooling.frontend.outputs import PoolingOutput, PoolingRequestOutput
from compiled_engine.features.pooling.frontend.processor import PoolingBounds
from compiled_engine.features.pooling.frontend.task import PoolingParams
from compiled_engine.frontend.prompts import LONGEST_SALT
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.server.cache_salt import cache_salt, salted
from compiled_engine.server.chat_messages import ChatMessage, messages_for_template
from compiled_engine.server.errors import (
    bad_request,
    blamed_on_request,
    engine_failure,
    require_absent,
    require_given,
    shutting_down,
)
from compiled_engine.server.options import Limits
from compiled_engine.server.protocol import PromptTokensDetails, parse_prompts
from compiled_engine.server.replies import Reply, long_json_response, read_body, unless_gone, warned
from compiled_engine.server.request_fields import REFUSED, Refused, refused
from compiled_engine.server.serving import Serving, serving_of

# Values encoded as JSON before other work may run.
VALUES_AT_ONCE = 1 << 14
Result = TypeVar("Result", bound="Sequence[PoolingRequestOutput[Any]]")
Encoding = Literal["float", "base64"]
REFUSED_HERE: dict[str, Refused] = {
    **REFUSED,
    **refused("truncate_prompt_tokens keeps the first tokens", truncation_side=("right",)),
    **refused(embed_dtype=("float32",), endianness=("little", "native")),
}


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields of every pooling request.

    `truncate_prompt_tokens` keeps the first tokens of a text; -1 keeps as many as the model takes. `use_activation`
    false returns raw values. `priority` and `cache_salt` mean the same as for completions.
    """

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=LONGEST_SALT)] | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of a request to /v1/embeddings.

    `input` is text, token ids, or a list of either. `encoding_format` base64 encodes little-endian 32-bit floats.
    `messages` is a chat that replaces `input`; `chat_template_kwargs` and `add_generation_prompt` are for the chat
    template. `normalize` false returns vectors that are not normalised. `prompt_name` selects one of the checkpoint's
    prompts, which is put before each text.
    """

    input: Any = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class ClassificationRequest(PoolingFields, kw_only=True):
    """The body of a request to /classify. `input` is text, token ids, or a list of either."""

    input: Any


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of a request to /pooling.

    `task` is embed or classify, depending on the model, or token_embed or token_classify for a result per token.
    """

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Token counts over all texts of a request."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(msgspec.Struct, kw_only=True):
    """The embedding of a text."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class PoolingData(msgspec.Struct, kw_only=True):
    """The values computed for a text, or for each of its tokens."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class ClassificationData(msgspec.Struct, kw_only=True):
    """The probabilities of a text's classes. `label` is the most likely class, or null if the classes have no names."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class PoolingAnswer(msgspec.Struct, kw_only=True):
    """The fields of every pooling response."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class EmbeddingResponse(PoolingAnswer, kw_only=True):
    """The embeddings, in the order of the texts."""

    data: list[EmbeddingData]


class PoolingResponse(PoolingAnswer, kw_only=True):
    """The results, in the order of the texts."""

    data: list[PoolingData]


class ClassificationResponse(PoolingAnswer, kw_only=True):
    """The class probabilities, in the order of the texts."""

    data: list[ClassificationData]


async def embeddings(request: Request) -> Reply:
    """Handle POST /v1/embeddings."""
    fields, outputs, answer, ignored = await _encoded(request, EmbeddingRequest, "embed")
    return _with_values(EmbeddingResponse(**answer, data=[]), EmbeddingData, "embedding", fields, outputs, ignored)


async def pooling(request: Request) -> Reply:
    """Handle POST /pooling."""
    fields, outputs, answer, ignored = await _encoded(request, PoolingRequest, None)
    return _with_values(PoolingResponse(**answer, data=[]), PoolingData, "data", fields, outputs, ignored)


async def classify(request: Request) -> Reply:
    """Handle POST /classify."""
    _, outputs, answer, ignored = await _encoded(request, ClassificationRequest, "classify")
    stated = serving_of(request).engine.config.model.pooling
    labels = stated.labels if stated is not None else ()

    def items() -> Iterator[bytes]:
        for i, output in enumerate(outputs):
            probs = output.outputs.values.tolist()
            label = labels[probs.index(max(probs))] if len(labels) == len(probs) else None
            yield msgspec.json.encode(ClassificationData(index=i, label=label, probs=probs, num_classes=len(probs)))

    return _listed(ClassificationResponse(**answer, data=[]), ([item] for item in items()), outputs, ignored)


def _with_values(
    answer: Any, kind: type[Any], name: str, fields: Any, outputs: Sequence[Any], ignored: Sequence[str]
) -> Reply:
    """Return the response `answer` with an item of the type `kind` for each output.

    name: the field of the item that gets the output's values. fields: the request, which says how values are encoded.
    ignored: warnings, which a header of the response lists.
    """

    def item(index: int, values: np.ndarray) -> Iterator[bytes]:
        head = msgspec.json.encode(kind(index=index, **{name: []}))
        yield head.removesuffix(b"[]}")
        yield from values_as_json(values, fields.encoding_format)
        yield b"}"

    items = (item(i, output.outputs.values) for i, output in enumerate(outputs))
    return _listed(answer, items, outputs, ignored)


def _listed(
    answer: PoolingAnswer, items: Iterable[Iterable[bytes]], outputs: Sequence[Any], ignored: Sequence[str]
) -> Reply:
    """Return the response `answer` with these items in its last field, `data`.

    items: each is JSON in parts. outputs: the results that the items are made from. ignored: warnings, which a header
    of the response lists.
    """

    def parts() -> Iterator[bytes]:
        yield msgspec.json.encode(answer).removesuffix(b"]}")
        for i, item in enumerate(items):
            yield b"," if i else b""
            yield from item
        yield b"]}"

    if sum(output.outputs.values.size for output in outputs) > VALUES_AT_ONCE:
        return long_json_response(parts(), ignored)
    return Response(b"".join(parts()), headers={"content-type": "application/json", **warned(ignored)})


async def _encoded(request: Request, kind: type[Any], task: str | None) -> tuple[Any, Sequence[Any], Any, list[str]]:
    """Read a request body of the type `kind`, and pool its texts. See `encoded` for `task`.

    Returns the body, the results, the fields that all responses have, and the warnings. Raises ApiError.
    """
    fields, ignored = await read_body(request, serving_of(request), kind, REFUSED_HERE)
    outputs, answer = await encoded(request, fields, task)
    return fields, outputs, answer, ignored


async def encoded(
    request: Request, fields: Any, task: str | None, **names: str
) -> tuple[Sequence[PoolingRequestOutput[PoolingOutput]], dict[str, Any]]:
    """Pool the texts of a request. Return the result of each text, and the fields that all responses have.

    fields: the request's body. task: the pooling task; None for the task that the body names or, without one, for the
    model's own. names: names of the engine's parameters -> names of the body's fields, where they differ. Raises
    ApiError, and ClientDisconnect if the client disconnects.
    """
    serving = serving_of(request)
    model = serving.model(fields.model)
    messages = getattr(fields, "messages", None)
    given = names.pop("input", "input") if messages is None else "messages"
    texts: list[Any]
    if messages is None:
        require_given(given, fields.input)
        texts = parse_prompts(fields.input, serving.options.limits.max_inputs, given)
    else:
        texts = [await _chat(serving, fields)]
    salt = cache_salt(request, fields)

    async def encode() -> list[PoolingRequestOutput[PoolingOutput]]:
        return await serving.engine.encode(
            [salted(text, salt) for text in texts],
            pooling_params(fields),
            pooling_task=task or getattr(fields, "task", None),
            prompt_name=getattr(fields, "prompt_name", None),
            priority=fields.priority or 0,
            bounds=bounds_of(serving.options.limits),
            lora_request=serving.adapter(fields.model),
        )

    work = pooled(serving, len(texts), encode(), **names, prompts=given)
    outputs = await unless_gone(request.receive, work)
    return outputs, answer_of(serving, model, outputs, "embd")


async def _chat(serving: Serving, fields: EmbeddingRequest) -> dict[str, Any]:
    """Return the prompt that the chat template makes of `fields.messages`. Raises ApiError 400 for invalid fields."""
    assert fields.messages is not None
    for name in ("input", "prompt_name"):
        require_absent(name, getattr(fields, name), "where there are messages")
    chat, limits = serving.chat_format(), serving.options.limits
    rendered = await chat.render(
        messages_for_template(fields.messages, chat, limits),
        None,
        chat.settings(fields.chat_template_kwargs, None),
        add_generation_prompt=fields.add_generation_prompt,
    )
    return {"prompt": rendered.text, "prompt_token_ids": rendered.token_ids}


def pooling_params(fields: PoolingFields) -> PoolingParams:
    """Return the request's pooling parameters. Raises ApiError 400 for invalid ones."""
    try:
        return PoolingParams(
            dimensions=getattr(fields, "dimensions", None),
            use_activation=fields.use_activation,
            normalize=getattr(fields, "normalize", None),
            truncate_prompt_tokens=fields.truncate_prompt_tokens,
        )
    except ValueError as error:
        raise blamed_on_request(error) from error


def bounds_of(limits: Limits) -> PoolingBounds:
    """Return the engine's bounds on a pooling request.

    `max_body_bytes` also bounds the characters of all pairs that a request scores.
    """
    return PoolingBounds(limits.render_timeout, limits.max_pooled_values, limits.max_body_bytes)


async def pooled(serving: Serving, count: int, work: Coroutine[Any, Any, Result], **fields: str) -> Result:
    """Await `work`, which pools `count` texts, and return its result.

    See `blamed_on_request` for `fields`. Raises ApiError: 400 if the engine refuses the request or tokenising takes too
    long, 503 if the server is busy or stops, 500 if the engine fails.
    """
    begin = time.perf_counter()
    try:
        with serving.admission.admit(count):
            outputs = await work
    except EngineDeadError as error:
        raise engine_failure(str(error)) from error
    except TimeoutError as error:
        name = list(fields.values())[-1]
        raise bad_request(
            name, f"{name} took more than {serving.options.limits.render_timeout:g} s to tokenise"
        ) from error
    except (TypeError, ValueError) as error:
        raise blamed_on_request(error, **fields) from error
    except RuntimeError as error:
        if serving.stopping.is_set():
            raise shutting_down() from error
        raise engine_failure(str(error)) from error
    finally:
        work.close()
    serving.metrics.pooled(outputs, time.perf_counter() - begin)
    return outputs


def answer_of(
    serving: Serving, model: str, outputs: Sequence[PoolingRequestOutput[Any]], prefix: str
) -> dict[str, Any]:
    """Return the fields of PoolingAnswer by name, for the results `outputs`. `prefix` begins the id."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": serving.now(),
        "model": model,
        "usage": usage_of(outputs),
    }


def usage_of(outputs: Sequence[PoolingRequestOutput[Any]]) -> PoolingUsage:
    """Return the token counts over all results."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = PromptTokensDetails(sum(output.num_cached_tokens or 0 for output in outputs))
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=cached)


def values_as_json(values: np.ndarray, encoding: Encoding | None) -> Iterator[bytes]:
    """Yield the values as JSON, in parts. The JSON is a list or, with base64, a string of little-endian float32."""
    if encoding == "base64":
        data = values.astype("<f4").tobytes()
        size = 3 * VALUES_AT_ONCE  # multiples of three bytes need no padding
        yield b'"'
        yield from (base64.b64encode(data[start : start + size]) for start in range(0, len(data), size))
        yield b'"'
        return
    rows = max(VALUES_AT_ONCE // values[0].size, 1) if values.ndim > 1 and len(values) else VALUES_AT_ONCE
    yield b"["
    for start in range(0, len(values), rows):
        yield b"," if start else b""
        yield msgspec.json.encode(values[start : start + rows].tolist())[1:-1]
    yield b"]"
