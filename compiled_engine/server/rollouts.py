"""Routes for trainers: pause the engine, and change its weights, in the shapes of vLLM's development mode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.engine.control import ControlError, PauseMode
from compiled_engine.features.weight_updates.extras import SharedTensors
from compiled_engine.features.weight_updates.frontend.update_calls import Broadcast
from compiled_engine.server.admin import require_admin
from compiled_engine.server.errors import ApiError, bad_request, require
from compiled_engine.server.options import IPC, transfer_config
from compiled_engine.server.replies import json_response, read_body
from compiled_engine.server.serving import Serving, serving_of

Handler = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body", bound=msgspec.Struct)

MODES = get_args(PauseMode)
WHAT = "changing the engine"


class InitInfo(msgspec.Struct, kw_only=True):
    """Parameters of a trainer's process group, which the engine joins. The trainer is rank 0 and hosts the store."""

    master_address: str
    master_port: int
    rank_offset: int = 1
    world_size: int
    packed: bool = False


class InitRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, kw_only=True):
    """New weights: tensors that the trainer broadcasts, in the order of `names`, or that it shares by CUDA IPC, or the
    folder `path` on the server.
    """

    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    path: str | None = None
    packed: bool | None = None  # as in InitInfo
    shared: SharedTensors | None = None
    ipc_handles_pickled: str | None = None  # refused


class UpdateRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /update_weights."""

    update_info: UpdateInfo


class FinishRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /finish_weight_update."""

    weight_version: str | None = None


class StartRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /start_weight_update."""

    is_checkpoint_format: bool | None = None


class CallRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /collective_rpc: the name of a method that is allowed there, and its arguments."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


async def pause(request: Request) -> Response:
    """Handle POST /pause?mode=MODE&clear_cache=BOOLEAN."""
    serving = _allowed(request)
    mode = request.query_params.get("mode", "abort")
    if _switch(request, "wait_for_inflight_requests", False):
        mode = "wait"
    require(mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)
    clear_cache = _switch(request, "clear_cache", True)
    await serving.engine.pause_generation(mode=mode, clear_cache=clear_cache)  # type: ignore[arg-type]
    return json_response({"status": "paused"})


async def resume(request: Request) -> Response:
    """Handle POST /resume."""
    await _allowed(request).engine.resume_generation()
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Handle GET /is_paused."""
    return json_response({"is_paused": await _allowed(request).engine.is_paused()})


async def reset_prefix_cache(request: Request) -> Response:
    """Handle POST /reset_prefix_cache?reset_running_requests=BOOLEAN."""
    serving = _allowed(request)
    done = await serving.engine.reset_prefix_cache(_switch(request, "reset_running_requests", False))
    return json_response({"success": done})


async def sleep(request: Request) -> Response:
    """Handle POST /sleep?level=LEVEL&mode=MODE."""
    serving = _allowed(request)
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
    require(level in ("0", "1", "2"), "level", "0, 1 or 2", level)
    require(mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)
    _require_sleep_mode(serving)
    await _done(serving.engine.sleep(int(level), mode))  # type: ignore[arg-type]
    return Response()


async def wake_up(request: Request) -> Response:
    """Handle POST /wake_up?tags=TAG&tags=TAG."""
    serving = _allowed(request)
    _require_sleep_mode(serving)
    await _done(serving.engine.wake_up(request.query_params.getlist("tags") or None))
    return Response()


async def is_sleeping(request: Request) -> Response:
    """Handle GET /is_sleeping."""
    serving = _allowed(request)
    sleeping = serving.engine.config.sleeps and await serving.engine.is_sleeping()
    return json_response({"is_sleeping": sleeping})


def _require_sleep_mode(serving: Serving) -> None:
    if not serving.engine.config.sleeps:
        raise bad_request(None, "the server must be started with --enable-sleep-mode", code="no_sleep_mode")


async def get_world_size(request: Request) -> Response:
    """Handle GET /get_world_size?include_dp=BOOLEAN."""
    size = await _allowed(request).engine.get_world_size(_switch(request, "include_dp", True))
    return json_response({"world_size": size})


async def server_info(request: Request) -> Response:
    """Handle GET /server_info: return the configuration for trainers, in vLLM's shape, and the state of the weights."""
    serving = _allowed(request)
    engine = serving.engine
    config = {
        "weight_transfer_config": None if (backend := _backend(serving)) is None else {"backend": backend},
        "model_config": {
            "model": serving.names[0],
            "dtype": str(engine.config.model.dtype).removeprefix("torch."),
            "max_model_len": serving.max_model_len,
        },
        "parallel_config": {
            "tensor_parallel_size": engine.config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": engine.config.parallel.num_stages,
            "data_parallel_size": engine.config.parallel.data_parallel_size,
            "world_size": engine.config.parallel.devices_per_replica,
        },
    }
    state = await engine.weight_update_state()
    return json_response({"vllm_config": config, "weights": state, "is_paused": await engine.is_paused()})


async def init_weight_transfer_engine(request: Request) -> Response:
    """Handle POST /init_weight_transfer_engine: connect to a trainer."""
    body = await _body(request, InitRequest)
    await _init(serving_of(request), body.init_info)
    return json_response({"message": "Weight transfer initialized"})


async def start_weight_update(request: Request) -> Response:
    """Handle POST /start_weight_update."""
    body = await _body(request, StartRequest)
    require(body.is_checkpoint_format is not False, "is_checkpoint_format", "true", body.is_checkpoint_format)
    await serving_of(request).engine.start_weight_update()
    return json_response({"message": "Weight update started"})


async def update_weights(request: Request) -> Response:
    """Handle POST /update_weights: add a part to the update that is under way, or make a whole one if none is."""
    body = await _body(request, UpdateRequest)
    await _update(serving_of(request), body.update_info)
    return json_response({"message": "Weights updated"})


async def finish_weight_update(request: Request) -> Response:
    """Handle POST /finish_weight_update."""
    body = await _body(request, FinishRequest)
    version = await _done(serving_of(request).engine.finish_weight_update(body.weight_version))
    return json_response({"message": "Weight update finished", "weight_version": version})


async def collective_rpc(request: Request) -> Response:
    """Handle POST /collective_rpc: call one of METHODS. The answer has its result for each rank."""
    body = await _body(request, CallRequest)
    serving = serving_of(request)
    require(body.method in METHODS, "method", f"one of {', '.join(METHODS)}", body.method)
    require(not body.args, "args", "empty: arguments have names", body.args)
    kinds = METHODS[body.method]
    for name, value in body.kwargs.items():
        require(name in kinds, "kwargs", f"with names among {', '.join(kinds)}", name)
        require(isinstance(value, kinds[name]), name, f"a {kinds[name].__name__}", value)
    if "weights_path" in body.kwargs:
        _require_allowed(serving, body.kwargs["weights_path"], "weights_path")
    try:
        results = await _done(serving.engine.collective_rpc(body.method, body.timeout, kwargs=body.kwargs))
    except TimeoutError as error:
        message = f"{body.method} has not ended within {body.timeout} s, and goes on"
        raise ApiError(400, message, code="timeout") from error
    return json_response({"results": results})


async def _init(serving: Serving, info: InitInfo) -> None:
    backend = _backend(serving)
    if backend is None:
        advice = """the server must be started with --weight-transfer-config '{"backend": "nccl"}', or gloo"""
        raise bad_request("init_info", advice, code="no_weight_transfer")
    if backend == IPC:
        return  # nothing to connect
    size = info.rank_offset + serving.engine.config.parallel.num_ranks
    require(info.world_size == size, "world_size", f"{size}: rank_offset and the ranks of the engine", info.world_size)
    connecting = serving.engine.connect_weight_sender(
        info.master_address,
        info.master_port,
        rank_offset=info.rank_offset,
        world_size=info.world_size,
        packed=info.packed,
        backend=backend,
    )
    await _done(connecting)


async def _update(serving: Serving, info: UpdateInfo) -> None:
    if info.path is not None:
        await _done(serving.engine.update_weights(_require_allowed(serving, info.path, "path")))
        return
    pickled = info.ipc_handles_pickled
    require(pickled is None, "ipc_handles_pickled", "null, since pickles are not read: see shared", pickled)
    if info.shared is not None:
        backend = _backend(serving)
        require(backend == IPC, "shared", """given with --weight-transfer-config '{"backend": "ipc"}'""", backend)
        await _done(serving.engine.update_weights(info.shared))
        return
    names, dtypes, shapes = info.names, info.dtype_names, info.shapes
    if names is None or dtypes is None or shapes is None:
        raise bad_request("update_info", "update_info must have names, dtype_names and shapes, or shared, or path")
    lengths = {len(names), len(dtypes), len(shapes)}
    require(len(lengths) == 1, "names, dtype_names and shapes", "of one length", sorted(lengths), param="update_info")
    await _done(serving.engine.update_weights(Broadcast(names, dtypes, shapes, info.packed)))


def _require_allowed(serving: Serving, given: str, field: str) -> Path:
    """Return the absolute path of a folder. Raises ApiError 400 unless it is within an allowed weights folder."""
    folders = tuple(Path(each).resolve() for each in serving.options.allowed_weights_folder)
    path = Path(given).resolve() if "\0" not in given else Path()
    is_allowed = any(path.is_relative_to(folder) for folder in folders)
    allowed = ", ".join(serving.options.allowed_weights_folder) or "--allowed-weights-folder, which is not given"
    require(is_allowed, field, f"a folder within {allowed}", given)
    return path


def _backend(serving: Serving) -> str | None:
    config = serving.options.weight_transfer_config
    return None if config is None else str(transfer_config("weight_transfer_config", config)["backend"])


async def _done(work: Awaitable[Any]) -> Any:
    """Return the result of `work`, a change of the engine. Raises ApiError 400 if the engine refuses it."""
    try:
        return await work
    except (ControlError, ValueError) as error:
        raise ApiError(400, str(error), code="weights_refused") from error


def _allowed(request: Request) -> Serving:
    require_admin(request, "authorization", WHAT)
    return serving_of(request)


async def _body(request: Request, kind: type[Body]) -> Body:
    """Return the request's body as a `kind`. A missing body counts as one without fields.

    Raises ApiError, also if the request may not change the engine.
    """
    serving = _allowed(request)
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        try:
            return msgspec.convert({}, kind)
        except msgspec.ValidationError as error:
            raise bad_request(None, f"the body must be given: {error}") from error
    body, _ = await read_body(request, serving, kind)
    return body


def _switch(request: Request, name: str, default: bool) -> bool:
    """Return the boolean `name` of the query string, by default `default`. Raises ApiError 400 for another value."""
    value = request.query_params.get(name, str(default)).lower()
    require(value in ("true", "false", "1", "0"), name, "true or false", value)
    return value in ("true", "1")


# Methods that may be called over HTTP, with the types of their arguments. Functions are not among them.
METHODS: dict[str, dict[str, type]] = {
    "reload_weights": {"weights_path": str},
    "reset_prefix_cache": {"reset_running_requests": bool},
    "get_world_size": {"include_dp": bool},
}
GET: dict[str, Handler] = {
    "/is_paused": is_paused,
    "/is_sleeping": is_sleeping,
    "/get_world_size": get_world_size,
    "/server_info": server_info,
}
POST: dict[str, Handler] = {
    "/pause": pause,
    "/resume": resume,
    "/sleep": sleep,
    "/wake_up": wake_up,
    "/reset_prefix_cache": reset_prefix_cache,
    "/init_weight_transfer_engine": init_weight_transfer_engine,
    "/start_weight_update": start_weight_update,
    "/update_weights": update_weights,
    "/finish_weight_update": finish_weight_update,
    "/collective_rpc": collective_rpc,
}
