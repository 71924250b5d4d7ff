"""How many rows of logits are worked on at a time, so that temporary memory does not grow with the batch."""

from __future__ import annotations

from collections.abc import Iterator

# Of float32: 16 MB for each temporary tensor.
MAX_ELEMENTS = 1 << 22


def row_chunks(num_rows: int, vocab_size: int, max_elements: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Slices that cover num_rows rows of vocab_size elements, at most max_elements or one row each."""
    step = max(1, max_elements // vocab_size)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
