"""Messages in a stream of bytes: each is preceded by its length, four bytes, the most significant first."""

from __future__ import annotations

import struct

LARGEST_MESSAGE = 128 * 2**20
"""Bytes. A whole vocabulary's log-probabilities of a prompt can be more, and are then refused."""

_LENGTH = struct.Struct(">I")


class MessageTooLargeError(ValueError):
    """A message has more than LARGEST_MESSAGE bytes."""


def frame(payload: bytes) -> bytes:
    """Raises MessageTooLargeError."""
    check_size(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def check_size(size: int) -> None:
    if size > LARGEST_MESSAGE:
        raise MessageTooLargeError(f"a message must have at most {LARGEST_MESSAGE} bytes, got {size}")


class FrameReader:
    """Takes bytes as they come and gives payloads as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """The payloads that `data` completes. Raises MessageTooLargeError as soon as one is announced."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            check_size(size)
            first = start + _LENGTH.size
            if len(buffer) < first + size:
                break
            start = first + size
            payloads.append(buffer[first:start])
        del buffer[:start]
        return payloads
