"""Audio as users give it, samples with their rate, paths and bytes, as plain data for the processes that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compiled_engine.features.images.frontend.sources import ImageSource, file_source, read_file

ALLOWED = "a pair (samples, rate), a path, or the bytes of an audio file"
# Samples per second.
LEAST_RATE, MOST_RATE = 1_000, 384_000


def read_audio(name: str, audio: Any) -> ImageSource:
    """Return the source of audio that a caller gives: "samples" in float32 with their rate as `mode`, or "file".

    Raises TypeError, ValueError or OSError, beginning with the name, for a value that is no audio or is out of bounds.
    """
    try:
        if isinstance(audio, bytes | bytearray | memoryview):
            return file_source(bytes(audio))
        if isinstance(audio, str | Path):
            return file_source(read_file(Path(audio)))
        if isinstance(audio, tuple) and len(audio) == 2 and hasattr(audio[0], "__array__"):
            return _of_samples(np.asarray(audio[0]), audio[1])
    except OSError as error:
        raise OSError(f"{name}: {error.strerror or error}: {str(error.filename)!r}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    raise TypeError(f"{name} must be {ALLOWED}, got {type(audio).__name__}")


def _of_samples(samples: np.ndarray[Any, Any], rate: Any) -> ImageSource:
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not LEAST_RATE <= rate <= MOST_RATE:
        raise ValueError(f"the rate must be a whole number from {LEAST_RATE} to {MOST_RATE}, got {rate!r}")
    if samples.ndim != 1 or samples.size == 0 or samples.dtype not in (np.float32, np.float64, np.int16):
        raise ValueError(
            "samples must be a float or int16 array of shape [number], one channel, got "
            f"{samples.dtype} of shape {list(samples.shape)}"
        )
    if samples.dtype == np.int16:
        samples = samples / 32768
    samples = np.ascontiguousarray(samples, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise ValueError("samples must be finite")
    return ImageSource("samples", samples.tobytes(), str(int(rate)), samples.shape)
