"""Triton's cache of compiled kernels, whose binaries are checked against their digests before they are loaded."""

from __future__ import annotations

from pathlib import Path

from triton.runtime.cache import FileCacheManager

from compiled_engine.kernels.cache_folder import is_checked, is_whole, keep_digest


class CheckedFiles(FileCacheManager):
    """What is damaged is not there: then Triton compiles it again, and writes over it."""

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        if is_checked(filename):
            keep_digest(Path(path))
        return path

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        return path if path is None or _may_be_used(path) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        paths: dict[str, str] | None = super().get_group(filename)
        return paths if paths is None or all(map(_may_be_used, paths.values())) else None


def _may_be_used(path: str) -> bool:
    return not is_checked(Path(path).name) or is_whole(Path(path))
