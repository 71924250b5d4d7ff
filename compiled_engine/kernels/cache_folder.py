"""Where Triton keeps the binaries of the engine's own kernels: with the compile cache, not in the user's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"
FOLDER = "kernels"


def kernel_folder(cache_dir: Path | None) -> Path | None:
    """`cache_dir`/kernels; None without a cache_dir, or where it cannot be made: then Triton's own setting stays.

    Triton's files are named by a digest of source, options and versions, so all models share it.
    """
    if cache_dir is None:
        return None
    folder = cache_dir / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) and folder.stat().st_uid == os.geteuid() else None


@contextmanager
def kernels_in(folder: Path | None) -> Iterator[None]:
    """Point Triton at the folder while the engine starts, which is when every kernel is compiled or loaded."""
    if folder is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
