"""Which CUDA graph, if any, serves a batch: a pure function of the batch's shape, as a table built once."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.config import GraphMode


@dataclass(frozen=True)
class GraphKey:
    """Every host value that a captured kernel used; what is not in the key may not influence a capture.

    The graph serves batches of up to `num_requests` requests with `query_len` tokens each, padded to exactly that
    many, with contexts of up to `max_seq_len` tokens.
    """

    num_requests: int
    query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.query_len


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8 to 256 in steps of 8, then in steps of 16, up to and including max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)]
    return tuple(sorted({size for size in sizes if size <= max_num_seqs} | {max_num_seqs}))


class Dispatcher:
    """Total over all batches: a key where a graph may be replayed, None where the batch runs without one."""

    def __init__(self, mode: GraphMode, capture_sizes: tuple[int, ...], max_seq_len: int):
        sizes = () if mode is GraphMode.NONE else tuple(sorted(capture_sizes))
        self.keys = tuple(GraphKey(size, 1, max_seq_len) for size in sizes)
        self._by_requests: list[GraphKey] = []
        for key in self.keys:
            self._by_requests += [key] * (key.num_requests + 1 - len(self._by_requests))

    def dispatch(self, num_tokens: int, num_requests: int, uniform_query_len: int | None) -> GraphKey | None:
        """The smallest captured graph for the batch.

        uniform_query_len: tokens of each request if all have the same number and are decodes, else None.
        """
        if uniform_query_len != 1 or num_requests < 1 or num_tokens != num_requests:
            return None
        return self._by_requests[num_requests] if num_requests < len(self._by_requests) else None
