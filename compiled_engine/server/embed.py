"""/v2/embed: text embeddings in the shape of Cohere's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from compiled_engine.frontend.prompts import LONGEST_SALT
from compiled_engine.server.errors import bad_request, require_absent, shown
from compiled_engine.server.pooling import REFUSED_HERE, EmbeddingRequest, encoded, values_as_json
from compiled_engine.server.replies import Reply, long_json_response, read_body
from compiled_engine.server.request_fields import Refused, refused
from compiled_engine.server.serving import Serving, serving_of

EMBED_REFUSED: dict[str, Refused] = {
    **REFUSED_HERE,
    **refused("give texts", images=([],), inputs=([],)),
}
# input_type -> alternative names of the checkpoint's prompt.
PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage")}
VectorType = Literal["float", "base64", "binary", "ubinary"]


class EmbedRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /v2/embed.

    `input_type` selects one of the checkpoint's prompts, which is put before each text. The `embedding_types` binary
    and ubinary have one bit per value, 0 if the value is negative, packed into signed or unsigned bytes. With
    `truncate` END, the first tokens of a text are kept: at most `max_tokens`, or as many as the model takes. With NONE,
    a text that is too long is an error.
    """

    texts: list[str]
    model: str | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[VectorType], Meta(min_length=1)] | None = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Literal["END", "NONE"] = "END"
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=LONGEST_SALT)] | None = None


class Vectors(msgspec.Struct, kw_only=True):
    """The embeddings in the order of the texts, in each requested type."""

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API whose shape a response has."""

    version: str = "2"


class EmbedTokens(msgspec.Struct):
    """The number of tokens of all texts of a request."""

    input_tokens: int


class EmbedMeta(msgspec.Struct, kw_only=True):
    """Metadata of a response: the API's version and token counts."""

    api_version: ApiVersion
    tokens: EmbedTokens


class EmbedResponse(msgspec.Struct, kw_only=True):
    """The embeddings and their texts."""

    id: str
    texts: list[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: Vectors


async def embed(request: Request) -> Reply:
    """Handle POST /v2/embed."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, EmbedRequest, EMBED_REFUSED)
    if fields.truncate == "NONE":
        require_absent("max_tokens", fields.max_tokens, "where truncate is 'NONE'")
    asked = EmbeddingRequest(
        model=fields.model,
        input=fields.texts,
        dimensions=fields.output_dimension,
        truncate_prompt_tokens=None if fields.truncate == "NONE" else fields.max_tokens or -1,
        prompt_name=_prompt_name(serving, fields.input_type, ignored),
        priority=fields.priority,
        cache_salt=fields.cache_salt,
    )
    names = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
    outputs, answer = await encoded(request, asked, "embed", **names)
    kinds = list(dict.fromkeys(fields.embedding_types or ["float"]))
    vectors = [output.outputs.values for output in outputs]
    if vectors[0].size % 8 and (packed := [kind for kind in kinds if kind in ("binary", "ubinary")]):
        raise bad_request(
            "embedding_types",
            f"embedding_types must not have {packed[0]!r} unless a vector has a multiple of 8 values, got "
            f"{vectors[0].size} values",
        )
    meta = EmbedMeta(api_version=ApiVersion(), tokens=EmbedTokens(answer["usage"].prompt_tokens))
    response = EmbedResponse(id=answer["id"], texts=fields.texts, meta=meta, embeddings=Vectors())
    return long_json_response(_parts(response, kinds, vectors), ignored)


def _prompt_name(serving: Serving, input_type: str | None, ignored: list[str]) -> str | None:
    """Return the name of the checkpoint's prompt for `input_type`, or None to use no prompt.

    If the checkpoint has no prompts, a warning is added to `ignored`. Raises ApiError 400 if it has prompts, but none
    for `input_type`.
    """
    stated = serving.engine.config.model.pooling
    prompts = dict(stated.prompts) if stated is not None else {}
    if input_type is None:
        return None
    if not prompts:
        ignored.append("input_type is ignored: this model has no prompts")
        return None
    for name in (input_type, *PROMPTS.get(input_type, ())):
        if name in prompts:
            return name
    others = [kind for kind, names in PROMPTS.items() if not prompts.keys().isdisjoint(names)]
    allowed = ", ".join([*prompts, *others])
    raise bad_request(
        "input_type", f"input_type must be one of the model's prompts, {allowed}, got {shown(input_type)}"
    )


def _parts(response: EmbedResponse, kinds: Sequence[str], vectors: Sequence[np.ndarray]) -> Iterator[bytes]:
    """Yield `response` as JSON, with `vectors` in each of the types `kinds`, in parts that are each quick to encode."""
    yield msgspec.json.encode(response).removesuffix(b"}}")
    for place, kind in enumerate(kinds):
        yield b"," * (place > 0) + msgspec.json.encode(kind) + b":["
        for number, values in enumerate(vectors):
            yield b"," if number else b""
            yield from _in_form(values, kind)
        yield b"]"
    yield b"}}"


def _in_form(values: np.ndarray, kind: str) -> Iterator[bytes]:
    if kind in ("float", "base64"):
        encoding: Any = kind
        return values_as_json(values, encoding)
    packed = np.packbits(values >= 0).astype(np.int64)
    return values_as_json(packed - 128 * (kind == "binary"), None)
