"""Plain data that describes a speech model's encoder, its rules for tokens, and how the engine reads audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NO_RULES = (
    "the checkpoint's generation_config.json lacks decoder_start_token_id, no_timestamps_token_id or eos_token_id, "
    "which transcription needs"
)


@dataclass(frozen=True)
class SpeechDescription:
    """The encoder of a speech model. It encodes clips of a fixed length.

    A clip's features are [num_mel_bins, num_frames]; its encoding is [length, hidden size of the model].
    """

    num_mel_bins: int
    num_frames: int
    length: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class MelSettings:
    """Parameters of the features of audio, for the feature extractors that `features/speech/log_mel.py` implements."""

    rate: int  # samples per second
    num_samples: int  # of a clip; silence is added to a shorter one
    window: int  # samples of a frame
    hop: int  # samples between the beginnings of two frames


@dataclass(frozen=True)
class SpeechRules:
    """A checkpoint's special tokens and limits for transcriptions.

    All values but `most_tokens` and `latest_first` are token ids.
    """

    start: int  # the first token of a prompt
    no_timestamps: int  # the next ids are the timestamps of a window, one for each encoder position, in order
    eos: int
    most_tokens: int  # of a prompt and its text
    languages: Mapping[str, int]  # code -> token; empty for a model of English alone
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]  # suppressed as the first token of a text
    before_context: int | None  # the token before a context, which is a text before the audio's; None: no context
    latest_first: int | None  # most encoder positions before the first timestamp; None: no limit

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1


@dataclass(frozen=True)
class SpeechConfig:
    """Configuration of audio in prompts: how clips are read, and how many have keys and values on the device."""

    num_slots: int  # clips whose keys and values are on the device; each running request holds one
    step_clips: int  # most clips that a step encodes
    encoder_backend: str  # attention backend of the encoder
    num_workers: int  # processes that decode audio, and compute features that the device does not compute
    cache_bytes: int  # samples and features kept in each process that takes requests
    rules: SpeechRules | None = None  # None if the checkpoint has none; transcriptions are then refused
    mel: MelSettings | None = None  # set if the device computes the features of clips, from samples


def require_rules(config: SpeechConfig | None) -> SpeechRules:
    """Return the rules by which a model transcribes. Raises ValueError for a model that cannot transcribe.

    config: None for a model that takes no audio.
    """
    if config is None:
        raise ValueError("audio is given, but the model takes none; allowed: a speech model, such as Whisper")
    if config.rules is None:
        raise ValueError(NO_RULES)
    return config.rules
