"""Transcribes audio with timestamps. Each window begins where the last whole segment of the window before ends.

The rules are those of transformers' generation of long texts with Whisper: windows are cut from the features of the
whole audio. A window's text is cut into segments wherever one timestamp follows another. A segment that is cut off by
the window's end is dropped, and the next window begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from compiled_engine.features.speech.frontend.decoding import WindowDecoder
from compiled_engine.features.speech.frontend.transcription import FRAMES_PER_SECOND, Decoding, Segment, Transcribing

FRAMES_PER_TIME = 2  # of features, from one timestamp to the next, which is a position of the encoder


class TimedPart(NamedTuple):
    """A segment of a window.

    start, end: its timestamps, in units of FRAMES_PER_TIME frames from the window's beginning.
    """

    start: int
    end: int
    token_ids: tuple[int, ...]


class Features(NamedTuple):
    """The features of the whole audio.

    `cut` returns the audio of a prompt, given the first frame of a window.
    """

    num_frames: int  # of the audio, without the silence that the extractor adds
    with_silence: int  # number of all frames
    duration: float  # in seconds
    cut: Callable[[int], Any]


def transcribing(decoder: WindowDecoder, features: Features, window_frames: int) -> Transcribing:
    """Return the transcription of audio with timestamps, not yet begun.

    window_frames: number of frames that the encoder reads at a time.
    """

    def part(language: str) -> Decoding[Sequence[Segment]]:
        seek, found = 0, list[Segment]()
        while seek < features.num_frames:
            decoded = yield from decoder.window(features.cut(seek), language)
            num_frames = min(features.with_silence - seek, window_frames)
            parts, advance = cut_at_timestamps(decoded.token_ids, decoder.rules.first_timestamp, num_frames)
            for each in parts:
                start, end = (
                    min((seek + time * FRAMES_PER_TIME) / FRAMES_PER_SECOND, features.duration)
                    for time in (each.start, each.end)
                )
                others = decoded[1:]
                found.append(Segment(start, end, decoder.text_of(each.token_ids), each.token_ids, *others, seek=seek))
            seek += advance
        return found

    return Transcribing(decoder.language(features.cut(0)), lambda language: [part(language)], features.duration)


def cut_at_timestamps(token_ids: Sequence[int], first: int, num_frames: int) -> tuple[list[TimedPart], int]:
    """Cut the tokens of a window into segments. Return the segments, and where the next window begins.

    first: the token of the first timestamp. num_frames: number of frames of the window. The next window's beginning is
    given in frames from the beginning of this window.
    """
    is_time = [token >= first for token in token_ids]
    borders = [number for number in range(1, len(token_ids)) if is_time[number - 1] and is_time[number]]
    if not borders:
        times = [token - first for token in token_ids if token >= first]
        end = times[-1] if times else 0
        return [TimedPart(0, end or num_frames // FRAMES_PER_TIME, tuple(token_ids))], num_frames
    ends_whole = is_time[-2:] == [False, True]  # nothing is said after the last segment
    if ends_whole:
        borders.append(len(token_ids))
    parts = [
        TimedPart(token_ids[start] - first, token_ids[end - 1] - first, tuple(token_ids[start:end]))
        for start, end in zip([0, *borders], borders, strict=False)
    ]
    if ends_whole:
        return parts, num_frames
    last = parts[-1]  # has the beginning of the dropped segment too
    parts[-1] = last._replace(token_ids=(*last.token_ids, token_ids[borders[-1]]))
    return parts, last.end * FRAMES_PER_TIME
