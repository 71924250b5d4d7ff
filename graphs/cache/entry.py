"""Writes, checks and copies entries of the compile cache: files that never change, and a manifest with their digests.

An entry is never used in place. Its files are checked and copied to a work folder, which is used instead. Compilers
write further files beside their artifacts when these are loaded or first run; the entry does not get such files. An
entry's factors are all that its content depends on; their digest is its key.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FACTORS = "factors.json"
# Placeholder in an entry's files for the path of the folder in which the entry was built.
_HERE = b"[HERE]"


class DamagedEntry(Exception):
    """Raised for an entry that must not be used; the message says why."""


def factors_key(factors: dict[str, Any]) -> str:
    """Return the key of the entry for these factors: a digest, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:32]


def write_entry(source: Path, entry: Path, factors: dict[str, Any]) -> None:
    """Copy the files of a build from `source` to the new folder `entry`, and add the factors and the manifest.

    A placeholder replaces the path of `source` in the files that contain it.
    """
    digests = {}
    for path in sorted(source.rglob("*")):
        if not path.is_dir():
            name = path.relative_to(source).as_posix()
            digests[name] = _write(entry / name, _moved(path.name, path.read_bytes(), os.fsencode(source), _HERE))
    digests[FACTORS] = _write(entry / FACTORS, json.dumps(factors, indent=1, sort_keys=True).encode())
    (entry / MANIFEST).write_text(json.dumps(digests, indent=1, sort_keys=True))


def copy_entry(entry: Path, target: Path, factors: dict[str, Any], uid: int) -> None:
    """Check an entry and copy it to the folder `target`.

    Each file is read once, so that exactly the bytes that are checked are copied. Raises DamagedEntry unless the entry
    is complete, unchanged, owned by `uid` and built from `factors`.
    """
    for name, content in read_entry(entry, uid):
        _write(target / name, _moved(Path(name).name, content, _HERE, os.fsencode(target)))
    if read_factors(target) != json.loads(json.dumps(factors)):
        raise DamagedEntry("its factors are not those of its key")


def read_entry(entry: Path, uid: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file in an entry's manifest, after checking the file's digest.

    Raises DamagedEntry for a file that differs from the manifest, and in the cases of `check_files`.
    """
    for name, digest in check_files(entry, uid).items():
        try:
            content = (entry / name).read_bytes()
        except OSError as error:
            raise DamagedEntry(f"{name} cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedEntry(f"{name} was changed")
        yield name, content


def check_files(entry: Path, uid: int) -> dict[str, str]:
    """Check which files an entry holds, but not their content, and return its manifest: file name -> digest.

    Raises DamagedEntry unless the entry holds exactly the manifest's files, as regular files in real folders (no links)
    owned by `uid`.
    """
    try:
        found = set(_plain_files(entry, uid))
        manifest = json.loads((entry / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedEntry(f"its manifest cannot be read: {error}") from error
    if not isinstance(manifest, dict) or not all(isinstance(digest, str) for digest in manifest.values()):
        raise DamagedEntry("its manifest is not a list of digests")
    missing = sorted((manifest.keys() | {FACTORS}) - found)
    extra = sorted(found - manifest.keys() - {MANIFEST})
    if missing or extra:
        raise DamagedEntry(f"{missing[0]} is missing" if missing else f"{extra[0]} is not in its manifest")
    return manifest


def read_factors(entry: Path) -> dict[str, Any]:
    """Return the factors stored in an entry, without checking them. Raises DamagedEntry if they cannot be read."""
    path = entry / FACTORS
    if not path.is_file():
        raise DamagedEntry(f"{FACTORS} is missing")
    try:
        factors = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedEntry(f"its factors cannot be read: {error}") from error
    if not isinstance(factors, dict):
        raise DamagedEntry("its factors are not a list of names and values")
    return factors


def _plain_files(folder: Path, uid: int, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it. prefix: put before each path.

    Raises DamagedEntry for a link, a special file, or a file or folder that `uid` does not own.
    """
    status = folder.lstat()
    name = prefix.rstrip("/") or "its folder"
    if not stat.S_ISDIR(status.st_mode):
        raise DamagedEntry(f"{name} is not a plain folder")
    if status.st_uid != uid:
        raise DamagedEntry(f"another user owns {name}")
    for found in os.scandir(folder):
        name, status = prefix + found.name, found.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            yield from _plain_files(Path(found.path), uid, f"{name}/")
        elif not stat.S_ISREG(status.st_mode):
            raise DamagedEntry(f"{name} is not a plain file")
        elif status.st_uid != uid:
            raise DamagedEntry(f"another user owns {name}")
        else:
            yield name


def _moved(name: str, content: bytes, before: bytes, after: bytes) -> bytes:
    """Return a file's content with the folder path `before` replaced by `after`.

    Only Triton's lists of a kernel's files (__grp__*) contain absolute paths; the content of any other file is
    unchanged.
    """
    return content.replace(before, after) if name.startswith("__grp__") else content


def _write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()
