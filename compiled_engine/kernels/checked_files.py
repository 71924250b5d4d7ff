"""CheckedFiles, a cache manager for Triton that checks binaries against their digests before they are loaded."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from uuid import uuid4

from triton.runtime.cache import FileCacheManager

from compiled_engine.kernels.cache_folder import (
    FOLDER,
    folder_of_this_thread,
    is_checked,
    is_whole,
    keep_digest,
    matches_digest,
)

_LOADS = itertools.count(1)


class CheckedFiles(FileCacheManager):
    """A cache manager that reports damaged files as missing, so that Triton compiles their kernels again.

    Only files in the engine's kernel folder are checked. Kernels that Inductor generated for the model are in other
    folders: the manifest of the model's cache entry has their digests. Threads may load launchers concurrently, see
    `_to_load`.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        folder = folder_of_this_thread()
        if folder is None or override or dump:
            super().__init__(key, override, dump)
            return
        self.key = key
        self.cache_dir = str(folder / key)
        self.lock_path = str(folder / key / "lock")
        os.makedirs(self.cache_dir, exist_ok=True)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file unless an undamaged one exists, and return its path. Files without a digest are always written.

        The file is written under another name and then linked: creating a link, unlike renaming, never replaces a file.
        Python identifies a loaded library by its file's inode. If another process replaced the file while it is loaded,
        the file system could give the inode to the next library. Python would take that library for the first one, and
        launch a kernel with another kernel's launcher. A damaged file is replaced, since no process loads it.
        """
        if not is_checked(filename):
            written: str = super().put(data, filename, binary)
            return written
        content = data if isinstance(data, bytes) else str(data).encode()
        path = Path(self.cache_dir) / filename
        new = path.with_name(f"{filename}.{uuid4()}")
        if self._is_shared:
            keep_digest(path, content)
        try:
            new.write_bytes(content)
            try:
                os.link(new, path)
            except FileExistsError:
                if self._is_shared and not matches_digest(path):
                    new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        return _to_load(str(path))

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        return _to_load(path) if path is not None and self._may_be_used(path) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        paths: dict[str, str] | None = super().get_group(filename)
        return paths if paths is None or all(map(self._may_be_used, paths.values())) else None

    @property
    def _is_shared(self) -> bool:
        return Path(self.cache_dir).parent.name == FOLDER

    def _may_be_used(self, path: str) -> bool:
        return not self._is_shared or not is_checked(Path(path).name) or is_whole(Path(path))


def _to_load(path: str) -> str:
    """Return a spelling of a shared library's path that no other call returns, made with "/./" and "//".

    Paths of other files are returned unchanged. Triton's launchers are extension modules that all have the same name.
    If Python loads such a module from a path for the second time, it returns the module of that name that was loaded
    last, maybe from another path. Threads that load launchers at the same time would get each other's launchers.
    """
    folder, name = os.path.split(path)
    if not name.endswith(".so"):
        return path
    return folder + "".join("/." if bit == "1" else "//." for bit in f"{next(_LOADS):b}") + "/" + name
