"""Writes transcriptions as text, JSON and subtitles, in the formats of OpenAI's audio endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from compiled_engine.features.speech.frontend.transcription import Transcription


def as_text(result: Transcription) -> str:
    """Return the text and a line end."""
    return f"{result.text}\n"


def as_json(result: Transcription) -> str:
    """Return a JSON object with the text."""
    return json.dumps({"text": result.text}, ensure_ascii=False)


def verbose(result: Transcription, task: str) -> dict[str, Any]:
    """Return the object of the format verbose_json. task: "transcribe" or "translate"."""
    segments = [
        {
            "id": number,
            "seek": segment.seek,
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": list(segment.token_ids),
            "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob,
            "compression_ratio": segment.compression_ratio,
        }
        for number, segment in enumerate(result.segments)
    ]
    about = {"task": task, "language": result.language, "duration": result.duration}
    return {**about, "text": result.text, "segments": segments}


def as_srt(result: Transcription) -> str:
    """Return SubRip subtitles, one for each segment with text."""
    return _subtitles(result, ",", numbered=True)


def as_vtt(result: Transcription) -> str:
    """Return WebVTT subtitles, one for each segment with text."""
    return "WEBVTT\n\n" + _subtitles(result, ".", numbered=False)


def _subtitles(result: Transcription, point: str, *, numbered: bool) -> str:
    shown = [segment for segment in result.segments if segment.text.strip()]
    entries = []
    for number, segment in enumerate(shown, 1):
        times = f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}"
        text = segment.text.strip().replace("-->", "->")
        entries.append(f"{number}\n{times}\n{text}\n\n" if numbered else f"{times}\n{text}\n\n")
    return "".join(entries)


def _clock(seconds: float, point: str) -> str:
    """Return a time as hours, minutes, seconds and milliseconds. point: separates seconds and milliseconds."""
    whole = round(seconds * 1000)
    hours, minutes = divmod(whole // 60_000, 60)
    return f"{hours:02}:{minutes:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


FORMATS: dict[str, Callable[[Transcription, str], str]] = {
    "text": lambda result, task: as_text(result),
    "json": lambda result, task: as_json(result),
    "verbose_json": lambda result, task: json.dumps(verbose(result, task), ensure_ascii=False),
    "srt": lambda result, task: as_srt(result),
    "vtt": lambda result, task: as_vtt(result),
}
"""By name: the function that writes a transcription, given the task too."""
TIMED = ("verbose_json", "srt", "vtt")
"""The formats that show segments, for which audio is transcribed with timestamps."""
