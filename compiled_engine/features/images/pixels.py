"""Pixels of images on their way to the plan, which come in parts behind the requests that need them.

A request comes first, and waits until the pixels of its images are complete. They may come while it is held back. They
come once for all completions of a prompt, in control calls that are small enough to be sent between others. Requests
with the same image share its pixels, which are kept until the last of them ends, since a preempted request may need
them again. Parts that no request needs are dropped, so a client that goes away leaves none behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.images.extras import PlainTensor

GIVE = "give_pixels"  # the control call with a part
MOST_BYTES = 4 << 20  # of a part

Piece = tuple[str, str, Sequence[int], bytes]
"""A part of a tensor: its name, dtype and shape, and the bytes of the part."""


def calls_of(images: Mapping[str, Mapping[str, PlainTensor]]) -> Iterator[ControlCall]:
    """Yield the control calls with the tower's inputs of images, which are given by key."""
    for key, inputs in images.items():
        pieces = [
            (name, tensor, start)
            for name, tensor in inputs.items()
            for start in range(0, max(1, len(tensor.data)), MOST_BYTES)
        ]
        for number, (name, tensor, start) in enumerate(pieces):
            data = memoryview(tensor.data)[start : start + MOST_BYTES]
            piece = (name, tensor.dtype, tensor.shape, data)
            yield ControlCall(GIVE, {"key": key, "number": number, "count": len(pieces), "piece": piece})


@dataclass
class _Pixels:
    """An image's pieces by number; `count` is known with the first of them."""

    requests: set[str] = field(default_factory=set)
    pieces: dict[int, Piece] = field(default_factory=dict)
    count: int = 1

    @property
    def complete(self) -> bool:
        return len(self.pieces) == self.count


class PixelStore:
    """The pixels of the images that requests need, by the images' keys."""

    def __init__(self) -> None:
        self._images: dict[str, _Pixels] = {}
        self._keys: dict[str, set[str]] = {}  # by request id
        self._completed = False

    def __len__(self) -> int:
        return len(self._images)

    def need(self, request_id: str, keys: set[str]) -> None:
        """Note that a request needs the pixels of these images; may be called again."""
        self._keys[request_id] = keys
        for key in keys:
            self._images.setdefault(key, _Pixels()).requests.add(request_id)

    def has(self, request_id: str) -> bool:
        """Return whether all pixels of a request have come."""
        return all(self._images[key].complete for key in self._keys.get(request_id, ()))

    def give(self, key: str, number: int, count: int, piece: Piece) -> None:
        """Add a part, unless no request needs it or it has come before."""
        image = self._images.get(key)
        if image is None or image.complete:
            return
        image.count = count
        image.pieces[number] = piece
        self._completed |= image.complete

    def take_completed(self) -> bool:
        """Return whether an image has become complete since the last call."""
        completed, self._completed = self._completed, False
        return completed

    def inputs(self, key: str) -> dict[str, PlainTensor]:
        """Return the tower's inputs of an image, whose pixels are complete."""
        pieces = self._images[key].pieces
        data: dict[str, list[bytes]] = {}
        for number in sorted(pieces):
            data.setdefault(pieces[number][0], []).append(pieces[number][3])
        about = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in pieces.values()}
        return {name: PlainTensor(*about[name], b"".join(parts)) for name, parts in data.items()}

    def forget(self, request_id: str) -> None:
        """Drop the pixels that only this request needs."""
        for key in self._keys.pop(request_id, ()):
            (image := self._images[key]).requests.discard(request_id)
            if not image.requests:
                del self._images[key]
