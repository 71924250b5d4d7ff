"""Requests with audio: its features are computed in worker processes, and given to the core when it asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.images.frontend.cache import ProcessedMedia
from compiled_engine.features.images.frontend.processing import MediaProcessing
from compiled_engine.features.images.pixels import calls_of
from compiled_engine.features.speech.extras import extras_of
from compiled_engine.features.speech.frontend.audio import Samples, read_audio
from compiled_engine.features.speech.frontend.transcription import (
    Asking,
    SpeechRules,
    Wanted,
    transcribing,
    windows_of,
)
from compiled_engine.features.speech.frontend.worker import RATE, SAMPLES
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.request_hooks import Attachment, RequestFeature, RequestPart
from compiled_engine.process.smallest_first import Stopped, never

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig
    from compiled_engine.features.images.frontend.sources import MediaSource
    from compiled_engine.frontend.tokenizer import Tokenizer
    from compiled_engine.sampling.params import SamplingParams
    from compiled_engine.speech import SpeechDescription

DATA, AUDIO = "multi_modal_data", "audio"
FRAMES_PER_SECOND = 100  # of features
LONGEST_S = 2 * 3600  # of audio to transcribe


class ExtractorFiles(NamedTuple):
    """The checkpoint's feature extractor as a Processor."""

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
        """Return the order of the workers."""
        return {"folder": self.folder, "dtype": self.dtype}


class SpeechRequests(RequestFeature):
    """Turns the audio of prompts into features, and long audio into prompts.

    processing, speech: None for a model that takes no audio. folder: the checkpoint's. tokenizer: None if prompts are
    token ids. longest: most tokens of a prompt and its completion.
    """

    def __init__(
        self,
        processing: MediaProcessing | None,
        speech: SpeechDescription | None = None,
        folder: Path | None = None,
        tokenizer: Tokenizer | None = None,
        longest: int = 0,
    ) -> None:
        self.processing, self.speech = processing, speech
        self._folder, self._tokenizer, self._longest = folder, tokenizer, longest

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> SpeechRequests:
        """Return the feature's part for an engine."""
        if config.speech is None:
            return cls(None)
        model = config.model
        files = ExtractorFiles(str(model.path), str(model.dtype).removeprefix("torch."))
        processing = MediaProcessing(files, config.speech.num_workers, config.speech.cache_bytes)
        processing.start()
        return cls(processing, model.speech, model.path, tokenizer, model.max_model_len)

    def transcribing(
        self,
        audio: Any,
        language: str | None,
        task: str,
        prompt: str | None,
        temperature: float | Sequence[float] | None,
    ) -> Asking:
        """Return the work of a transcription, see Asking. For the arguments see `LLM.transcribe`.

        Raises TypeError, ValueError or OSError with the argument, its value and what is allowed.
        """
        if self.speech is None or self._folder is None:
            raise ValueError("audio is given, but the model takes none; allowed: a speech model, such as Whisper")
        if (tokenizer := self._tokenizer) is None:
            raise ValueError("transcription needs a tokenizer, and the checkpoint has none")
        rules = SpeechRules.read(self._folder, self._longest)
        context = tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False) if prompt else ()
        wanted = Wanted.checked(rules, language, task, context, temperature)
        samples_N, rate = self._samples(read_audio(AUDIO, audio))
        windows = windows_of(samples_N, rate, self.speech.num_frames / FRAMES_PER_SECOND)
        special = tokenizer.special_ids

        def decode(token_ids: Sequence[int]) -> str:
            return tokenizer.decode([token for token in token_ids if token not in special])

        return transcribing(rules, wanted, windows, decode)

    def _samples(self, source: MediaSource) -> tuple[Samples, int]:
        """Return samples and their rate; a file is decoded in a worker process. Raises ValueError."""
        if source.kind == "file":
            assert self.processing is not None
            running = self.processing.submit(source, {"most_seconds": LONGEST_S})
            try:
                found = self.processing.result(running, never).inputs
            except ValueError as error:
                raise ValueError(f"{AUDIO}: {error}") from None
            return found[SAMPLES].tensor().numpy(), int(found[RATE].tensor())
        samples_N, rate = np.frombuffer(source.data, dtype=np.float32), int(source.mode)
        if len(samples_N) > LONGEST_S * rate:
            raise ValueError(f"audio has {len(samples_N) / rate:.0f} s; allowed: at most {LONGEST_S}")
        return samples_N, rate

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
        assert self.processing is not None
        assert self.speech is not None
        if self.processing.unusable:
            raise ValueError(f"{name} must have no audio: {self.processing.unusable}")
        name = f"{name}['audio']"
        return PromptAudio(self.processing, self.speech, name, read_audio(name, audio))

    def metrics(self) -> dict[str, float]:
        return {} if self.processing is None else self.processing.metrics()

    def close(self) -> None:
        if self.processing is not None:
            self.processing.close()


class PromptAudio(Attachment):
    """The audio of a prompt. Its features are kept while its request runs, as the core may ask for them again."""

    def __init__(self, processing: MediaProcessing, speech: SpeechDescription, name: str, source: MediaSource) -> None:
        self._processing, self._speech, self._name = processing, speech, name
        self._source: MediaSource | None = source
        self._clip: ProcessedMedia | None = None

    @property
    def is_ready(self) -> bool:
        return self._clip is not None

    @property
    def is_remote(self) -> bool:
        return False

    def wait(self, is_stopped: Stopped = never) -> None:
        if self._clip is not None:
            return
        assert self._source is not None
        try:
            clip = self._processing.result(self._processing.submit(self._source, {}), is_stopped)
            found = tuple(clip.inputs["input_features"].shape)
            wanted = self._speech.num_mel_bins, self._speech.num_frames
            if found != wanted:
                raise ValueError(f"the features have the shape {list(found)}; allowed for the model: {list(wanted)}")
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None
        self._clip, self._source = clip, None

    def expand(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids

    def part(self, token_ids: tuple[int, ...], params: SamplingParams) -> RequestPart:
        assert self._clip is not None
        key = self._clip.key
        return RequestPart(extras_of(key), root={AUDIO: key}, give=self.give)

    def give(self, keys: Sequence[str], is_stopped: Stopped = never) -> list[ControlCall]:
        """Return the control calls with the features, see PreparedRequest."""
        assert self._clip is not None
        return list(calls_of(dict.fromkeys(keys, self._clip.inputs)))
