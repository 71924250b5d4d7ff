"""Resolve how the clips of a speech model are read, encoded and kept, or refuse what such a model cannot do."""

from __future__ import annotations

import torch

from compiled_engine.attention.backend import choose_backend
from compiled_engine.attention.case import AttentionCase
from compiled_engine.config import ModelConfig, SchedulerConfig
from compiled_engine.models.checkpoint.mel_settings import read_mel_settings
from compiled_engine.models.checkpoint.speech_rules import read_speech_rules
from compiled_engine.options import EngineOptions
from compiled_engine.process.cores import usable_cores
from compiled_engine.resolve.image_input import GIB
from compiled_engine.resolve.speculation import read_speculation
from compiled_engine.schema import require_defaults
from compiled_engine.speech import MelSettings, SpeechConfig, SpeechDescription

# Default limit of the clips that the device keeps: this number, or on a GPU as many as these bytes hold, if that is
# more.
DEFAULT_SLOTS, SLOT_BYTES = 32, 2 * GIB
# Options that a speech model rules out.
_REFUSED = {
    "tensor_parallel_size": "the cross-attention of a speech model is not divided among ranks",
    "pipeline_parallel_size": "the encoder of a speech model is not divided into stages",
    "enable_lora": "no adapter is added to the encoder's keys and values",
    "merge_adapter": "no adapter is added to the encoder's keys and values",
    "language_model_only": "the decoder of a speech model needs its encoder",
}


def resolve_speech(
    options: EngineOptions,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    reasons: dict[str, str],
) -> SpeechConfig | None:
    """Return how audio clips are read, encoded and kept; None for a model without an encoder of speech.

    The reasons for chosen values are added to `reasons`. Raises ValueError with the option, its value and what is
    allowed.
    """
    speech = model.speech
    if speech is None:
        require_defaults(options, "the model takes no audio", "audio_workers", "audio_features")
        return None
    for name, reason in _REFUSED.items():
        require_defaults(options, reason, name)
    method = read_speculation(options.speculative_config, options.model).get("method")
    if method not in (None, "ngram"):
        raise ValueError(
            f"speculative_config['method'] is {method!r}, whose model has no audio; allowed for a speech model: 'ngram'"
        )
    num_slots = _clips(options, "encoder_cache_size", speech.length)
    if num_slots is None:
        most = most_slots(model, speech, device)
        num_slots = min(scheduler.max_num_seqs, most)
        reasons["speech.num_slots"] = f"one for each running request, at most {most}"
    step_clips = _clips(options, "max_num_encoder_input_tokens", speech.length)
    if step_clips is None:
        step_clips = max(1, scheduler.max_num_batched_tokens // speech.length)
        reasons["speech.step_clips"] = "those whose positions are as many as a step has tokens"
    num_workers = options.audio_workers
    if num_workers is None:
        num_workers = max(1, min(4, usable_cores() // 2))
        reasons["speech.num_workers"] = "half of the cores, 1 to 4"
    heads = speech.num_heads
    case = AttentionCase(device.type, model.dtype, heads, heads, speech.head_dim, cache=None, causal=False)
    return SpeechConfig(
        num_slots=num_slots,
        step_clips=min(step_clips, num_slots),
        encoder_backend=choose_backend("auto", "auto", [case]).backend,
        num_workers=num_workers,
        cache_bytes=int(options.mm_processor_cache_gb * GIB),
        rules=read_speech_rules(model.path, scheduler.max_model_len),
        mel=_mel(options, model, speech, device, reasons),
    )


def most_slots(model: ModelConfig, speech: SpeechDescription, device: torch.device) -> int:
    """Return the default limit of slots, each of which holds the encoded keys and values of a clip on the device."""
    if device.type != "cuda":
        return DEFAULT_SLOTS
    slot_bytes = 2 * model.num_layers * speech.length * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    return max(DEFAULT_SLOTS, SLOT_BYTES // slot_bytes)


def _mel(
    options: EngineOptions,
    model: ModelConfig,
    speech: SpeechDescription,
    device: torch.device,
    reasons: dict[str, str],
) -> MelSettings | None:
    """Return the settings with which the device computes mel features; None if worker processes compute them.

    Raises ValueError if the option audio_features is "device" and the device cannot compute them.
    """
    asked = options.audio_features
    if asked == "workers":
        return None
    if asked == "auto" and device.type == "cpu":
        reasons["speech.mel"] = "workers compute features while the CPU computes steps"
        return None
    try:
        return read_mel_settings(model.path, speech)
    except ValueError as error:
        if asked == "device":
            raise ValueError(f"audio_features is 'device', but {error}; or audio_features='workers'") from None
        reasons["speech.mel"] = f"workers compute features: {error}"
        return None


def _clips(options: EngineOptions, name: str, length: int) -> int | None:
    """Return how many clips of `length` encoder positions fit into the option `name`; None if it is not given.

    Raises ValueError if no clip fits.
    """
    given: int | None = getattr(options, name)
    if given is not None and given < length:
        raise ValueError(f"{name} is {given}; allowed: at least {length}, the positions of a clip")
    return None if given is None else given // length
