"""What the multiprocess executor and its workers say to each other: typed messages, as msgpack, without pickle."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from compiled_engine.config import EngineConfig, decode_other, encode_other
from compiled_engine.core.control import Failed
from compiled_engine.messages import ControlCall, RunnerOutput, SchedulerOutput, TokenMasks
from compiled_engine.process.timeline import Span

_LENGTH = struct.Struct("<Q")


class StartWorker(msgspec.Struct, tag=True, frozen=True):
    """The first message that a worker gets, on its socket.

    logits_processors: as "package.module:Name". num_threads: for PyTorch's work on the CPU. busy_s: how long it awaits
    a step without sleeping. progress: show what takes long on stderr. origin_s, spans: the timeline so far.
    """

    config: EngineConfig
    logits_processors: tuple[str, ...]
    num_threads: int
    busy_s: float
    progress: bool
    origin_s: float
    spans: tuple[Span, ...]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A worker stands. What it tells must be the same for all: blocks of the KV cache, and the compiled model's key."""

    num_blocks: int
    cache_key: str | None


class Step(msgspec.Struct, tag=True, frozen=True):
    """Through the ring, to all."""

    step: SchedulerOutput


class Masks(msgspec.Struct, tag=True, frozen=True):
    """Through the ring, to all: for the step that was sent last, which awaits them."""

    masks: TokenMasks


class Call(msgspec.Struct, tag=True, frozen=True):
    """Through the ring, to all: every worker applies the call and sends an `Answer` with the number."""

    number: int
    call: ControlCall


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """Through the ring, to all: the step that failed has failed on all of them. Until then they execute none."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Through the ring, to all: free the device and end."""


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """A step failed, by its number. between_runs: no collective was under way; num_runs: of the model, and
    exchanges between ranks while sampling, so far."""

    step: int
    failed: Failed
    between_runs: bool
    num_runs: int


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What a call returned, or why it failed."""

    number: int
    value: Any = None
    error: str | None = None


ToWorker = Step | Masks | Call | GoOn | Stop
FromWorker = Ready | Failed | StepFailed | Answer
Result = RunnerOutput | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_start_decoder = msgspec.msgpack.Decoder(StartWorker, dec_hook=decode_other)
_worker_decoder = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_other)
_executor_decoder = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_other)
_output_decoder = msgspec.msgpack.Decoder(RunnerOutput, dec_hook=decode_other)
_failed_decoder = msgspec.msgpack.Decoder(Failed)


def encode(message: StartWorker | ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _worker_decoder.decode(data)


def encode_result(result: Result) -> bytes:
    """What the rank with the results writes for each step, into its own ring."""
    return (b"F" if isinstance(result, Failed) else b"O") + _encoder.encode(result)


def decode_result(data: bytes) -> Result:
    view = memoryview(data)
    return _failed_decoder.decode(view[1:]) if data[:1] == b"F" else _output_decoder.decode(view[1:])


def send(connection: socket.socket, message: StartWorker | FromWorker) -> None:
    data = encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_start(connection: socket.socket) -> StartWorker:
    """Raises EOFError if the executor is gone."""
    return _start_decoder.decode(_receive(connection))


def receive(connection: socket.socket) -> FromWorker:
    """Raises EOFError if the worker is gone."""
    return _executor_decoder.decode(_receive(connection))


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except OSError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return bytes(data)
