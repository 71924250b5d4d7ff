"""Transcribes audio of any length with a speech model: windows, language, suppressed tokens and fall-back.

The rules are those of transformers' generation for Whisper without timestamps, and of the paper (Radford et al.,
arXiv:2212.04356): a window whose text repeats itself, or is improbable, is decoded again at the next temperature.
Windows do not depend on each other's text, so all of them are decoded together.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compiled_engine.features.speech.frontend.audio import Samples
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.sampling.params import SamplingParams

TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# A window is decoded again if its text compresses better than this, or its tokens are less probable on average.
MOST_COMPRESSION, LEAST_LOGPROB = 2.4, -1.0
# A window ends at the quietest place of its last seconds: their number, at most this share of it, and a place's length.
QUIET_S, QUIET_SHARE, PLACE_S = 2.0, 0.1, 0.05


@dataclass(frozen=True)
class Segment:
    """The text of a window of the audio, of which `start` and `end` are in seconds."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float  # at which it was decoded
    avg_logprob: float  # mean log-probability of its tokens, the end included
    compression_ratio: float  # bytes of the text to bytes of the compressed text


@dataclass(frozen=True)
class Transcription:
    """The result of a transcription. language: its code, such as "en"; duration: of the audio, in seconds."""

    text: str
    language: str
    duration: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SpeechRules:
    """What a checkpoint's generation_config.json states about transcription."""

    start: int  # the first token of a prompt
    no_timestamps: int
    eos: int
    most_tokens: int  # of a prompt and its text
    languages: Mapping[str, int]  # code -> token; empty for a model of English alone
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]  # as the first token of a text
    before_context: int | None  # the token before the text that precedes the audio's; None: there may be no such text

    @classmethod
    def read(cls, folder: Path, longest: int) -> SpeechRules:
        """Read the rules from a checkpoint's folder. Raises ValueError if they are missing.

        longest: most tokens of a prompt and its text that the engine takes.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no generation_config.json, which transcription needs")
        values = json.loads(path.read_text(encoding="utf-8"))
        for name in ("decoder_start_token_id", "no_timestamps_token_id", "eos_token_id"):
            if not isinstance(values.get(name), int):
                raise ValueError(f"{path}: {name} must be a token id, got {values.get(name)!r}")
        languages = values.get("lang_to_id") or {}
        return cls(
            start=values["decoder_start_token_id"],
            no_timestamps=values["no_timestamps_token_id"],
            eos=values["eos_token_id"],
            most_tokens=min(int(values.get("max_length") or longest), longest),
            languages={name.strip("<|>"): token for name, token in languages.items()},
            tasks=values.get("task_to_id") or {},
            suppressed=tuple(values.get("suppress_tokens") or ()),
            suppressed_first=tuple(values.get("begin_suppress_tokens") or ()),
            before_context=values.get("prev_sot_token_id"),
        )


@dataclass(frozen=True)
class Wanted:
    """What a caller asks for. language: None to detect it. context_ids: tokens of a text before the audio's."""

    language: str | None = None
    task: str = TASKS[0]
    context_ids: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = TEMPERATURES

    @classmethod
    def checked(
        cls,
        rules: SpeechRules,
        language: str | None,
        task: str,
        context_ids: Sequence[int],
        temperature: float | Sequence[float] | None,
    ) -> Wanted:
        """Return what a caller asks for. Raises ValueError with the argument, its value and what is allowed."""
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
        return cls(language, task, tuple(context_ids), temperatures)


class Window(NamedTuple):
    """A part of the audio that is as long as a clip, or shorter: its samples, from `start` on, in seconds."""

    start: float
    samples_N: Samples
    rate: int

    @property
    def end(self) -> float:
        return self.start + len(self.samples_N) / self.rate


class Asked(NamedTuple):
    """A prompt to run."""

    prompt: dict[str, Any]
    params: SamplingParams


Asking = Generator[list[Asked], Sequence[RequestOutput], Transcription]
"""Yields prompts to run together, receives their outputs in the same order, and returns the transcription."""


def run(asking: Asking, run_all: Callable[[list[Asked]], Sequence[RequestOutput]]) -> Transcription:
    """Return the transcription. run_all: runs prompts, and returns their outputs in order."""
    asked = next(asking)
    while True:
        try:
            asked = asking.send(run_all(asked))
        except StopIteration as end:
            result: Transcription = end.value
            return result


async def run_async(asking: Asking, run_one: Callable[[Asked], Awaitable[RequestOutput]]) -> Transcription:
    """Return the transcription. run_one: runs a prompt; those that are asked for together run at the same time."""
    asked = next(asking)
    while True:
        outputs = await asyncio.gather(*map(run_one, asked))
        try:
            asked = asking.send(outputs)
        except StopIteration as end:
            result: Transcription = end.value
            return result


def windows_of(samples_N: Samples, rate: int, seconds: float) -> list[Window]:
    """Cut audio into windows of at most these seconds. Each but the last ends at a quiet place."""
    most, place = int(seconds * rate), max(1, int(PLACE_S * rate))
    found, start = [], 0
    while len(samples_N) - start > most:
        searched = min(int(QUIET_S * rate), int(most * QUIET_SHARE)) // place * place
        end = start + most
        if searched:
            energy = np.square(samples_N[end - searched : end].reshape(-1, place)).sum(1)
            end += (int(energy.argmin()) + 1) * place - searched
        found.append(Window(start / rate, samples_N[start:end], rate))
        start = end
    return [*found, Window(start / rate, samples_N[start:], rate)]


def transcribing(
    rules: SpeechRules, wanted: Wanted, windows: Sequence[Window], decode: Callable[[Sequence[int]], str]
) -> Asking:
    """Transcribe windows, see Asking. decode: returns the text of tokens, without special ones."""
    language = wanted.language
    if language is None and rules.languages:
        allowed = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[*rules.languages.values()])
        (output,) = yield [Asked(_prompt(windows[0], (rules.start,)), allowed)]
        (token,) = output.outputs[0].token_ids
        language = next(code for code, each in rules.languages.items() if each == token)
    first_ids = _first_tokens(rules, wanted, language)
    segments: dict[int, Segment] = {}
    for number, temperature in enumerate(wanted.temperatures):
        is_last = number == len(wanted.temperatures) - 1
        left = [index for index in range(len(windows)) if index not in segments]
        decoded = yield from _decoded(rules, [windows[index] for index in left], first_ids, temperature, decode)
        segments |= {
            index: segment for index, segment in zip(left, decoded, strict=True) if is_last or _is_plausible(segment)
        }
        if len(segments) == len(windows):
            break
    ordered = tuple(segments[index] for index in range(len(windows)))
    text = "".join(segment.text for segment in ordered).strip()
    return Transcription(text, language or "en", windows[-1].end, ordered)


def _decoded(
    rules: SpeechRules,
    windows: Sequence[Window],
    first_ids: tuple[int, ...],
    temperature: float,
    decode: Callable[[Sequence[int]], str],
) -> Generator[list[Asked], Sequence[RequestOutput], list[Segment]]:
    """Decode windows at a temperature. The first token comes alone, as other tokens are suppressed for it."""
    most = rules.most_tokens - len(first_ids)

    def params(max_tokens: int, suppressed: Sequence[int]) -> SamplingParams:
        words = tuple((token,) for token in sorted(set(suppressed)))
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=False,
            stop_token_ids=[rules.eos],
            bad_words_token_ids=words,
        )

    begun = params(1, (*rules.suppressed, *rules.suppressed_first))
    outputs = yield [Asked(_prompt(window, first_ids), begun) for window in windows]
    found = [(list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob or 0.0) for each in outputs]
    going = [index for index, (tokens, _) in enumerate(found) if tokens[-1] != rules.eos and most > 1]
    if going:
        rest = params(most - 1, rules.suppressed)
        outputs = yield [Asked(_prompt(windows[index], (*first_ids, *found[index][0])), rest) for index in going]
        for index, each in zip(going, outputs, strict=True):
            tokens, logprob = found[index]
            found[index] = [*tokens, *each.outputs[0].token_ids], logprob + (each.outputs[0].cumulative_logprob or 0.0)
    segments = []
    for window, (tokens, logprob) in zip(windows, found, strict=True):
        kept = tuple(token for token in tokens if token != rules.eos)
        text = decode(kept)
        raw = text.encode()
        ratio = len(raw) / len(zlib.compress(raw)) if raw else 0.0
        segments.append(Segment(window.start, window.end, text, kept, temperature, logprob / len(tokens), ratio))
    return segments


def _is_plausible(segment: Segment) -> bool:
    return segment.compression_ratio <= MOST_COMPRESSION and segment.avg_logprob >= LEAST_LOGPROB


def _first_tokens(rules: SpeechRules, wanted: Wanted, language: str | None) -> tuple[int, ...]:
    """Return the tokens of a prompt: the context's last ones, start, language, task, and that no timestamps follow."""
    ids: list[int] = []
    if wanted.context_ids and rules.before_context is not None:
        ids += [rules.before_context, *wanted.context_ids[-(rules.most_tokens // 2 - 1) :]]
    ids.append(rules.start)
    if language is not None and rules.languages:
        ids += [rules.languages[language], rules.tasks[wanted.task]]
    return (*ids, rules.no_timestamps)


def _prompt(window: Window, ids: Sequence[int]) -> dict[str, Any]:
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"audio": (window.samples_N, window.rate)}}
