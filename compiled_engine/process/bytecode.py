"""Python's bytecode of PyTorch, kept in the cache where the installation has none and Python would write none.

Packages without bytecode, in a folder that cannot be written to, are compiled by every process that imports them. Many
container images are built this way. PyTorch and its compiler have some thousand files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from compiled_engine.process.cache_root import default_root, private_folder

PACKAGE = "torch"
FOLDER = "bytecode"


class _Starts:
    """The number of starts in progress in this process, and Python's settings before the first of them."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.before: tuple[str | None, bool] = (None, False)


_starts = _Starts()


@contextmanager
def bytecode_kept() -> Iterator[None]:
    """Apply `keep_bytecode` to all threads while the block runs, then restore the settings."""
    with _starts.lock:
        if _starts.count == 0:
            _starts.before = sys.pycache_prefix, sys.dont_write_bytecode
            keep_bytecode()
        _starts.count += 1
    try:
        yield
    finally:
        with _starts.lock:
            _starts.count -= 1
            if _starts.count == 0:
                sys.pycache_prefix, sys.dont_write_bytecode = _starts.before


def keep_bytecode() -> None:
    """Have Python write and read bytecode below `default_root`, unless PyTorch has its own.

    For processes of this program. A folder set by the user (PYTHONPYCACHEPREFIX) stays.
    """
    if sys.pycache_prefix is not None or (installed := _lacks_bytecode()) is None:
        return
    with suppress(OSError, RuntimeError):  # without a place for it all is as before
        folder = private_folder(default_root().absolute(), FOLDER) / _digest(installed)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def bytecode_environment() -> dict[str, str]:
    """Variables by which a Python process does as this one does now."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}


def _lacks_bytecode() -> Path | None:
    """The folder that the package is in, if there is no bytecode of it and none would be written next to its files."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(PACKAGE)
        if spec is not None and spec.origin is not None and spec.has_location:
            cached = Path(importlib.util.cache_from_source(spec.origin))
            place = next(folder for folder in cached.parents if folder.is_dir())
            if not cached.exists() and (sys.dont_write_bytecode or not os.access(place, os.W_OK)):
                return Path(spec.origin).parent.parent
    return None


def _digest(folder: Path) -> str:
    """Digest the packages there: Python detects a changed file by its time, which images may set, and its size."""
    installed = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(folder), *installed]).encode()).hexdigest()[:16]
