"""Decodes audio files, and converts samples to another rate."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

Samples = np.ndarray[Any, np.dtype[np.float32]]
INSTALL = "pip install 'compiled-engine[audio]'"


def decoded_audio(data: bytes, most_seconds: float) -> tuple[Samples, int]:
    """Return the samples of an audio file, channels averaged, and their rate per second.

    Raises ValueError for a file that is no audio of a known format or longer than `most_seconds`, and if the package
    soundfile is not installed.
    """
    try:
        import soundfile
    except ImportError as error:
        raise ValueError(f"audio files need the package soundfile ({INSTALL}); allowed without it: samples") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, rate = len(file) / file.samplerate, int(file.samplerate)
            if not 0 < seconds <= most_seconds:
                raise ValueError(f"the audio has {seconds:.1f} s; allowed: more than 0, at most {most_seconds:g}")
            samples_NC = file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"it is no audio file that can be read: {error.error_string}") from error
    return samples_NC.mean(axis=1, dtype=np.float32), rate


def resampled(samples_N: Samples, rate: int, wanted: int) -> Samples:
    """Return the samples at another rate per second, float32. Frequencies above half of either rate are left out.

    The spectrum is cut or extended, between margins of silence, which keep the two ends apart.
    """
    if rate == wanted:
        return samples_N
    margin = max(rate // 20, 1)
    padded = np.pad(samples_N, margin)
    count, kept = round(len(samples_N) * wanted / rate), round(len(padded) * wanted / rate)
    made = np.fft.irfft(np.fft.rfft(padded), kept) * (kept / len(padded))
    start = round(margin * wanted / rate)
    return made[start : start + count].astype(np.float32)
