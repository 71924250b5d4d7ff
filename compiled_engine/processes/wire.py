"""The messages between API processes, engine cores and the ranks of a core: typed, as msgpack, without pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.config import EngineConfig, decode_other, encode_other
from compiled_engine.core.control import Failed
from compiled_engine.messages import (
    ControlCall,
    EngineRequest,
    GrammarVocabulary,
    RequestLimits,
    RunnerOutput,
    SchedulerOutput,
    StepOutputs,
    TokenMasks,
)
from compiled_engine.process.timeline import Span


class FrontendOptions(msgspec.Struct, frozen=True):
    """The engine's options for API processes, which the configuration does not have.

    The core only keeps them, for API processes that come later.
    """

    skip_tokenizer_init: bool
    generation_config: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message that a core gets: what to start.

    logits_processors: as "package.module:Name". num_threads: for PyTorch's work on the CPU. progress: show what takes
    long on stderr. origin_s, spans: the timeline of the start so far.
    """

    config: EngineConfig
    frontend: FrontendOptions
    logits_processors: tuple[str, ...]
    num_threads: int
    progress: bool
    origin_s: float
    spans: tuple[Span, ...]


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request. A refused request is answered by its end, with finish_reason "error"."""

    request: EngineRequest


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """See EngineCore.set_vocabulary."""

    vocabulary: GrammarVocabulary


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End requests. stopped: their output is complete, by a stop string."""

    request_ids: tuple[str, ...]
    stopped: bool = False


class Control(msgspec.Struct, tag=True, frozen=True):
    """A call, which gets an `Answered` with its number; of a core's ranks each applies it, and answers."""

    number: int
    call: ControlCall


class Started(msgspec.Struct, tag=True, frozen=True):
    """The first message of a core to each API process.

    client: its number; the ids of its requests begin with it and a colon.
    """

    client: int
    config: EngineConfig
    frontend: FrontendOptions
    limits: RequestLimits


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """The outputs of one step for the requests of this API process."""

    outputs: StepOutputs


class Answered(msgspec.Struct, tag=True, frozen=True):
    """The result of a call, or why it failed."""

    number: int
    value: Any = None
    error: str | None = None


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
    """A worker is ready. Its fields must be the same for all: blocks of the KV cache, and the compiled model's key."""

    num_blocks: int
    cache_key: str | None


class Step(msgspec.Struct, tag=True, frozen=True):
    """Execute a step; sent to all workers through the ring buffer."""

    step: SchedulerOutput


class Masks(msgspec.Struct, tag=True, frozen=True):
    """Masks for the newest step, which awaits them; sent to all workers through the ring buffer."""

    masks: TokenMasks


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """Continue after a step that failed on all workers; until then they execute none. Sent through the ring buffer."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Free the device and end; sent to all workers through the ring buffer."""


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """A step failed, by its number. between_runs: no collective was under way; num_runs: of the model, and
    exchanges between ranks while sampling, so far."""

    step: int
    failed: Failed
    between_runs: bool
    num_runs: int


ToCore = Start | Add | SetVocabulary | Abort | Control
ToApi = Started | Stepped | Answered | Failed
ToWorker = Step | Masks | Control | GoOn | Stop
FromWorker = Ready | Failed | StepFailed | Answered
Result = RunnerOutput | Failed

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
    """Raises msgspec.DecodeError for anything but a message."""
    return _core_decoder.decode(data)


def decode_to_api(data: bytes | bytearray) -> ToApi:
    """Raises msgspec.DecodeError for anything but a message."""
    return _api_decoder.decode(data)


def decode_start(data: bytes) -> StartWorker:
    """Decode the first message of a worker."""
    return _start_decoder.decode(data)


def decode_to_worker(data: bytes) -> ToWorker:
    return _worker_decoder.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    return _executor_decoder.decode(data)


def encode_result(result: Result) -> bytes:
    """Encode the result of a step, written by the rank with the results into its ring buffer."""
    return (b"F" if isinstance(result, Failed) else b"O") + _encoder.encode(result)


def decode_result(data: bytes) -> Result:
    view = memoryview(data)
    return _failed_decoder.decode(view[1:]) if data[:1] == b"F" else _output_decoder.decode(view[1:])
