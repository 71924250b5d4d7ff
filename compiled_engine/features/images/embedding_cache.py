"""The cache of image embeddings: which rows on the device hold which image, and which requests need them.

An image's embeddings are found again by its key, so a repeated image runs no vision tower: in another request, in a
preempted request that returns, or in several completions of one prompt. A request holds an image from the step that
computes the image's first position to the step that computes the image's last one. Images that no request holds are
evicted, the least recently used one first. Steps run in the order of scheduling, so the rows of an evicted image can be
written in the next step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from compiled_engine.engine.cache_resource import check_holders
from compiled_engine.engine.request import Request
from compiled_engine.features.images.extras import Runs


class FreeRows:
    """The free rows of the buffer of embeddings, as runs (first row, number of rows) in ascending order."""

    def __init__(self, num_rows: int) -> None:
        self._runs = [(0, num_rows)]
        self.count = num_rows

    def take(self, count: int) -> Runs:
        """Take `count` rows, the lowest first, and return them as runs. Raises RuntimeError if fewer are free."""
        if count > self.count:
            raise RuntimeError(f"{count} rows of embeddings asked for, {self.count} are free")
        self.count -= count
        taken = []
        while count:
            first, length = self._runs[0]
            part = min(length, count)
            taken.append((first, part))
            count -= part
            self._runs[:1] = [(first + part, length - part)] if part < length else []
        return tuple(taken)

    def give_back(self, runs: Runs) -> None:
        merged: list[tuple[int, int]] = []
        for first, length in sorted([*self._runs, *runs]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self._runs = merged
        self.count = sum(length for _, length in merged)


@dataclass(eq=False, slots=True)
class CachedImage:
    """An image with embeddings on the device, or in a step that has been planned."""

    key: str
    rows: Runs
    place: int  # see FindableResource
    found: bool = True  # by its key
    num_holds: int = 0

    @property
    def is_there(self) -> bool:
        """Whether the image still owns its rows: it can be found by its key, or requests hold it."""
        return self.found or self.num_holds > 0


class EmbeddingCache:
    """Assigns rows of the buffer of embeddings to images, and tracks which running requests hold them.

    Implements FindableResource. number: index of an image among its request's images.
    """

    kind = "image embeddings"

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        self.num_rows = num_rows
        self._free = FreeRows(num_rows)
        self._by_key: OrderedDict[str, CachedImage] = OrderedDict()  # the least recently used one first
        self._held: dict[Request, dict[int, CachedImage]] = {}
        self._unwritten: list[CachedImage] = []  # new in the step being planned
        self._num_added = 0

    @property
    def num_used(self) -> int:
        return self.num_rows - self._free.count

    def runs(self, request: Request) -> bool:
        """Return whether a request is running, so that it may hold images."""
        return request in self._held

    def holds(self, request: Request, number: int) -> bool:
        """Return whether a running request holds its image with this index."""
        return number in self._held[request]

    def hold(self, request: Request, number: int, key: str) -> CachedImage | None:
        """Let a running request hold an image, and return the image; None if the cache does not have the image.

        key: the image's key.
        """
        image = self._by_key.get(key)
        if image is None:
            return None
        self._by_key.move_to_end(key)
        image.num_holds += 1
        self._held[request][number] = image
        return image

    def has(self, key: str) -> bool:
        return key in self._by_key

    def can_add(self, count: int) -> bool:
        """Return whether `add` can give an image `count` rows, by evicting other images if necessary."""
        return count <= self._free.count + sum(length for image in self._unheld() for _, length in image.rows)

    def add(self, key: str, count: int) -> None:
        """Give rows to an image that the cache does not have, evicting others; there must be room, see `can_add`.

        The step being planned must compute the image's embeddings.
        """
        for image in self._unheld():
            if count <= self._free.count:
                break
            self._drop(image)
        self._num_added += 1
        self._by_key[key] = image = CachedImage(key, self._free.take(count), self._num_added)
        self._unwritten.append(image)

    def release(self, request: Request, number: int) -> None:
        """Let a request no longer hold its image with this index. Does nothing if the request does not hold it."""
        if (image := self._held.get(request, {}).pop(number, None)) is not None:
            self._release(image)

    def longest_prefix(self, request: Request, most: int) -> int:
        return most

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        return True

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        if request in self._held:
            raise RuntimeError(f"request {request.request_id!r} holds images already")
        self._held[request] = {}

    def free(self, request: Request) -> None:
        held = self._held.pop(request, None)
        if held is None:
            raise RuntimeError(f"request {request.request_id!r} gives back its images, but was not admitted")
        for image in held.values():
            self._release(image)

    def take_registered(self) -> list[int]:
        registered, self._unwritten = [image.place for image in self._unwritten], []
        return registered

    def unregister(self, places: Iterable[int]) -> None:
        gone = set(places)
        for image in [image for image in self._by_key.values() if image.place in gone]:
            self._drop(image)

    def unregister_all(self) -> None:
        for image in list(self._by_key.values()):
            self._drop(image)

    def check_all_free(self) -> None:
        if self._held:
            raise RuntimeError(f"no request is left, but {len(self._held)} may hold images")

    def check_integrity(self, holders: Collection[Request]) -> None:
        check_holders("images", self._held, holders)
        holds = Counter(image for held in self._held.values() for image in held.values())
        images = {*self._by_key.values(), *holds}
        for image in images:
            if image.num_holds != holds[image]:
                raise RuntimeError(
                    f"image {image.key} has {image.num_holds} holds, but requests hold it {holds[image]} times"
                )
        rows = sorted(row for image in images for first, length in image.rows for row in range(first, first + length))
        if len(rows) != len(set(rows)) or len(rows) + self._free.count != self.num_rows:
            raise RuntimeError(f"of {self.num_rows} rows of embeddings {self._free.count} are free, and used: {rows}")

    def _unheld(self) -> list[CachedImage]:
        return [image for image in self._by_key.values() if not image.num_holds]

    def _drop(self, image: CachedImage) -> None:
        """Forget the key of an image, so that it is not found. Its rows become free once no request holds it."""
        del self._by_key[image.key]
        image.found = False
        if not image.num_holds:
            self._free.give_back(image.rows)

    def _release(self, image: CachedImage) -> None:
        image.num_holds -= 1
        if not image.is_there:
            self._free.give_back(image.rows)
