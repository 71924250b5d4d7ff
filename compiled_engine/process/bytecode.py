"""Keep PyTorch's bytecode in the cache, if the installation has none and Python would not write any.

Packages without bytecode, in a read-only folder, are compiled by every process that imports them. Many container images
are built this way. PyTorch and its compiler have some thousand files.
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
    """Number of engine starts in progress in this process, and Python's settings before the first of them."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.before: tuple[str | None, bool] = (None, False)


_starts = _Starts()


@contextmanager
def bytecode_kept() -> Iterator[None]:
    """Apply `keep_bytecode` to all threads within a block, then restore the settings."""
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
    """Make Python read and write bytecode below `default_root`, unless PyTorch has its own.

    For processes of this program. A folder set by the user (PYTHONPYCACHEPREFIX) stays.
    """
    if sys.pycache_prefix is not None or (installed := _lacks_bytecode()) is None:
        return
    with suppress(OSError, RuntimeError):  # without a folder nothing changes
        folder = private_folder(default_root().absolute(), FOLDER) / _digest(installed)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def bytecode_environment() -> dict[str, str]:
    """Return environment variables that give a Python process this one's bytecode settings."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}


def _lacks_bytecode() -> Path | None:
    """Return the folder that contains the package, if it has no bytecode and none would be written beside its files."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(PACKAGE)
        if spec is not None and spec.origin is not None and spec.has_location:
            cached = Path(importlib.util.cache_from_source(spec.origin))
            place = next(folder for folder in cached.parents if folder.is_dir())
            if not cached.exists() and (sys.dont_write_bytecode or not os.access(place, os.W_OK)):
                return Path(spec.origin).parent.parent
    return None


def _digest(folder: Path) -> str:
    """Digest the names of installed packages: Python detects changed files by time and size, but images may set the
    times."""
    installed = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(folder), *installed]).encode()).hexdigest()[:16]
