"""Resolve a LoRARequest to the AdapterRef that the engine core gets.

The core identifies adapters by a digest of their files. Files are read once; afterwards each request only checks with
the file system whether they changed. New content gets a new digest and shares no cached prefix with the old content.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from compiled_engine.features.adapters.extras import AdapterRef
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.frontend.input_processor import require_one_each
from compiled_engine.models.checkpoint.adapter_files import require_rank, stamp
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.folders import resolve_adapter_folder

if TYPE_CHECKING:
    from compiled_engine.config import AdapterConfig

MOST_KNOWN = 1024  # number of adapters remembered


class _Found(NamedTuple):
    """An adapter whose files were read."""

    folder: Path
    mark: object  # changes if the files are replaced
    within: tuple[Path, ...]  # of the LoRARequest
    digest: str


class AdapterFinder:
    """Resolves LoRARequests to AdapterRefs. Thread-safe."""

    def __init__(self, config: AdapterConfig | None) -> None:
        """Make a finder that has read no adapter. config: None if adapters are not enabled."""
        self._config = config
        self._guard = threading.Lock()  # protects the following fields
        # A lock for each path, so that reading one adapter delays no other, and the number of threads that use it.
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._found: dict[str, _Found] = {}  # least recently used first

    def find(self, request: LoRARequest) -> AdapterRef:
        """Return the reference to the adapter's current content.

        Raises TypeError or ValueError, with a message of one line, for an invalid or unsupported adapter, and OSError
        if a download fails.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, or a list with one or None a prompt, got {request!r}")
        if self._config is None:
            raise ValueError(f"lora_request is {request.lora_name!r}, but enable_lora is False; allowed: None")
        named = str(request.lora_path)
        with self._turn(named):
            found = self._found.get(named)
            if found is None:
                folder = resolve_adapter_folder("lora_path", request.lora_path, None, SilentProgress()).absolute()
            else:
                folder = found.folder
            mark = stamp(folder)
            if found is None or (found.mark, found.within) != (mark, request.within):
                found = _Found(folder, mark, request.within, self._read(folder, request.within))
            with self._guard:
                self._found.pop(named, None)
                self._found[named] = found
                if len(self._found) > MOST_KNOWN:
                    del self._found[next(iter(self._found))]
        return AdapterRef(found.digest, str(folder), request.lora_name)

    @contextmanager
    def _turn(self, named: str) -> Iterator[None]:
        """Hold the lock of the path `named` in a `with` block. The lock is removed after its last user."""
        with self._guard:
            lock, users = self._locks.get(named, (threading.Lock(), 0))
            self._locks[named] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks.pop(named)
                if users > 1:
                    self._locks[named] = lock, users - 1

    def has_read(self, request: LoRARequest) -> bool:
        """Return whether `find` can answer without reading files."""
        found = self._found.get(str(getattr(request, "lora_path", "")))
        try:
            return found is not None and (found.mark, found.within) == (stamp(found.folder), request.within)
        except ValueError:
            return False

    def find_each(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[AdapterRef | None]:
        """Return the reference for each of `count` prompts.

        `given` is one request for all prompts, or a list with a request or None for each. Raises the errors of `find`.
        """
        if given is None:
            return [None] * count
        if not isinstance(given, list | tuple):
            return [self.find(given)] * count  # type: ignore[arg-type]
        require_one_each("lora_request", given, count)
        return [None if each is None else self.find(each) for each in given]

    def _read(self, folder: Path, within: tuple[Path, ...]) -> str:
        from compiled_engine.models.checkpoint.adapter_folder import read_adapter  # imports torch

        assert self._config is not None
        adapter = read_adapter(folder, values=False, within=within)
        if (reason := adapter.merged_only()) is not None:
            raise ValueError(f"{folder}: {reason}; allowed: merge_adapter, which merges it into the base model")
        require_rank(folder, adapter.rank, self._config.max_lora_rank)
        return adapter.digest
