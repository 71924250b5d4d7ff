"""The endpoints /v1/models, /version, /health, /ping, /ready and /load: the server's models, version and state."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.server.errors import ApiError, engine_failure, shutting_down
from compiled_engine.server.replies import json_response
from compiled_engine.server.serving import Serving, serving_of


class ModelCard(msgspec.Struct, kw_only=True):
    """One of the model's names, or the name of an adapter.

    `max_model_len` is the context length: prompt and output together. `input_modalities` are text, and image if chats
    may have images. For an adapter, `root` is its folder or its name on the hub, and `parent` its base model; `parent`
    is null for the model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int
    input_modalities: list[str]


class ModelList(msgspec.Struct, kw_only=True):
    """All names of the model and its adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(msgspec.Struct):
    """The engine's version."""

    version: str


class Load(msgspec.Struct):
    """The number of running and waiting completions over all processes of the server."""

    server_load: int


def _card(serving: Serving, name: str) -> ModelCard:
    adapter = serving.adapters.get(name)
    return ModelCard(
        id=name,
        created=serving.created,
        owned_by="compiled-engine",
        root=serving.names[0] if adapter is None else str(adapter.lora_path),
        parent=None if adapter is None else serving.names[0],
        max_model_len=serving.max_model_len,
        input_modalities=["text"] if serving.engine.features.images.why_none is not None else ["text", "image"],
    )


async def models(request: Request) -> Response:
    """Handle GET /v1/models."""
    serving = serving_of(request)
    return json_response(ModelList(data=[_card(serving, name) for name in (*serving.names, *serving.adapters)]))


async def model(request: Request) -> Response:
    """Handle GET /v1/models/NAME."""
    serving = serving_of(request)
    return json_response(_card(serving, serving.model(request.path_params["model"])))


async def version(request: Request) -> Response:
    """Handle GET /version."""
    from compiled_engine import __version__

    return json_response(Version(__version__))


async def load(request: Request) -> Response:
    """Handle GET /load."""
    return json_response(Load(serving_of(request).admission.in_flight))


async def health(request: Request) -> Response:
    """Handle GET /health and /ping: 200 while the engine core is alive and responsive, otherwise 503."""
    serving = serving_of(request)
    reason = serving.engine.errored
    if reason is None and (silent_s := serving.pulse.silent_s()) > serving.options.limits.health_timeout:
        reason = f"its core has not answered for {silent_s:.0f} s"
    if reason is not None:
        error = engine_failure(reason)
        raise ApiError(503, str(error), code=error.code)
    return Response()


async def ready(request: Request) -> Response:
    """Handle GET /ready: 200 while the server is healthy and accepts requests, otherwise 503."""
    if serving_of(request).stopping.is_set():
        raise shutting_down()
    return await health(request)
