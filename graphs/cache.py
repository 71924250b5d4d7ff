"""The compile cache: a folder an entry, found by the digest of its declared factors, verified before use.

An entry is built in a folder of its own and renamed into place, so a reader sees all of it or nothing. A manifest
holds every file's digest; whatever does not match is set aside, reported and built again. Without a usable cache
folder the engine compiles into a temporary one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("compiled_engine")

MANIFEST = "manifest.json"
FACTORS = "factors.json"
# The entries have a folder of their own below the root, which may be any folder of the user's.
ENTRIES = "compiled"


@dataclass(frozen=True)
class Lookup:
    """An entry ready for use. `status` is hit, miss (it was built now) or off (temporary, not kept).

    A temporary folder is deleted with its `keeper`.
    """

    folder: Path
    key: str
    status: str
    loaded: Any = None
    keeper: tempfile.TemporaryDirectory[str] | None = None


class DamagedEntry(Exception):
    """An entry that must not be used, and why."""


def default_root() -> Path:
    """$COMPILED_ENGINE_CACHE_DIR, else compiled_engine below the XDG cache folder."""
    if override := os.environ.get("COMPILED_ENGINE_CACHE_DIR"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compiled_engine"


def factors_key(factors: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:32]


def find_or_build(
    root: Path | None,
    factors: dict[str, Any],
    build: Callable[[Path], None],
    load: Callable[[Path], Any] = lambda folder: None,
) -> Lookup:
    """The entry for `factors`, built by `build(folder)` if there is none, then read by `load(folder)`.

    `root` None keeps nothing. An entry that was found but cannot be loaded counts as damaged.
    Two processes that want the same entry wait for each other; the second finds it.
    """
    key = factors_key(factors)
    if root is not None:
        try:
            return _find_or_build(root, key, factors, build, load)
        except OSError as error:
            log.warning("compile cache %s cannot be used (%s); compiling without one", root, error)
    keeper = tempfile.TemporaryDirectory(prefix="compiled_engine_", ignore_cleanup_errors=True)
    folder = Path(keeper.name)
    build(folder)
    return Lookup(folder, key, "off", load(folder), keeper)


def _find_or_build(
    root: Path, key: str, factors: dict[str, Any], build: Callable[[Path], None], load: Callable[[Path], Any]
) -> Lookup:
    root = root / ENTRIES
    _make_private(root)
    final = root / key
    with _locked(root / f"{key}.lock"):
        if final.exists():
            try:
                verify(final, factors)
                return Lookup(final, key, "hit", _load_verified(final, load))
            except DamagedEntry as damage:
                aside = Path(tempfile.mkdtemp(prefix=f"damaged_{key}_", dir=root))
                os.replace(final, aside / key)
                log.warning(
                    "compile cache entry %s is damaged (%s); set aside as %s, building it again",
                    key,
                    damage,
                    aside,
                )
        building = Path(tempfile.mkdtemp(prefix=f"building_{key}_", dir=root))
        try:
            build(building)
            (building / FACTORS).write_text(json.dumps(factors, indent=1, sort_keys=True))
            (building / MANIFEST).write_text(json.dumps(_digests(building), indent=1))
            os.replace(building, final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return Lookup(final, key, "miss", load(final))


def _load_verified(folder: Path, load: Callable[[Path], Any]) -> Any:
    try:
        return load(folder)
    except Exception as error:
        raise DamagedEntry(f"it cannot be loaded: {error}") from error


def verify(folder: Path, factors: dict[str, Any]) -> None:
    """Raise DamagedEntry unless the entry is ours, whole, unchanged, and was built from these factors."""
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedEntry("it is not a plain folder")
    if folder.stat().st_uid != os.geteuid():
        raise DamagedEntry("another user owns it")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if FACTORS not in manifest:
            raise DamagedEntry("its manifest is not complete")
        for name, digest in manifest.items():
            path = folder / name
            if path.is_symlink() or _digest(path) != digest:
                raise DamagedEntry(f"{name} was changed")
        stored = json.loads((folder / FACTORS).read_text())
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedEntry(str(error)) from error
    if stored != json.loads(json.dumps(factors)):
        raise DamagedEntry("its factors are not those of its key")


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.is_symlink():
        raise OSError(f"{root} is a symbolic link")
    status = root.stat()
    if status.st_uid != os.geteuid():
        raise OSError(f"{root} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        root.chmod(0o700)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
