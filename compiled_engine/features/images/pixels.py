"""Sends pixels from the frontend to planning (plan.py), which asks for them when a request reaches an image.

An image whose embeddings are on the device, or whose positions are in the prefix cache, is not asked for. Pixels come
in control calls that are small enough to be sent between others. Requests with the same image share its pixels, which
are dropped when a step computes the embeddings. A preempted request whose embeddings are gone asks again. Parts that
are not asked for are dropped, so a client that goes away leaves none behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from compiled_engine.engine.messages import ASKS, ControlCall, EngineOutput
from compiled_engine.features.images.extras import PlainTensor

GIVE = "give_inputs"  # the control call with a part
MOST_BYTES = 4 << 20  # of a part

Piece = tuple[str, str, Sequence[int], bytes]
"""A part of a tensor: its name, dtype and shape, and the bytes of the part."""


def calls_of(images: Mapping[str, Mapping[str, PlainTensor]]) -> Iterator[ControlCall]:
    """Yield the control calls that send the tower's inputs of images to planning. images: the inputs by image key."""
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
    """The pixels of an image that have arrived so far."""

    request_id: str  # of the request on whose behalf it is asked for
    num_embeddings: int
    pieces: dict[int, Piece] = field(default_factory=dict)  # by number
    count: int = 1  # of all pieces, known once the first has come

    @property
    def complete(self) -> bool:
        return len(self.pieces) == self.count


class PixelStore:
    """The pixels that clients were asked for, by the images' keys.

    most_ahead: the most embeddings of images that are asked for before a running request needs them.
    """

    def __init__(self, most_ahead: int) -> None:
        self._most_ahead, self._ahead = most_ahead, 0
        self._images: dict[str, _Pixels] = {}
        self._new: dict[str, list[str]] = {}  # keys that no output has asked for yet, by request
        self._completed = False

    def __len__(self) -> int:
        return len(self._images)

    def ask(self, request_id: str, key: str, num_embeddings: int, *, now: bool) -> bool:
        """Ask for the pixels of an image on behalf of a request, unless they were asked for before, and return True.

        Returns False, without asking, if that would exceed `most_ahead`. now: ask despite the limit.
        """
        if key in self._images:
            return True
        if not now and self._ahead and self._ahead + num_embeddings > self._most_ahead:
            return False
        self._images[key] = _Pixels(request_id, num_embeddings)
        self._ahead += num_embeddings
        self._new.setdefault(request_id, []).append(key)
        return True

    def take_asks(self) -> list[EngineOutput]:
        """Return outputs that ask clients for the images that `ask` has added since the last call."""
        if not self._new:
            return []
        new, self._new = self._new, {}
        return [EngineOutput(request_id, (), extras={ASKS: keys}) for request_id, keys in new.items()]

    def has(self, key: str) -> bool:
        """Return whether all pixels of an image have arrived."""
        return key in self._images and self._images[key].complete

    def give(self, key: str, number: int, count: int, piece: Piece) -> None:
        """Add a piece of an image. Does nothing if the image was not asked for or is complete."""
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
        """Return the tower's inputs of an image whose pixels are complete. Inputs of one piece are not copied."""
        pieces = self._images[key].pieces
        data: dict[str, list[bytes]] = {}
        for number in sorted(pieces):
            data.setdefault(pieces[number][0], []).append(pieces[number][3])
        about = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in pieces.values()}
        return {name: PlainTensor(*about[name], _joined(parts)) for name, parts in data.items()}

    def drop(self, key: str) -> None:
        """Drop the pixels of an image, and no longer ask for them. Does nothing if they were not asked for."""
        if (image := self._images.pop(key, None)) is not None:
            self._ahead -= image.num_embeddings

    def forget(self, request_id: str) -> bool:
        """Drop the pixels asked for on behalf of a request that has ended; return whether there were any."""
        self._new.pop(request_id, None)
        asked = [key for key, image in self._images.items() if image.request_id == request_id]
        for key in asked:
            self.drop(key)
        return bool(asked)


def _joined(parts: Sequence[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else cast(bytes, bytearray().join(parts))
