"""Triton's cache of compiled kernels, with binaries checked against their digests before loading."""

from __future__ import annotations

from pathlib import Path

from triton.runtime.cache import FileCacheManager

from compiled_engine.kernels.cache_folder import FOLDER, is_checked, is_whole, keep_digest, matches_digest


class CheckedFiles(FileCacheManager):
    """Files that are damaged count as missing: Triton compiles them again, and writes over them.

    Files of a compiled piece, elsewhere, are in the manifest of its cache entry.
    """

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file, unless it is there already.

        Python recognises a loaded library by the inode that it had when its file was opened. If another process
        replaces the file at that moment, the file system may give the inode to the next library, and Python takes it
        for the first one: a kernel would be launched with the launcher of another.
        """
        if self._is_shared and is_checked(filename):
            there: str | None = super().get_file(filename)
            if there is not None and matches_digest(Path(there)):
                return there
            content = data if isinstance(data, bytes) else str(data).encode()
            keep_digest(Path(self.cache_dir) / filename, content)
        path: str = super().put(data, filename, binary)
        return path

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        return path if path is None or self._may_be_used(path) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        paths: dict[str, str] | None = super().get_group(filename)
        return paths if paths is None or all(map(self._may_be_used, paths.values())) else None

    @property
    def _is_shared(self) -> bool:
        return Path(self.cache_dir).parent.name == FOLDER

    def _may_be_used(self, path: str) -> bool:
        return not self._is_shared or not is_checked(Path(path).name) or is_whole(Path(path))
