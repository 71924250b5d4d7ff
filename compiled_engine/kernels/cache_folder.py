"""The folder of the engine's own kernels: binaries in the compile cache, each next to its digest.

A file without a digest, or with another one, is not loaded: it is reported and built again. The folder ensures that
files belong to this user, and that no other user can write to them.
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
# How Triton reads and writes files of its cache.
MANAGER = {"TRITON_CACHE_MANAGER": "compiled_engine.kernels.checked_files:CheckedFiles"}
FOLDER = "kernels"
DIGEST_SUFFIX = ".sha256"
# Files that are run or describe launches. Triton also keeps sources, which are only for reading.
CHECKED_SUFFIXES = (".so", ".cubin", ".json")
_THREAD = threading.local()


def kernel_folder(cache_dir: Path | None) -> Path | None:
    """`cache_dir`/kernels; None without a cache_dir, or where it cannot be made or others could write to it, which is
    warned of. Then Triton's own setting stays, and libraries are compiled in every process.

    Triton's files are named by a digest of source, options and versions, so all models share it.
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
    """Once a process."""
    log.warning("%s", text)


def kernels_in(folder: Path | None) -> AbstractContextManager[None]:
    """Point Triton at the folder while the engine starts, which is when every kernel is compiled or loaded."""
    return environment_variables(kernel_variables(folder))


def kernel_variables(folder: Path | None) -> dict[str, str]:
    """Environment variables that make Triton use the folder, its own without one, as `CheckedFiles` does."""
    return MANAGER | ({} if folder is None else {VARIABLE: str(folder)})


def keep_kernels_of_this_thread(folder: Path | None) -> None:
    """Keep the kernels that this thread compiles from now on in the folder, whatever the environment variables say.

    These are the process's: while a thread compiles kernels, another may load a compiled piece, for which the variables
    name the piece's folder.
    """
    _THREAD.folder = folder


def folder_of_this_thread() -> Path | None:
    """The folder from `keep_kernels_of_this_thread`; None where the environment variables decide."""
    folder: Path | None = getattr(_THREAD, "folder", None)
    return folder


def is_checked(name: str) -> bool:
    """Return whether a file has a digest. Triton's lists of files (__grp__) name other files, and are useless if
    damaged.
    """
    return name.endswith(CHECKED_SUFFIXES) and not name.startswith("__grp__")


def keep_digest(path: Path, content: bytes) -> None:
    """Add the digest of what will be at `path`. Threads and processes that build one file at the same time may make
    different bytes, so each adds its own."""
    with _digest_path(path).open("a") as digests:
        digests.write(_digest(content) + "\n")  # a single write, after whatever others have added


def is_whole(path: Path) -> bool:
    """Return whether a file matches its digest; report it if not."""
    if matches_digest(path):
        return True
    log.warning("%s is damaged, or has no digest; it is built again", path)
    return False


def damaged_kernels(cache_dir: Path) -> list[str]:
    """The files below `cache_dir`/kernels, relative to it, that will be built again because they are damaged."""
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
