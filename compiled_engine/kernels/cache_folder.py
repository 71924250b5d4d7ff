"""The folder of compiled kernels in the compile cache, where each binary is stored with its digest.

A binary without a digest, or with a wrong one, is reported and built again. The folder belongs to this user, and no
other user can write to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from compiled_engine.process.cache_root import private_folder
from compiled_engine.process.child import environment_variables

log = logging.getLogger("compiled_engine")

VARIABLE = "TRITON_CACHE_DIR"
# Makes Triton read and write its cache through CheckedFiles.
MANAGER = {"TRITON_CACHE_MANAGER": "compiled_engine.kernels.checked_files:CheckedFiles"}
FOLDER = "kernels"
DIGEST_SUFFIX = ".sha256"
# Files that are executed or describe launches; Triton's sources, also kept, are only for inspection.
CHECKED_SUFFIXES = (".so", ".cubin", ".json")
_THREAD = threading.local()


def kernel_folder(cache_dir: Path | None) -> Path | None:
    """Return the folder `cache_dir`/kernels, created if it does not exist; None if kernels cannot be stored there.

    Returns None if cache_dir is None or if this user cannot write to the folder. Also returns None, and logs a warning,
    if the folder cannot be created or if other users can write to it. Triton then uses its default folder
    ($TRITON_CACHE_DIR or ~/.triton/cache), and C++ libraries are compiled in every process.

    All models share the folder: Triton names files by a digest of source, options and versions.
    """
    if cache_dir is None:
        return None
    try:
        folder = private_folder(cache_dir, FOLDER)
    except OSError as error:
        _warn(f"kernels are not kept: {error}")
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _warn(text: str) -> None:
    """Log a warning, but each text only once per process."""
    log.warning("%s", text)


def kernels_in(folder: Path | None) -> AbstractContextManager[None]:
    """Return a context in which Triton keeps its files in `folder` and checks them; see `kernel_variables`.

    The context sets environment variables. An engine starts in this context, since all kernels are compiled or loaded
    then.
    """
    return environment_variables(kernel_variables(folder))


def kernel_variables(folder: Path | None) -> dict[str, str]:
    """Return environment variables that make Triton keep its files in `folder` and check them (checked_files.py).

    folder None: Triton keeps its files where its own settings say.
    """
    return MANAGER | ({} if folder is None else {VARIABLE: str(folder)})


def keep_kernels_of_this_thread(folder: Path | None) -> None:
    """Set the folder of the files of kernels that this thread compiles, in place of $TRITON_CACHE_DIR.

    folder None: the environment variable applies to this thread again. The variable is process-wide: while this thread
    compiles kernels, another thread may load a part of the model's compiled graph, and set the variable to its folder.
    """
    _THREAD.folder = folder


def folder_of_this_thread() -> Path | None:
    """Return the folder given to `keep_kernels_of_this_thread`; None if the environment variable applies."""
    folder: Path | None = getattr(_THREAD, "folder", None)
    return folder


def is_checked(name: str) -> bool:
    """Return whether a file of this name is stored with a digest, and checked against it before it is used.

    Triton's lists of a kernel's files (__grp__) have no digest. They only contain names, so with a damaged list Triton
    finds no files.
    """
    return name.endswith(CHECKED_SUFFIXES) and not name.startswith("__grp__")


def keep_digest(path: Path, content: bytes) -> None:
    """Add the digest of `content`, which will be stored at `path`, to the digests that are accepted for this path.

    Threads and processes that build the same file at the same time may produce different bytes, so each adds a digest.
    """
    with _digest_path(path).open("a") as digests:
        digests.write(_digest(content) + "\n")  # a single write, which appends to other processes' digests


def is_whole(path: Path) -> bool:
    """Return whether the content of a file matches one of its digests. Logs a warning if it does not."""
    if matches_digest(path):
        return True
    log.warning("%s is damaged, or has no digest; it is built again", path)
    return False


def damaged_kernels(cache_dir: Path) -> list[str]:
    """Return the files in `cache_dir`/kernels that differ from what was written, relative to `cache_dir`/kernels.

    The engine will build them again.
    """
    folder = cache_dir / FOLDER
    files = sorted(path for path in folder.rglob("*") if path.is_file() and is_checked(path.name))
    return [str(path.relative_to(folder)) for path in files if not matches_digest(path)]


def matches_digest(path: Path) -> bool:
    try:
        return _digest(path.read_bytes()) in _digest_path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + DIGEST_SUFFIX)
