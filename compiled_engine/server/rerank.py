"""/score and /rerank: relevance of documents to a query, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.features.pooling.frontend.outputs import ScoringRequestOutput
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.errors import bad_request, require, require_at_most
from compiled_engine.server.pooling import (
    REFUSED_HERE,
    PoolingAnswer,
    PoolingFields,
    PoolingUsage,
    answer_of,
    bounds_of,
    pooled,
    pooling_params,
)
from compiled_engine.server.replies import json_response, read_body, unless_gone
from compiled_engine.server.request_fields import Refused, refused
from compiled_engine.server.serving import serving_of

COHERE = "/v2/rerank"  # returns documents only on request
# vLLM's names for the two sides of the pairs.
PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
REFUSED_OF_RERANK: dict[str, Refused] = {
    **REFUSED_HERE,
    **refused(rank_fields=(), max_chunks_per_doc=()),
    **refused("give truncate_prompt_tokens, which counts the tokens of a pair", max_tokens_per_doc=()),
}


class ScoreRequest(PoolingFields, kw_only=True):
    """The body of a request to /score.

    Two fields have the texts: queries and documents, queries and items, text_1 and text_2, or data_1 and data_2. The
    first field has as many texts as the second, or one text that is scored with each of the second. `instruction` is
    for rerankers whose template takes an instruction.
    """

    queries: Any = None
    documents: Any = None
    items: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    instruction: str | None = None


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of a pair of texts. `index` is the pair's index."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PoolingAnswer, kw_only=True):
    """The scores, in the order of the pairs."""

    data: list[ScoreData]


class RerankRequest(PoolingFields, kw_only=True):
    """The body of a request to /rerank.

    `documents` are texts, or objects with a text. `top_n` is the number of best documents returned; 0 or null
    for all. `instruction` is put into the model's template.
    `return_documents` false omits their texts.
    """

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RerankedDocument(msgspec.Struct):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """A document's score. `index` is its index in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


async def score(request: Request) -> Response:
    """Handle POST /score."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, ScoreRequest, REFUSED_HERE)
    model = serving.model(fields.model)
    names = _names(fields)
    queries, documents = (_texts(request, name, getattr(fields, name)) for name in names)
    outputs = await _scores(request, fields, queries, documents, names)
    data = [ScoreData(index=i, score=output.outputs.score) for i, output in enumerate(outputs)]
    return json_response(ScoreResponse(**answer_of(serving, model, outputs, "score"), data=data), ignored)


async def rerank(request: Request) -> Response:
    """Handle POST /rerank."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, RerankRequest, REFUSED_OF_RERANK)
    model = serving.model(fields.model)
    given = [document.get("text") if isinstance(document, dict) else document for document in fields.documents]
    documents = _texts(request, "documents", given)
    outputs = await _scores(request, fields, [fields.query], documents, ("query", "documents"))
    shows = request.url.path != COHERE if fields.return_documents is None else fields.return_documents
    results = [
        RerankResult(
            index=i,
            relevance_score=output.outputs.score,
            document=RerankedDocument(documents[i]) if shows else UNSET,
        )
        for i, output in enumerate(outputs)
    ]
    results.sort(key=lambda result: -result.relevance_score)
    answer = answer_of(serving, model, outputs, "rerank")
    response = RerankResponse(
        id=answer["id"], model=model, usage=answer["usage"], results=results[: fields.top_n or None]
    )
    return json_response(response, ignored)


async def _scores(
    request: Request, fields: Any, queries: list[str], documents: list[str], names: tuple[str, str]
) -> list[ScoringRequestOutput]:
    """Score each document with its query, or with the only query. Return the scores in the order of the documents.

    `names` are the request fields of queries and documents, for errors. Raises ApiError, also if the numbers of texts
    do not match.
    """
    serving = serving_of(request)
    allowed = f"one, or one for each of the {len(documents)} {names[1]}"
    require(len(queries) in (1, len(documents)), names[0], allowed, len(queries))
    work = serving.engine.score(
        queries,
        documents,
        pooling_params(fields),
        instruction=fields.instruction,
        priority=fields.priority or 0,
        cache_salt=cache_salt(request, fields),
        bounds=bounds_of(serving.options.limits),
        lora_request=serving.adapter(fields.model),
    )
    scored = pooled(serving, len(documents), work, queries=names[0], documents=names[1])
    return await unless_gone(request.receive, scored)


def _names(fields: ScoreRequest) -> tuple[str, str]:
    """Return the names of the two fields with texts, such as queries and documents (see PAIRS).

    Raises ApiError 400 if fields of different pairs are given.
    """
    given = {name for pair in PAIRS for name in pair if getattr(fields, name) is not None}
    names = max(PAIRS, key=lambda pair: len(given.intersection(pair)))
    if others := sorted(given.difference(names)):
        allowed = ", ".join(f"{first} with {second}" for first, second in PAIRS)
        raise bad_request(others[0], f"{others[0]} must not be given with {names[0]}; allowed: {allowed}")
    return names


def _texts(request: Request, name: str, given: Any) -> list[str]:
    """Return the texts in the field `name`, whose value is `given`: a string or a list of strings.

    Raises ApiError 400 for another value, and if there are no texts or too many.
    """
    texts = [given] if isinstance(given, str) else given
    are_texts = isinstance(texts, list) and len(texts) > 0 and all(isinstance(text, str) for text in texts)
    require(are_texts, name, "a string or a list of strings", given)
    require_at_most(name, texts, serving_of(request).options.limits.max_inputs, "strings")
    return texts
