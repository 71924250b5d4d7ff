"""Makes the control calls of a weight update, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.weight_updates.extras import SharedTensors

if TYPE_CHECKING:
    import torch

    from compiled_engine.config import ParallelConfig

# Most bytes of tensors in one file on the way to another process.
BUCKET_BYTES = 1 << 30
# A folder in memory, if the system has one.
_IN_MEMORY = Path("/dev/shm")


class Broadcast(NamedTuple):
    """Tensors that a connected trainer broadcasts in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    packed: bool | None = None  # whether a message has several tensors; None: as given to `connect`


WeightSource: TypeAlias = (
    "str | os.PathLike[str] | Broadcast | SharedTensors | Mapping[str, torch.Tensor] "
    "| Iterable[tuple[str, torch.Tensor]]"
)
"""A folder with safetensors files, or tensors by the checkpoint's names, given, shared or broadcast."""
Calls = Generator[ControlCall, Any, Any]
"""Control calls to be served one after the other. Each takes the answer to the one before; the result is returned."""

START = ControlCall("start_weight_update", slow=True)
CANCEL = ControlCall("cancel_weight_update", slow=True)
STATE = ControlCall("weight_update_state")


def update(
    weights: Any, parallel: ParallelConfig, version: str | None, *, recompute: bool, in_this_process: bool
) -> Calls:
    """Add weights to the update under way; if there is none, start one, add the weights and finish it.

    Yields control calls, see Calls. weights: a folder with safetensors files, tensors on any device by the checkpoint's
    names, a Broadcast, or SharedTensors. in_this_process: the core is in this process, behind no socket. version,
    recompute: see WeightUpdates.finish_weight_update; not used for an update under way.

    Raises ControlError, TypeError or ValueError; an update that was started here is then dropped.
    """
    if (yield STATE)["received"] is not None:
        yield from received(weights, parallel, in_this_process=in_this_process)
        return
    yield START
    try:
        yield from received(weights, parallel, in_this_process=in_this_process)
        yield finish(version, recompute=recompute)
    except Exception:
        yield CANCEL
        raise


def connect(
    parallel: ParallelConfig,
    address: str,
    port: int,
    rank_offset: int,
    world_size: int,
    *,
    packed: bool = False,
    backend: str = "gloo",
) -> ControlCall:
    """Return the call with which all ranks join a trainer's group, see StepWeightUpdates.connect.

    Raises ValueError with several replicas.
    """
    if parallel.has_replicas:
        raise ValueError(f"data_parallel_size is {parallel.data_parallel_size}; allowed: 1")
    arguments = {"address": address, "port": port, "rank_offset": rank_offset, "world_size": world_size}
    return ControlCall("connect_weight_sender", {**arguments, "packed": packed, "backend": backend}, slow=True)


def finish(version: str | None, *, recompute: bool) -> ControlCall:
    """Return the call that puts an update into place, see WeightUpdates.finish_weight_update."""
    return ControlCall("finish_weight_update", {"version": version, "recompute": recompute}, slow=True)


def served(calls: Calls, serve: Callable[[ControlCall], Any]) -> Any:
    """Serve each call of `calls` with `serve`, and return the generator's result.

    A ControlError of a call is raised inside the generator, where the call was yielded.
    """
    try:
        call = next(calls)
        while True:
            try:
                answer = serve(call)
            except ControlError as error:
                call = calls.throw(error)
            else:
                call = calls.send(answer)
    except StopIteration as end:
        return end.value


async def served_async(calls: Calls, serve: Callable[[ControlCall], Awaitable[Any]]) -> Any:
    """Serve calls as `served` does, on an event loop, and return the generator's result.

    `calls` runs in threads, since it may write tensors to files.
    """
    step: Callable[[], ControlCall] = partial(next, calls)
    while True:
        call = await asyncio.to_thread(_next_call, step)
        if not isinstance(call, ControlCall):
            return call.value
        try:
            answer = await serve(call)
        except ControlError as error:
            step = partial(calls.throw, error)
        else:
            step = partial(calls.send, answer)


def _next_call(step: Callable[[], ControlCall]) -> ControlCall | StopIteration:
    """Return the next call.

    At the generator's end, return the StopIteration, which a coroutine cannot receive as an error.

    step: resumes the generator, and returns its next call.
    """
    try:
        return step()
    except StopIteration as end:
        return end


def received(weights: Any, parallel: ParallelConfig, *, in_this_process: bool) -> Calls:
    """Yield the calls that add weights to the update under way. Arguments and errors: see `update`."""
    if isinstance(weights, str | os.PathLike):
        yield _receive(path=str(Path(weights).absolute()))
        return
    if isinstance(weights, Broadcast):
        yield ControlCall("receive_weight_broadcast", weights._asdict(), slow=True)
        return
    if isinstance(weights, SharedTensors):
        yield ControlCall("receive_shared_weights", {"shared": msgspec.to_builtins(weights)}, slow=True)
        return
    named = _named(weights)
    if in_this_process and parallel.executor == "in_process" and not parallel.has_replicas:
        yield _receive(tensors=list(named))
        return
    for bucket in _buckets(named):
        with _written(bucket) as folder:
            yield _receive(path=str(folder), temporary=True)


def _receive(**arguments: Any) -> ControlCall:
    return ControlCall("receive_weights", arguments, slow=True)


def _named(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors. Raises TypeError if `weights` has other contents."""
    import torch

    allowed = "a folder, a dict of tensors by name, or (name, tensor) pairs"
    if not isinstance(weights, Iterable):
        raise TypeError(f"weights is {type(weights).__name__}; allowed: {allowed}")
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"weights has an item of type {type(pair).__name__}; allowed: {allowed}")
        name, tensor = pair
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise TypeError(f"weights has {type(name).__name__} and {type(tensor).__name__}; allowed: {allowed}")
        yield name, tensor


def _buckets(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Divide tensors into buckets of at most BUCKET_BYTES, or of one larger tensor.

    Raises ValueError if a bucket gets two tensors of the same name.
    """
    bucket: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in named:
        if name in bucket:
            raise ValueError(f"{name} comes twice in one update")
        if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = {}, 0
        # safetensors refuses tensors that share memory, as tied ones do.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def _written(bucket: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """Write tensors to a temporary folder, in memory if there is room. It is deleted when the block ends."""
    from safetensors.torch import save_file

    needed = sum(tensor.nbytes for tensor in bucket.values()) + (1 << 20)
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > 2 * needed
    with tempfile.TemporaryDirectory(prefix="compiled-engine-weights-", dir=_IN_MEMORY if has_room else None) as name:
        save_file(dict(bucket), Path(name) / "model.safetensors")
        yield Path(name)
