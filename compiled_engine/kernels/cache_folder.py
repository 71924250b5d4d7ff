"""Where the binaries of the engine's own kernels are kept: in the compile cache."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from compiled_engine.process.environment_variables import environment_variables

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


def kernels_in(folder: Path | None) -> AbstractContextManager[None]:
    """Point Triton at the folder while the engine starts, which is when every kernel is compiled or loaded."""
    return environment_variables({} if folder is None else {VARIABLE: str(folder)})
