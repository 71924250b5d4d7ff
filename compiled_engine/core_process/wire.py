"""What an API process and the engine core say to each other: typed messages, as msgpack, without pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.config import EngineConfig, decode_other, encode_other
from compiled_engine.core.control import Failed
from compiled_engine.messages import ControlCall, EngineRequest, GrammarVocabulary, RequestLimits, StepOutputs
from compiled_engine.process.timeline import Span


class FrontendOptions(msgspec.Struct, frozen=True):
    """Of the engine's options, those that are for API processes: what the configuration does not say.

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
    """Queue a request. One that cannot be is answered by its end, with finish_reason "error"."""

    request: EngineRequest


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """See EngineCore.set_vocabulary."""

    vocabulary: GrammarVocabulary


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End requests. stopped: their output is complete, by a stop string."""

    request_ids: tuple[str, ...]
    stopped: bool = False


class Control(msgspec.Struct, tag=True, frozen=True):
    """A call, which gets an `Answered` with its number."""

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
    """What one step gave the requests of this API process."""

    outputs: StepOutputs


class Answered(msgspec.Struct, tag=True, frozen=True):
    """What a call returned, or why it failed."""

    number: int
    value: Any = None
    error: str | None = None


ToCore = Start | Add | SetVocabulary | Abort | Control
ToApi = Started | Stepped | Answered | Failed


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_core_decoder = msgspec.msgpack.Decoder(ToCore, dec_hook=decode_other)
_api_decoder = msgspec.msgpack.Decoder(ToApi, dec_hook=decode_other)


def encode(message: ToCore | ToApi) -> bytes:
    return _encoder.encode(message)


def decode_to_core(data: bytes | bytearray) -> ToCore:
    """Raises msgspec.DecodeError for anything but a message."""
    return _core_decoder.decode(data)


def decode_to_api(data: bytes | bytearray) -> ToApi:
    """Raises msgspec.DecodeError for anything but a message."""
    return _api_decoder.decode(data)
