"""Issues warnings that name the line of the user's code that called the engine."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def warn_caller(message: str) -> None:
    """Issue a UserWarning located at the innermost frame that is outside the engine and contextlib."""
    level, frame = 1, sys._getframe()
    while (outer := frame.f_back) is not None and _is_own(frame):
        level, frame = level + 1, outer
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_OWN) or file == contextlib.__file__
