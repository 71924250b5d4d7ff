"""Transcribes audio in windows that end at quiet places. Windows are independent, so all can be decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_engine.features.speech.frontend.audio import Samples
from compiled_engine.features.speech.frontend.decoding import WindowDecoder
from compiled_engine.features.speech.frontend.transcription import FRAMES_PER_SECOND, Decoding, Segment, Transcribing

# A window ends at the quietest place of its last QUIET_S seconds, which are at most QUIET_SHARE of the window. A place
# has PLACE_S seconds.
QUIET_S, QUIET_SHARE, PLACE_S = 2.0, 0.1, 0.05


class Window(NamedTuple):
    """A part of the audio: its samples, their rate, and where it begins, in seconds. At most as long as a clip."""

    start: float
    samples_N: Samples
    rate: int

    @property
    def end(self) -> float:
        return self.start + len(self.samples_N) / self.rate


def windows_of(samples_N: Samples, rate: int, seconds: float) -> list[Window]:
    """Cut audio into windows of at most `seconds`. Each but the last ends at a quiet place."""
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


def transcribing(decoder: WindowDecoder, windows: Sequence[Window]) -> Transcribing:
    """Return the transcription of these windows, not yet begun. Each window becomes a segment.

    The language is detected in the first window.
    """

    def part(window: Window, language: str) -> Decoding[Sequence[Segment]]:
        decoded = yield from decoder.window((window.samples_N, window.rate), language)
        text, seek = decoder.text_of(decoded.token_ids), round(window.start * FRAMES_PER_SECOND)
        return (Segment(window.start, window.end, text, decoded.token_ids, *decoded[1:], seek=seek),)

    first = (windows[0].samples_N, windows[0].rate)
    return Transcribing(
        decoder.language(first), lambda language: [part(window, language) for window in windows], windows[-1].end
    )
