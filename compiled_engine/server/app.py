"""The ASGI application and its routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.tokenizer import read_json_if_there
from compiled_engine.frontend.tokenizer_backend import QUICK_TEXT
from compiled_engine.server.adapter_names import AdapterNames
from compiled_engine.server.adapters import LOAD, UNLOAD, load_adapter, unload_adapter
from compiled_engine.server.chat_completions import chat_completions
from compiled_engine.server.chat_format import find_chat_format
from compiled_engine.server.completions import completions
from compiled_engine.server.embed import embed
from compiled_engine.server.errors import MESSAGES, UNEXPECTED, ApiError
from compiled_engine.server.exposition import metrics
from compiled_engine.server.long_work import QUICK_FORM, LongWork
from compiled_engine.server.lora_modules import adapters_of, check_adapter_options
from compiled_engine.server.messages import count_tokens, messages
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.middleware import OPEN_PATHS, OTHER_ROUTE, RequestScope
from compiled_engine.server.model_list import health, load, model, models, ready, version
from compiled_engine.server.nearest_path import nearest_path
from compiled_engine.server.openapi import openapi
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.pooling import classify, embeddings, pooling
from compiled_engine.server.pulse import Pulse
from compiled_engine.server.replies import Reply, error_response
from compiled_engine.server.rerank import rerank, score
from compiled_engine.server.responses import responses
from compiled_engine.server.rollouts import GET as ASKED_BY_TRAINERS
from compiled_engine.server.rollouts import POST as TOLD_BY_TRAINERS
from compiled_engine.server.serving import Admission, Serving
from compiled_engine.server.shared_figures import SharedFigures
from compiled_engine.server.tokenization import TOKENIZER_INFO, detokenize, tokenize, tokenizer_info
from compiled_engine.server.transcriptions import transcriptions, translations
from compiled_engine.server.web_page import PATH as INSPECTION
from compiled_engine.server.web_page import Inspection, answers, page_files

log = logging.getLogger("compiled_engine")

Handler = Callable[[Request], Awaitable[Any]]

GET: dict[str, Handler] = {
    "/v1/models": models,
    "/v1/models/{model:path}": model,
    "/version": version,
    "/health": health,
    "/ping": health,
    "/ready": ready,
    "/load": load,
    "/metrics": metrics,
    "/openapi.json": openapi,
}
POST: dict[str, Handler] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    MESSAGES: messages,
    f"{MESSAGES}/count_tokens": count_tokens,
    "/v1/audio/transcriptions": transcriptions,
    "/v1/audio/translations": translations,
    "/v1/embeddings": embeddings,
    "/v2/embed": embed,
    "/pooling": pooling,
    "/classify": classify,
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def build_app(
    engine: AsyncLLM, options: ServerOptions, model_name: str, figures: SharedFigures | None = None
) -> RequestScope:
    """Return the application for an engine.

    The model's name is the option `served_model_name`, or `model_name` if that option is not given. `figures` is the
    memory shared by all API processes, if there are several. Raises ValueError for an invalid chat template or adapter
    options.
    """
    figures = figures or SharedFigures()
    pages = page_files()
    of_trainers = [*ASKED_BY_TRAINERS, *TOLD_BY_TRAINERS]
    routes = [*GET, *POST, LOAD, UNLOAD, *of_trainers, *pages, INSPECTION, TOKENIZER_INFO, OTHER_ROUTE]
    if not options.web_page:
        pages.clear()
    post = POST | ({LOAD: load_adapter, UNLOAD: unload_adapter} if options.allowed_lora_folder else {})
    adapters = adapters_of(options)
    names = options.served_model_name or (model_name,)
    check_adapter_options(options, engine.config.adapters is not None)
    if taken := [each.lora_name for each in adapters if each.lora_name in names]:
        raise ValueError(f"lora_modules has {taken[0]!r}, which is the model's name; allowed: other names")
    optional: dict[str, Handler] = {INSPECTION: Inspection()} if options.debug_inspect else {}
    if options.tokenizer_info:
        optional[TOKENIZER_INFO] = tokenizer_info
    if options.rollouts:
        optional |= ASKED_BY_TRAINERS
        post = post | TOLD_BY_TRAINERS
    app = Starlette(
        routes=[
            *(Route(path, answers(file), methods=["GET"]) for path, file in pages.items()),
            *(Route(path, _answered(path, handler), methods=["GET"]) for path, handler in {**GET, **optional}.items()),
            *(Route(path, _answered(path, handler), methods=["POST"]) for path, handler in post.items()),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    texts = LongWork("texts", QUICK_TEXT, options.limits.render_timeout)
    app.state.serving = serving = Serving(
        engine=engine,
        options=options,
        names=names,
        chat=find_chat_format(
            engine.tokenizer, options, texts, engine.features.images.placeholder, engine.features.images.why_none
        ),
        admission=Admission(options.limits.max_in_flight, figures),
        forms=LongWork("forms", QUICK_FORM, options.limits.render_timeout),
        texts=texts,
        metrics=ServerMetrics(figures, routes),
        max_new_tokens=_max_new_tokens(engine),
        created=int(time.time()),
        adapters=AdapterNames(adapters),
        pulse=Pulse(engine.metrics),
    )
    return RequestScope(app, serving, routes, open_paths=[*OPEN_PATHS, *pages])


def _max_new_tokens(engine: AsyncLLM) -> int | None:
    """Return the checkpoint's max_new_tokens if it is the default of max_tokens, otherwise None."""
    stated = read_json_if_there(engine.config.model.path / "generation_config.json").get("max_new_tokens")
    default = engine.get_default_sampling_params().max_tokens
    return default if default == stated else None


def _answered(path: str, handler: Handler) -> Callable[[Request], Awaitable[Reply]]:
    """Return a handler that calls `handler` and converts its errors to responses in the shape of the path's API."""

    async def answer(request: Request) -> Reply:
        try:
            reply: Reply = await handler(request)
            return reply
        except ClientDisconnect:
            return Response(status_code=499)  # the client has gone
        except ApiError as error:
            return error_response(error, path)
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return error_response(ApiError(500, UNEXPECTED), path)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or with a method that its path does not allow."""
    assert isinstance(error, HTTPException)
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))[:200]
    nearest = nearest_path(path, {route.path for route in request.app.routes})
    advice = f"; did you mean {nearest}?" if nearest else ""
    if path in (LOAD, UNLOAD):
        advice = "; a server has it with --enable-lora and --allowed-lora-folder"
    elif path in ASKED_BY_TRAINERS or path in TOLD_BY_TRAINERS:
        advice = "; a server has it with --rollouts"
    elif path == TOKENIZER_INFO:
        advice = "; a server has it with --tokenizer-info"
    text = {404: f"there is nothing at {path}{advice}", 405: f"{request.method} is not allowed at {path}"}
    headers = error.headers or {}
    return error_response(ApiError(error.status_code, text.get(error.status_code, error.detail), headers=headers), path)
