"""Serves `collective_rpc` of `LLM` and `AsyncLLM`: methods of the engine by name, and functions on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.weight_updates.frontend import openrlhf_calls, update_calls
from compiled_engine.features.weight_updates.frontend.update_calls import Calls
from compiled_engine.process.import_name import name_of

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig

# Methods of LLM and AsyncLLM that may be called by their names.
OF_ENGINES = (
    *("get_world_size", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"),
    *("start_weight_update", "update_weights", "finish_weight_update", "sleep", "wake_up", "is_sleeping"),
)
OF_OPENRLHF: dict[str, Callable[..., Calls]] = {
    "init_process_group": openrlhf_calls.init_process_group,
    "update_weight": openrlhf_calls.update_weight,
    "update_weight_cuda_ipc": openrlhf_calls.update_weight_cuda_ipc,
}
RELOAD = "reload_weights"
# Methods of vLLM's workers, and of verl's worker extension, with the reason why the engine lacks them.
REFUSED = {
    "update_weights_from_ipc": "its buckets come as pickles over a socket; between start_weight_update() and "
    "finish_weight_update(), give each bucket to update_weights(), as share_tensors(bucket, copy=True)",
    "monkey_patch_model": "there is no model to patch; give SamplingParams(allowed_token_ids=...) or bad_words",
    "init_weight_transfer_engine": "give connect_weight_sender() the trainer's address and port",
}


def calls_on_ranks(
    method: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: EngineConfig,
    *,
    in_this_process: bool,
) -> Calls:
    """Yield the control calls of a method that is not in OF_ENGINES; the generator's result has an item for each rank.

    method: a name of OF_OPENRLHF, RELOAD, "package.module:function", or a function that gets a Rank. in_this_process:
    the core is in this process, behind no socket.

    Raises ControlError for RELOAD while an update is under way. Raises ValueError for another name, for a function that
    cannot be called on the ranks, and for arguments of a function that are not plain data but would have to cross
    processes. See also `openrlhf_calls` and `update_calls.update`.
    """
    parallel = config.parallel
    if isinstance(method, str) and method in OF_OPENRLHF:
        result = yield from OF_OPENRLHF[method](parallel, *args, **kwargs)
    elif method == RELOAD:
        result = yield from _reload(config, in_this_process, *args, **kwargs)
    else:
        return (yield _function_call(method, args, kwargs, config, in_this_process=in_this_process))
    return [result] * parallel.num_ranks


def _reload(config: EngineConfig, in_this_process: bool, weights_path: str | None = None) -> Calls:
    if (yield update_calls.STATE)["received"] is not None:
        raise ControlError("a weight update is under way; finish it first, or start it anew")
    path = str(config.model.path) if weights_path is None else weights_path
    yield from update_calls.update(path, config.parallel, None, recompute=True, in_this_process=in_this_process)


def _function_call(
    method: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: EngineConfig,
    *,
    in_this_process: bool,
) -> ControlCall:
    if isinstance(method, str) and ":" not in method:
        why = f", {REFUSED[method]}" if method in REFUSED else ""
        allowed = ", ".join((*OF_ENGINES, RELOAD, *OF_OPENRLHF))
        raise ValueError(f"method is {method!r}{why}; allowed: {allowed}, 'package.module:function', or a function")
    if config.parallel.has_replicas:
        raise ValueError("method is a function; allowed with several replicas, or with Ray: a method's name")
    function: str | Callable[..., Any] = method
    if not (in_this_process and config.parallel.executor == "in_process"):
        function = method if isinstance(method, str) else name_of("method", method)
        try:
            msgspec.msgpack.encode([list(args), dict(kwargs)])
        except (TypeError, OverflowError) as error:
            raise ValueError(f"args and kwargs must be plain data, since they cross processes: {error}") from error
    arguments = {"function": function, "args": list(args), "kwargs": dict(kwargs)}
    return ControlCall("call_on_ranks", arguments, slow=True)
