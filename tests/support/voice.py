"""A voice: texts spoken by eSpeak NG, whose library and data the package espeakng-loader brings."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

# Constants of speak_lib.h.
RETRIEVAL, UTF8, POS_CHARACTER = 1, 1, 1


def spoken(text: str, language: str = "en") -> tuple[np.ndarray, int]:
    """Return the samples of a spoken text, int16, and their rate per second."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    rate = library.espeak_Initialize(RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0)
    if rate <= 0 or library.espeak_SetVoiceByName(language.encode()) != 0:
        raise RuntimeError(f"eSpeak NG cannot speak {language!r}")
    pieces: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def receive(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(receive)
    data = text.encode() + b"\0"
    library.espeak_Synth.argtypes = [
        *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ]
    if library.espeak_Synth(data, len(data), 0, POS_CHARACTER, 0, UTF8, None, None) != 0:
        raise RuntimeError("eSpeak NG cannot speak the text")
    library.espeak_Synchronize()
    library.espeak_Terminate()
    return np.concatenate(pieces), rate
