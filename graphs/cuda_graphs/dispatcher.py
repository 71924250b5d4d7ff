"""Choice of the CUDA graph for a batch: a pure function of the batch's shape, as tables built once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind, KeyField, decode_key, mixed_key, verify_key

_MIXED_KINDS = {
    GraphMode.PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.BREAKABLE: GraphKind.BREAKABLE,
}

# Up to this many rows, a product of matrices takes about as long as reading its weights.
MOST_ROWS_READ = 256


class Dispatcher:
    """Defined for every batch: the key of the smallest size that holds it, graphs of decodes before any other."""

    def __init__(
        self,
        graph: GraphConfig,
        scheduler: SchedulerConfig,
        fields: Sequence[KeyField] = (),
        query_lens: Sequence[int] = (),
        rare: Sequence[int] = (),
    ):
        """fields: what passes add to the keys; there is a graph of each size for each combination. query_lens, rare:
        see SpeculationConfig.verified and .rare."""
        most, longest = scheduler.max_num_seqs * max(query_lens, default=1), scheduler.max_model_len
        self._fields = tuple(fields)

        def sizes_of(number: int) -> tuple[int, ...]:
            most_requests = scheduler.max_num_batched_tokens // number
            fitting = [size for size in sorted(graph.decode_sizes) if number == 1 or size <= most_requests]
            return few_sizes(fitting, number) if number in rare else tuple(fitting)

        decode_sizes = sizes_of(1)
        self.decode_keys = tuple(decode_key(size, longest) for size in decode_sizes)
        short_decodes = (shape for shape in sorted(graph.short_decodes) if shape[0] in decode_sizes)
        short_keys = [decode_key(*shape, short=True) for shape in short_decodes]
        verify_keys: dict[int, tuple[GraphKey, ...]] = {}
        for number in query_lens:
            sizes = sizes_of(number)
            verify_keys[number] = tuple(verify_key(size, number, longest) for size in sizes)
            short_keys += [
                verify_key(size, number, context, short=True)
                for size, context in sorted(graph.short_verified)
                if size in sizes
            ]
        self.verify_keys = tuple(key for keys in verify_keys.values() for key in keys)
        self.short_keys = tuple(short_keys)
        kind = _MIXED_KINDS.get(graph.mode, GraphKind.FULL)
        self.token_keys = tuple(
            mixed_key(size, most, longest) if kind is GraphKind.FULL else GraphKey(kind, size)
            for size in sorted(graph.token_sizes)
        )
        self._decode_table = _table(self.decode_keys)
        self._verify_tables = {number: _table(keys) for number, keys in verify_keys.items()}
        # By query tokens of a request and size, short contexts first.
        self._short_keys: dict[tuple[int, int], list[GraphKey]] = {}
        for key in self.short_keys:
            self._short_keys.setdefault((key.max_query_len, key.num_tokens), []).append(key)
        self._token_table = _table(self.token_keys)
        plain_keys = self.decode_keys + self.verify_keys + self.short_keys + self.token_keys
        # By the sizes of the fields: for each key without them the one with them.
        self._with_fields: dict[tuple[int | None, ...], dict[GraphKey, GraphKey]] = {}
        for sizes in product(*((0, *field.sizes) for field in self._fields)):
            names = (field.name for field in self._fields)
            extra = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size)
            self._with_fields[sizes] = {key: replace(key, extra=extra) for key in plain_keys}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every key that `dispatch` may return."""
        return tuple(key for keys in self._with_fields.values() for key in keys.values())

    def dispatch(
        self,
        num_tokens: int,
        num_requests: int,
        uniform_query_len: int | None,
        longest: int,
        values: Mapping[str, int] | None = None,
    ) -> GraphKey | None:
        """Return the key of the graph that serves the batch; None if it runs without one.

        uniform_query_len: tokens of each request if all are decodes and have the same number, else None. longest: of
        the contexts, with this step's tokens. values: of the further fields, by name; 0 where there is none.
        """
        key = self._plain_key(num_tokens, num_requests, uniform_query_len, longest)
        if not values or key is None:
            return key
        sizes = [field.size_for(values.get(field.name, 0)) for field in self._fields]
        return self._with_fields.get(tuple(sizes), {}).get(key)  # None if a value is larger than all sizes

    def _plain_key(
        self, num_tokens: int, num_requests: int, uniform_query_len: int | None, longest: int
    ) -> GraphKey | None:
        if not 1 <= num_requests <= num_tokens:
            return None
        if uniform_query_len == 1 and num_requests == num_tokens < len(self._decode_table):
            return self._shortest(self._decode_table[num_tokens], longest)
        verify_table = self._verify_tables.get(uniform_query_len or 0, ())
        if num_tokens < len(verify_table):
            return self._shortest(verify_table[num_tokens], longest)
        return self._token_table[num_tokens] if num_tokens < len(self._token_table) else None

    def _shortest(self, key: GraphKey, longest: int) -> GraphKey:
        """The key for the shortest contexts of at least this length, of as many decodes as `key`."""
        short_keys = self._short_keys.get((key.max_query_len, key.num_tokens), ())
        return next((short for short in short_keys if longest <= short.max_seq_len), key)


def _table(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Index n: the smallest key of at least n tokens. The keys come in ascending order."""
    table: list[GraphKey] = []
    for key in keys:
        table += [key] * (key.num_tokens + 1 - len(table))
    return table


def few_sizes(sizes: Sequence[int], query_len: int = 1) -> tuple[int, ...]:
    """Those of these ascending sizes that powers of two are padded to, as long as these have at most MOST_ROWS_READ
    rows, and all larger ones.

    For batches that are rare, or of little work: up to so many rows, a few more take about as long. query_len: rows of
    a request.
    """
    powers = [1 << power for power in range((MOST_ROWS_READ // query_len).bit_length())]
    padded = {min((size for size in sizes if size >= power), default=sizes[-1]) for power in powers if sizes}
    return tuple(sorted(padded | {size for size in sizes if size > max(powers, default=0)}))
