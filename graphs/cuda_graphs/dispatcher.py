"""Which CUDA graph, if any, serves a batch: a pure function of the batch's shape, as tables built once."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind, decode_key, mixed_key

_MIXED_KINDS = {
    GraphMode.PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.BREAKABLE: GraphKind.BREAKABLE,
}


class Dispatcher:
    """Total over all batches: keys of the smallest size that holds the batch, graphs of decodes before any other."""

    def __init__(self, graph: GraphConfig, scheduler: SchedulerConfig):
        most, longest = scheduler.max_num_seqs, scheduler.max_model_len
        self.decode_keys = tuple(decode_key(size, longest) for size in sorted(graph.decode_sizes))
        self.short_keys = tuple(decode_key(*shape, short=True) for shape in sorted(graph.short_decodes))
        kind = _MIXED_KINDS.get(graph.mode, GraphKind.FULL)
        self.token_keys = tuple(
            mixed_key(size, most, longest) if kind is GraphKind.FULL else GraphKey(kind, size)
            for size in sorted(graph.token_sizes)
        )
        self._decode_table = _table(self.decode_keys)
        self._short_keys: dict[int, list[GraphKey]] = {}  # by size, short contexts first
        for key in self.short_keys:
            self._short_keys.setdefault(key.num_tokens, []).append(key)
        self._token_table = _table(self.token_keys)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every key that `dispatch` may return."""
        return self.decode_keys + self.short_keys + self.token_keys

    def dispatch(
        self, num_tokens: int, num_requests: int, uniform_query_len: int | None, longest: int
    ) -> tuple[GraphKey, ...]:
        """The keys of graphs that serve the batch, the best first: the first that is captured is to be replayed.

        All have one size. Nothing where the batch runs without a graph.

        uniform_query_len: tokens of each request if all have the same number, else None. longest: of the contexts, with
        this step's tokens.
        """
        if not 1 <= num_requests <= num_tokens:
            return ()
        if uniform_query_len == 1 and num_requests == num_tokens < len(self._decode_table):
            key = self._decode_table[num_tokens]
            short_keys = self._short_keys.get(key.num_tokens, ())
            return (*(short for short in short_keys if longest <= short.max_seq_len), key)
        return (self._token_table[num_tokens],) if num_tokens < len(self._token_table) else ()


def _table(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Index n: the smallest key of at least n tokens. The keys come in ascending order."""
    table: list[GraphKey] = []
    for key in keys:
        table += [key] * (key.num_tokens + 1 - len(table))
    return table
