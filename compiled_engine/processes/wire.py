"""Messages between API processes, engine cores and the ranks of a core: typed, in msgpack, without pickle.

A control call (ControlCall) is a call of a function by its name, such as sleep, between two steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import Failed
from compiled_engine.engine.messages import (
    ControlCall,
    EngineRequest,
    LateInputs,
    RequestLimits,
    RunnerOutput,
    SchedulerOutput,
    StepOutputs,
)
from compiled_engine.process.timeline import Span


class FrontendOptions(msgspec.Struct, frozen=True):
    """Engine options that API processes need and that the configuration does not contain.

    The core only keeps them, to send them to API processes that connect later.
    """

    skip_tokenizer_init: bool
    generation_config: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message to an engine core: the configuration and everything else that its start needs."""

    config: EngineConfig
    frontend: FrontendOptions
    logits_processors: tuple[str, ...]  # as "package.module:Name"
    num_threads: int  # for PyTorch on the CPU
    progress: bool  # show progress on stderr
    origin_s: float  # of the timeline of the start so far
    spans: tuple[Span, ...]


class Add(msgspec.Struct, tag=True, frozen=True):
    """Order to queue a request. If the core refuses it, the request's only output has the finish_reason "error"."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Order to end these requests. No more outputs are sent for them."""

    request_ids: tuple[str, ...]
    stopped: bool = False  # their output is complete, by a stop string


class Control(msgspec.Struct, tag=True, frozen=True):
    """Order to execute a control call, and to answer: each receiver (core or rank) sends an Answered with `number`."""

    number: int
    call: ControlCall


class Tell(msgspec.Struct, tag=True, frozen=True):
    """Order to execute a control call without an answer."""

    call: ControlCall
    # Only cores that have one of these requests need the call. Empty: all cores need it.
    request_ids: tuple[str, ...] = ()


class Started(msgspec.Struct, tag=True, frozen=True):
    """The first message of a core to each API process, which tells what the core runs."""

    client: int  # number of the API process; its request ids begin with the number and a colon
    config: EngineConfig
    frontend: FrontendOptions
    limits: RequestLimits


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """Outputs of one step for the requests of this API process."""

    outputs: StepOutputs


class Answered(msgspec.Struct, tag=True, frozen=True):
    """The result of the control call with this number, or the reason why the call failed."""

    number: int
    value: Any = None
    error: str | None = None


class StartWorker(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker, on its socket: the configuration and what else its start needs."""

    config: EngineConfig
    logits_processors: tuple[str, ...]  # as "package.module:Name"
    num_threads: int  # for PyTorch on the CPU
    busy_s: float  # how long to poll for a step before sleeping
    progress: bool  # show progress on stderr
    origin_s: float  # of the timeline of the start so far
    spans: tuple[Span, ...]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Report of a worker that it is ready. All workers must report the same values."""

    num_blocks: int  # of the KV cache
    cache_key: str | None  # key of the compiled model


class Step(msgspec.Struct, tag=True, frozen=True):
    """Order to execute a step. Sent to all workers over the ring buffer."""

    step: SchedulerOutput


class Late(msgspec.Struct, tag=True, frozen=True):
    """Inputs that only the sampling of the newest step needs, such as token masks.

    Sent to all workers over the ring buffer, after the step. The step waits for them before it samples.
    """

    inputs: LateInputs


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """Order to continue after a step that failed on all workers. Until this order, the workers execute no steps.

    Sent over the ring buffer.
    """


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Order to free the device and end. Sent to all workers over the ring buffer."""


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """Report of a rank: its execution of the step with this number has failed."""

    step: int
    failed: Failed
    between_runs: bool  # no collective was in progress
    num_runs: int  # runs of the model, plus exchanges between ranks while sampling, so far


ToCore = Start | Add | Abort | Control | Tell
ToApi = Started | Stepped | Answered | Failed
ToWorker = Step | Late | Control | GoOn | Stop
FromWorker = Ready | Failed | StepFailed | Answered
Result = RunnerOutput | Failed


def encode_other(value: Any) -> str:
    """Encode a value of a type that msgspec does not know; msgspec's enc_hook. Raises TypeError for unknown types."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"no message holds a {type(value).__name__}")


def decode_other(kind: type, value: Any) -> Any:
    """Decode a value of a type that msgspec does not know; msgspec's dec_hook. Raises TypeError for unknown types."""
    if kind is torch.dtype:
        return getattr(torch, value)
    if kind in (Path, torch.device):
        return kind(value)
    raise TypeError(f"no message holds a {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_core_decoder = msgspec.msgpack.Decoder(ToCore, dec_hook=decode_other)
_api_decoder = msgspec.msgpack.Decoder(ToApi, dec_hook=decode_other)
_start_decoder = msgspec.msgpack.Decoder(StartWorker, dec_hook=decode_other)
_worker_decoder = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_other)
_executor_decoder = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_other)
_output_decoder = msgspec.msgpack.Decoder(RunnerOutput, dec_hook=decode_other)
_failed_decoder = msgspec.msgpack.Decoder(Failed)


def encode(message: ToCore | ToApi | StartWorker | ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_core(data: bytes | bytearray) -> ToCore:
    """Decode a message to a core. Raises msgspec.DecodeError for anything else."""
    return _core_decoder.decode(data)


def decode_to_api(data: bytes | bytearray) -> ToApi:
    """Decode a message to an API process. Raises msgspec.DecodeError for anything else."""
    return _api_decoder.decode(data)


def decode_start(data: bytes) -> StartWorker:
    """Decode the first message to a worker. Raises msgspec.DecodeError for anything else."""
    return _start_decoder.decode(data)


def decode_to_worker(data: bytes) -> ToWorker:
    return _worker_decoder.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    return _executor_decoder.decode(data)


def encode_result(result: Result) -> bytes:
    """Encode a step's outputs ("O", then msgpack) or its failure ("F", then msgpack) for the ring buffer."""
    return (b"F" if isinstance(result, Failed) else b"O") + _encoder.encode(result)


def decode_result(data: bytes) -> Result:
    view = memoryview(data)
    return _failed_decoder.decode(view[1:]) if data[:1] == b"F" else _output_decoder.decode(view[1:])
