"""Hashes of prefixes: equal hashes mean equal keys and values in the KV cache.

They form a chain of SHA-256 that begins with a root and goes on with one hash for each full block of tokens. The root
covers everything besides token ids that keys and values depend on, or that requests must have in common to share them.
Nothing is seeded, so hashes are the same in every process, and nobody can make two prefixes collide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = bytes(32)
"""The root of requests that depend on their token ids alone."""


def prefix_root(*, salt: str | None = None) -> bytes:
    """Return the root for a request. This is the only place that lists what a prefix depends on besides token ids.

    salt: only requests with the same salt share blocks.
    """
    parts = {"salt": None if salt is None else salt.encode()}
    given = [(name.encode(), content) for name, content in parts.items() if content is not None]
    if not given:
        return ROOT
    digest = hashlib.sha256()
    for name, content in given:
        digest.update(b"%s %d " % (name, len(content)) + content)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block of `token_ids` after the block with hash `parent`, or after the root.

    It covers these tokens and, through `parent`, all that comes before them. Token ids are hashed as int32.
    """
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def hash_blocks(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, count: int | None = None
) -> None:
    """Extend the hashes of a sequence's first blocks to `count` blocks; None for all full ones."""
    count = len(token_ids) // block_size if count is None else count
    for start in range(len(hashes) * block_size, count * block_size, block_size):
        hashes.append(hash_block(hashes[-1] if hashes else root, token_ids[start : start + block_size]))
