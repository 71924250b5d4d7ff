"""Reads audio that users give as samples with their rate, paths or bytes, decodes files, and converts rates."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from compiled_engine.features.images.frontend.sources import MediaSource, file_source, read_file

Samples = np.ndarray[Any, np.dtype[np.float32]]
INSTALL = "pip install 'compiled-engine[audio]'"
ALLOWED = "a pair (samples, rate), a path, or the bytes of an audio file"
# Samples per second.
LEAST_RATE, MOST_RATE = 1_000, 384_000
LONGEST_S = 2 * 3600  # of audio to transcribe
PIECE_S = 60  # of audio that is converted to another rate at once


def audio_reader(name: str, audio: Any) -> Callable[[], MediaSource]:
    """Return a function that returns the audio that a caller gives, and may be called in another thread.

    The source is of the kind "samples" or "file"; samples are in float32, with their rate as `mode`. Files are read,
    and types, shapes and rates are checked, before this returns. Raises TypeError, ValueError or OSError, beginning
    with the name, for a value that is no audio or is out of bounds. The returned function copies samples, and raises
    ValueError, beginning with the name, if some are not finite.
    """
    try:
        if isinstance(audio, bytes | bytearray | memoryview):
            source = file_source(bytes(audio))
            return lambda: source
        if isinstance(audio, str | Path):
            source = file_source(read_file(Path(audio)))
            return lambda: source
        if isinstance(audio, tuple) and len(audio) == 2 and hasattr(audio[0], "__array__"):
            samples_N, rate = np.asarray(audio[0]), audio[1]
            _check_samples(samples_N, rate)
            return partial(_of_samples, name, samples_N, int(rate))
    except OSError as error:
        raise OSError(f"{name}: {error.strerror or error}: {str(error.filename)!r}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    raise TypeError(f"{name} must be {ALLOWED}, got {type(audio).__name__}")


def _check_samples(samples: np.ndarray[Any, Any], rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not LEAST_RATE <= rate <= MOST_RATE:
        raise ValueError(f"the rate must be a whole number from {LEAST_RATE} to {MOST_RATE}, got {rate!r}")
    if samples.ndim != 1 or samples.size == 0 or samples.dtype not in (np.float32, np.float64, np.int16):
        raise ValueError(
            "samples must be a float or int16 array of shape [number], one channel, got "
            f"{samples.dtype} of shape {list(samples.shape)}"
        )


def _of_samples(name: str, given_N: np.ndarray[Any, Any], rate: int) -> MediaSource:
    """Return a source with a copy of the samples in float32. Raises ValueError if some are not finite.

    numpy copies without holding the GIL, which `tobytes` would hold.
    """
    factor = np.float32(1 / 32768 if given_N.dtype == np.int16 else 1)
    samples_N = np.multiply(given_N, factor, dtype=np.float32, casting="same_kind")
    if not np.isfinite(samples_N).all():
        raise ValueError(f"{name}: samples must be finite")
    return MediaSource("samples", cast(bytes, memoryview(samples_N).cast("B")), str(rate), samples_N.shape)


def samples_of(source: MediaSource) -> Samples:
    """Return the samples of a source of the kind "samples", [N].

    Raises ValueError if they are longer than LONGEST_S.
    """
    samples_N, rate = np.frombuffer(source.data, dtype=np.float32), int(source.mode)
    if len(samples_N) > LONGEST_S * rate:
        raise ValueError(f"audio has {len(samples_N) / rate:.0f} s; allowed: at most {LONGEST_S}")
    return samples_N


def check_length(samples_N: Samples, rate: int, most_seconds: float) -> None:
    """Raise ValueError for samples that last longer than `most_seconds`."""
    if len(samples_N) > most_seconds * rate:
        raise ValueError(f"the audio has {len(samples_N) / rate:.1f} s; allowed: at most {most_seconds:g}")


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

    Long audio is converted piece by piece, each with a second of its neighbours, so that memory stays bounded.
    """
    if rate == wanted:
        return samples_N
    pieces = []
    for first in range(0, len(samples_N), PIECE_S * rate):
        before = min(first, rate)  # none, or a second
        made = _resampled_at_once(samples_N[first - before : first + (PIECE_S + 1) * rate], rate, wanted)
        start = before // rate * wanted
        pieces.append(made[start : start + PIECE_S * wanted])
    return np.concatenate(pieces)


def _resampled_at_once(samples_N: Samples, rate: int, wanted: int) -> Samples:
    """Return the samples at another rate. Their spectrum, with silence added on both sides, is cut or extended."""
    margin = max(rate // 20, 1)
    padded = np.pad(samples_N, margin)
    count, kept = round(len(samples_N) * wanted / rate), round(len(padded) * wanted / rate)
    made = np.fft.irfft(np.fft.rfft(padded), kept) * (kept / len(padded))
    start = round(margin * wanted / rate)
    return made[start : start + count].astype(np.float32)
