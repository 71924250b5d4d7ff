"""Keeps PyTorch's bytecode in the engine's cache folder, if it was installed without bytecode and Python writes none.

Every process that imports a package without bytecode from a read-only folder has to compile it. Many container images
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
    """Counts the running blocks of `bytecode_kept`, and holds Python's bytecode settings from before the first."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.before: tuple[str | None, bool] = (None, False)


_starts = _Starts()


@contextmanager
def bytecode_kept() -> Iterator[None]:
    """Apply `keep_bytecode` within a block, then restore Python's bytecode settings.

    The settings are global, so other threads use them too. If blocks overlap, the last one to end restores them.
    """
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
    """Make Python read and write bytecode in a folder below `default_root`.

    Does nothing if PyTorch's bytecode is installed or will be written beside its files, if the user has set a folder
    (PYTHONPYCACHEPREFIX), or if the folder cannot be created.
    """
    if sys.pycache_prefix is not None or (installed := _lacks_bytecode()) is None:
        return
    with suppress(OSError, RuntimeError):  # without a folder nothing changes
        folder = private_folder(default_root().absolute(), FOLDER) / _digest(installed)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def bytecode_environment() -> dict[str, str]:
    """Return environment variables that give a Python process this process's bytecode settings.

    The result is empty unless a bytecode folder is set.
    """
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}


def _lacks_bytecode() -> Path | None:
    """Return the folder in which PyTorch is installed, if it has no bytecode there and Python would write none.

    Returns None otherwise, and if PyTorch is not installed.
    """
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(PACKAGE)
        if spec is not None and spec.origin is not None and spec.has_location:
            cached = Path(importlib.util.cache_from_source(spec.origin))
            place = next(folder for folder in cached.parents if folder.is_dir())
            if not cached.exists() and (sys.dont_write_bytecode or not os.access(place, os.W_OK)):
                return Path(spec.origin).parent.parent
    return None


def _digest(folder: Path) -> str:
    """Return a digest of the folder's path and of the names and versions of the packages installed in it.

    The digest is the name of the bytecode folder. Python's own check would miss some changes of packages: it compares
    the files' times and sizes, but a container image may set all times to the same value.
    """
    installed = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(folder), *installed]).encode()).hexdigest()[:16]
