"""Prepares the samples or features of audio in requests, and gives them to the core when it asks for them.

Worker processes decode files and convert rates. They also compute features, unless the device does. Samples at the
extractor's rate, for a device that computes features, need no worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.frontend.cache import NO_PLACEHOLDER, ProcessedMedia
from compiled_engine.features.images.frontend.processing import MediaProcessing
from compiled_engine.features.images.pixels import calls_of
from compiled_engine.features.speech.extras import FEATURES, SAMPLES, extras_of
from compiled_engine.features.speech.frontend import quiet_windows, timed_windows
from compiled_engine.features.speech.frontend.audio import (
    LONGEST_S,
    Samples,
    audio_reader,
    check_length,
    samples_of,
)
from compiled_engine.features.speech.frontend.decoding import Wanted, WindowDecoder
from compiled_engine.features.speech.frontend.timed_windows import Features
from compiled_engine.features.speech.frontend.transcription import FRAMES_PER_SECOND, Transcribing
from compiled_engine.features.speech.frontend.worker import CLIP, RATE, SECONDS
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.request_hooks import Attachment, RequestFeature, RequestPart
from compiled_engine.process.smallest_first import Stopped, never
from compiled_engine.speech import require_rules

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig, ModelConfig
    from compiled_engine.features.images.frontend.sources import MediaSource
    from compiled_engine.frontend.tokenizer import Tokenizer
    from compiled_engine.sampling.params import SamplingParams
    from compiled_engine.speech import SpeechConfig

DATA, AUDIO = "multi_modal_data", "audio"
# Settings of a worker for audio that is to be transcribed: it answers with samples, or with the features of all.
WHOLE_FILE, WHOLE_FEATURES = ({"most_seconds": LONGEST_S, "answer": name} for name in (SAMPLES, FEATURES))
CLIP_SAMPLES = {"answer": CLIP}  # and for a clip whose features the device computes


class ExtractorFiles(NamedTuple):
    """Describes the checkpoint's feature extractor to the worker processes. Implements Processor."""

    folder: str
    dtype: str  # of features, torch's name

    @property
    def worker(self) -> str:
        return "compiled_engine.features.speech.frontend.worker"

    @property
    def one(self) -> str:
        return "audio"

    @property
    def many(self) -> str:
        return "audio"

    def order(self) -> dict[str, Any]:
        """Return the message that starts the worker processes, see `main` in worker.py."""
        return {"folder": self.folder, "dtype": self.dtype}


class SpeechRequests(RequestFeature):
    """Turns the audio of prompts into samples or features of clips, and long audio into prompts.

    processing, model, config: None for a model that takes no audio. tokenizer: None if prompts are token ids.
    """

    def __init__(
        self,
        processing: MediaProcessing | None,
        model: ModelConfig | None = None,
        config: SpeechConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.processing, self._tokenizer = processing, tokenizer
        self._config = config
        self._speech, self._vocab_size = (None, 0) if model is None else (model.speech, model.vocab_size)

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> SpeechRequests:
        """Return the feature's part for an engine, and start its worker processes if the model takes audio."""
        if config.speech is None:
            return cls(None)
        model = config.model
        files = ExtractorFiles(str(model.path), str(model.dtype).removeprefix("torch."))
        processing = MediaProcessing(files, config.speech.num_workers, config.speech.cache_bytes)
        processing.start()
        return cls(processing, model, config.speech, tokenizer)

    def transcribing(
        self,
        audio: Any,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        temperature: float | Sequence[float] | None = None,
        *,
        timestamps: bool = False,
    ) -> Transcribing:
        """Return a transcription, not yet begun. For the arguments see `LLM.transcribe`.

        Waits for a file to be decoded, and with timestamps for the features of the whole audio. Raises TypeError,
        ValueError or OSError with the argument, its value and what is allowed.
        """
        rules = require_rules(self._config)
        assert self._speech is not None  # as there is a configuration
        if (tokenizer := self._tokenizer) is None:
            raise ValueError("transcription needs a tokenizer, and the checkpoint has none")
        context = tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False) if prompt else ()
        wanted = Wanted.checked(rules, self._vocab_size, language, task, context, temperature, timestamps)
        special = tokenizer.special_ids

        def text_of(token_ids: Sequence[int]) -> str:
            return tokenizer.decode([token for token in token_ids if token not in special])

        decoder, source = WindowDecoder(rules, wanted, text_of), audio_reader(AUDIO, audio)()
        if timestamps:
            return timed_windows.transcribing(decoder, self._features(source), self._speech.num_frames)
        seconds = self._speech.num_frames / FRAMES_PER_SECOND
        return quiet_windows.transcribing(decoder, quiet_windows.windows_of(*self._samples(source), seconds))

    def _samples(self, source: MediaSource) -> tuple[Samples, int]:
        """Return the samples of audio and their rate. A file is decoded in a worker process.

        Raises ValueError if the audio cannot be decoded, or is too long.
        """
        if source.kind == "file":
            found = self._processed(source, WHOLE_FILE)
            return found.inputs[SAMPLES].tensor().numpy(), int(found.inputs[RATE].tensor())
        return samples_of(source), int(source.mode)

    def _features(self, source: MediaSource) -> Features:
        """Return the features of the whole audio, computed in a worker process. Raises the errors of `_processed`."""
        assert self._speech is not None
        whole = self._processed(source, WHOLE_FEATURES)
        features_MF, seconds = whole.inputs[FEATURES].tensor(), float(whole.inputs[SECONDS].tensor())
        num_frames, window = features_MF.shape[1], self._speech.num_frames

        def cut(first: int) -> PromptAudio:
            def load(is_stopped: Stopped) -> ProcessedMedia:
                cut_MF = features_MF[:, first : first + window]
                padded_MF = torch.nn.functional.pad(cut_MF, (0, window - cut_MF.shape[1]))
                key = hashlib.sha256(f"{whole.key} {first}".encode()).hexdigest()
                return whole._replace(key=key, inputs={FEATURES: PlainTensor.of(padded_MF)})

            return PromptAudio(load)

        of_audio = min(num_frames, max(1, round(seconds * FRAMES_PER_SECOND)))
        return Features(of_audio, num_frames, seconds, cut)

    def _processed(self, source: MediaSource, settings: Mapping[str, Any]) -> ProcessedMedia:
        """Return a worker's answer for audio that is to be transcribed. settings: see `main` in worker.py.

        Raises ValueError if the audio cannot be decoded, or is too long.
        """
        assert self.processing is not None
        if source.kind != "file":
            samples_of(source)
        try:
            return self.processing.result(self.processing.submit(source, settings), never)
        except ValueError as error:
            raise ValueError(f"{AUDIO}: {error}") from None

    def attach(self, prompts: Sequence[Prompt]) -> Sequence[Attachment | None]:
        if self.processing is None:
            return ()
        return [self._attach(prompt) if prompt.data else None for prompt in prompts]

    def _attach(self, prompt: Prompt) -> Attachment:
        name, data = prompt.part_name(DATA), prompt.data[DATA]
        if not isinstance(data, Mapping):
            raise TypeError(f"{name} must be a dict such as {{'audio': (samples, rate)}}, got {type(data).__name__}")
        for kind, value in data.items():
            if kind != AUDIO and value is not None:
                raise ValueError(f"{name} has {kind!r}; allowed: {AUDIO!r}")
        audio = data.get(AUDIO)
        if isinstance(audio, PromptAudio):  # prepared before
            return audio
        if isinstance(audio, list):
            if len(audio) != 1:
                raise ValueError(f"{name}['audio'] has {len(audio)} clips; allowed: one")
            (audio,) = audio
        name = f"{name}['audio']"
        return PromptAudio(partial(self._clip, name, audio_reader(name, audio)))

    def _clip(self, name: str, read: Callable[[], MediaSource], is_stopped: Stopped) -> ProcessedMedia:
        """Return a clip with its features, or with samples from which the device computes them.

        read: returns the audio. Raises ValueError, beginning with the name.
        """
        assert self._config is not None
        source = read()
        try:
            if (mel := self._config.mel) is None:
                return self._with_features(source, is_stopped)
            if source.kind == "file" or int(source.mode) != mel.rate:
                return self._answered(source, CLIP_SAMPLES, is_stopped)
            samples_N = samples_of(source)
            check_length(samples_N, mel.rate, mel.num_samples / mel.rate)
            inputs = {SAMPLES: PlainTensor("float32", samples_N.shape, source.data)}
            return ProcessedMedia(source.digest(SAMPLES), NO_PLACEHOLDER, (), inputs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _with_features(self, source: MediaSource, is_stopped: Stopped) -> ProcessedMedia:
        assert self._speech is not None
        clip = self._answered(source, {}, is_stopped)
        found, wanted = tuple(clip.inputs[FEATURES].shape), (self._speech.num_mel_bins, self._speech.num_frames)
        if found != wanted:
            raise ValueError(f"the features have the shape {list(found)}; allowed for the model: {list(wanted)}")
        return clip

    def _answered(self, source: MediaSource, settings: Mapping[str, Any], is_stopped: Stopped) -> ProcessedMedia:
        assert self.processing is not None
        if self.processing.unusable:
            raise ValueError(f"no worker can prepare the audio: {self.processing.unusable}")
        return self.processing.result(self.processing.submit(source, settings), is_stopped)

    def metrics(self) -> dict[str, float]:
        return {} if self.processing is None else self.processing.metrics()

    def close(self) -> None:
        if self.processing is not None:
            self.processing.close()


class PromptAudio(Attachment):
    """Prepares the audio of a prompt as a clip. Keeps the clip, since the core may ask for its inputs again.

    load: returns the clip; raises ValueError for audio that cannot be decoded.
    """

    def __init__(self, load: Callable[[Stopped], ProcessedMedia]) -> None:
        self._load = load
        self._clip: ProcessedMedia | None = None

    @property
    def is_ready(self) -> bool:
        return self._clip is not None

    @property
    def is_remote(self) -> bool:
        return False

    def wait(self, is_stopped: Stopped = never) -> None:
        if self._clip is None:
            self._clip = self._load(is_stopped)

    def expand(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids

    def part(self, token_ids: tuple[int, ...], params: SamplingParams) -> RequestPart:
        assert self._clip is not None
        key = self._clip.key
        return RequestPart(extras_of(key), root={AUDIO: key}, give=self.give)

    def give(self, keys: Sequence[str], is_stopped: Stopped = never) -> list[ControlCall]:
        """Return the control calls that give the core the clip's inputs under these keys, see PreparedRequest."""
        assert self._clip is not None
        return list(calls_of(dict.fromkeys(keys, self._clip.inputs)))
