"""The files of a rank that hold KV cache blocks: one for each block, with the rank's part of the block.

A file has a checksum, the number of bytes, and the bytes. It is written under another name and then renamed, so that a
process which ends meanwhile leaves no partial file under a block's name. A file that cannot be read, or is not what
was written, is removed; its block is then computed again.

For a store of another kind, such as one that hosts share, a class with these methods takes the place of BlockFiles.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from io import FileIO
from pathlib import Path

from xxhash import xxh3_64_intdigest

log = logging.getLogger("compiled_engine")

HEADER = struct.Struct("<4sQQ")  # MAGIC, checksum (XXH3) and number of the bytes that follow
MAGIC = b"CEB2"
PARTIAL = ".partial"


class BlockFiles:
    """Reads and writes files of blocks in a folder, by name. Thread-safe for calls with different names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def write(self, name: str, row: memoryview) -> bool:
        """Write the bytes of a block. Returns whether the file is there; if not, the first reason is logged."""
        path = self.path_of(name)
        partial = path.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb", buffering=0) as file:
                _write_all(file.fileno(), HEADER.pack(MAGIC, xxh3_64_intdigest(row), row.nbytes))
                _write_all(file.fileno(), row)
            partial.replace(path)
        except OSError as error:
            self._warn(f"a block of the KV cache cannot be written to {path}: {error}")
            _remove(partial)
            return False
        return True

    def read(self, name: str, row: memoryview) -> bool:
        """Read a block into `row`, and return whether `row` has the bytes that were written.

        Returns False if there is no file, or if it cannot be read or is damaged; then the file is removed.
        """
        path = self.path_of(name)
        try:
            with path.open("rb", buffering=0) as file:
                magic, checksum, size = HEADER.unpack(file.read(HEADER.size))
                if (magic, size) != (MAGIC, row.nbytes):
                    raise ValueError(f"it has {size} bytes of a block; expected: {row.nbytes}")
                if (count := _read_all(file, row)) != size:
                    raise ValueError(f"it has {count} bytes instead of {size}")
            if xxh3_64_intdigest(row) != checksum:
                raise ValueError("its bytes do not match its checksum")
            os.utime(path)  # see FileIndex
        except FileNotFoundError:
            return False
        except (OSError, ValueError, struct.error) as error:
            self._warn(f"a block of the KV cache cannot be read from {path}: {error}")
            self.remove(name)
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a block's file, if there is one."""
        _remove(self.path_of(name))

    def path_of(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; further errors of this kind are not logged", message)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_all(file: FileIO, row: memoryview) -> int:
    """Fill `row` from a file, whose reads return 2 GiB at most. Return the number of bytes read."""
    count = 0
    while new := file.readinto(row[count:]):
        count += new
    return count


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
