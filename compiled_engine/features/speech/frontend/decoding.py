"""Decodes a window of audio: makes its prompt, detects its language, and tries temperatures in turn.

The fall-back is that of Radford et al., arXiv:2212.04356: a window whose text repeats itself, or is improbable, is
decoded again at the next temperature.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from compiled_engine.features.speech.extras import TRANSCRIPTION
from compiled_engine.features.speech.frontend.transcription import Asked, Decoding
from compiled_engine.frontend.outputs import CompletionOutput, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.speech import SpeechRules

TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# A window is decoded again if its text compresses better than this, or its tokens are less probable on average.
MOST_COMPRESSION, LEAST_LOGPROB = 2.4, -1.0


@dataclass(frozen=True)
class Wanted:
    """The arguments of a transcription."""

    language: str | None = None  # a code such as "en"; None: detected
    task: str = TASKS[0]
    context_ids: tuple[int, ...] = ()  # tokens of a text that precedes the audio's
    temperatures: tuple[float, ...] = TEMPERATURES  # tried in turn
    timestamps: bool = False

    @classmethod
    def checked(
        cls,
        rules: SpeechRules,
        vocab_size: int,
        language: str | None,
        task: str,
        context_ids: Sequence[int],
        temperature: float | Sequence[float] | None,
        timestamps: bool,
    ) -> Wanted:
        """Check the arguments of a transcription, and return them.

        temperature: None for TEMPERATURES. Raises ValueError with the argument, its value and what is allowed.
        """
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; allowed: {', '.join(TASKS)}")
        if not rules.languages:
            if task != TASKS[0] or language not in (None, "en"):
                raise ValueError(f"language is {language!r} and task {task!r}; allowed: the model transcribes English")
        elif language is not None and language not in rules.languages:
            raise ValueError(f"language is {language!r}; allowed: {', '.join(sorted(rules.languages))}")
        if context_ids and rules.before_context is None:
            raise ValueError("prompt is given; allowed: none, as the checkpoint has no prev_sot_token_id")
        given = TEMPERATURES if temperature is None else temperature
        temperatures = tuple(given) if isinstance(given, Sequence) else (float(given),)
        if not temperatures or not all(0 <= each <= 2 for each in temperatures):
            raise ValueError(f"temperature is {temperature!r}; allowed: a number from 0 to 2, or several in turn")
        if timestamps and rules.first_timestamp >= vocab_size:
            raise ValueError("timestamps is True; allowed: False, as the model's vocabulary has no timestamps")
        return cls(language, task, tuple(context_ids), temperatures, timestamps)


class Decoded(NamedTuple):
    """The decoded text of a window. See Segment for the fields. The end-of-text token is left out."""

    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float


@dataclass(frozen=True)
class WindowDecoder:
    """Decodes windows of audio. text_of_all: converts tokens to text, without special tokens."""

    rules: SpeechRules
    wanted: Wanted
    text_of_all: Callable[[Sequence[int]], str]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, without the timestamps among them."""
        return self.text_of_all([token for token in token_ids if token < self.rules.first_timestamp])

    def language(self, audio: Any) -> Decoding[str]:
        """Return the code of the wanted language, or else of the language detected in the window's audio.

        The code is "en" if the model has no choice of languages. audio: see `_prompt`.
        """
        languages = self.rules.languages
        if self.wanted.language is not None or not languages:
            return self.wanted.language or "en"
        allowed = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[*languages.values()])
        completion = _completed((yield Asked(_prompt(audio, (self.rules.start,)), allowed)))
        (token,) = completion.token_ids
        return next(code for code, each in languages.items() if each == token)

    def window(self, audio: Any, language: str) -> Decoding[Decoded]:
        """Decode a window of audio at each temperature in turn, until the text is plausible. Return the last result.

        audio: see `_prompt`.
        """
        for temperature in self.wanted.temperatures:
            decoded = yield from self._at(temperature, audio, language)
            if decoded.compression_ratio <= MOST_COMPRESSION and decoded.avg_logprob >= LEAST_LOGPROB:
                break
        return decoded

    def _at(self, temperature: float, audio: Any, language: str) -> Decoding[Decoded]:
        first_ids = self._first_tokens(language)
        params = SamplingParams(
            temperature=temperature,
            max_tokens=self.rules.most_tokens - len(first_ids),
            logprobs=0,
            detokenize=False,
            stop_token_ids=[self.rules.eos],
            extra_args={TRANSCRIPTION: "timestamps" if self.wanted.timestamps else "text"},
        )
        completion = _completed((yield Asked(_prompt(audio, first_ids), params)))
        tokens = tuple(completion.token_ids)
        kept = tuple(token for token in tokens if token != self.rules.eos)
        raw = self.text_of(kept).encode()
        ratio = len(raw) / len(zlib.compress(raw)) if raw else 0.0
        return Decoded(kept, temperature, (completion.cumulative_logprob or 0.0) / len(tokens), ratio)

    def _first_tokens(self, language: str) -> tuple[int, ...]:
        """Return the tokens of a prompt: end of the context, start, language, task, and whether timestamps follow."""
        rules, wanted, ids = self.rules, self.wanted, list[int]()
        if wanted.context_ids and rules.before_context is not None:
            ids += [rules.before_context, *wanted.context_ids[-(rules.most_tokens // 2 - 1) :]]
        ids.append(rules.start)
        if rules.languages:
            ids += [rules.languages[language], rules.tasks[wanted.task]]
        return tuple(ids) if wanted.timestamps else (*ids, rules.no_timestamps)


def _completed(output: RequestOutput) -> CompletionOutput:
    """Return the only completion of a prompt. Raises RuntimeError if it has failed or was aborted."""
    (completion,) = output.outputs
    if completion.finish_reason in ("abort", "error"):
        reason = completion.stop_reason or "its request was aborted"
        raise RuntimeError(f"a window of the audio was not transcribed to its end: {reason}")
    return completion


def _prompt(audio: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Return a prompt with the token ids `ids`. audio: a pair (samples, rate), or a PromptAudio."""
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"audio": audio}}
