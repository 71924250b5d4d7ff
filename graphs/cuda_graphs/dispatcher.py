"""Chooses the CUDA graph of a batch: a pure function of the batch's shape, from tables built once.

Graphs are named by keys (`GraphKey`). Decode graphs have sizes in requests, other graphs sizes in tokens; a batch is
padded to the smallest size that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig


class GraphKind(Enum):
    """The content of a graph. Unless it is FULL, attention runs between graphs, on the unpadded batch."""

    FULL = "full"  # the whole forward, attention included
    PIECEWISE = "piecewise"  # the compiled pieces between attention ops
    BREAKABLE = "breakable"  # eager code between attention ops


@dataclass(frozen=True)
class GraphKey:
    """The key of a captured graph: everything that its launches depend on.

    Launches outside of attention depend only on num_tokens. The fields from num_requests to max_seq_len describe the
    captured attention; they are 0 if attention is not captured.
    """

    kind: GraphKind
    num_tokens: int  # of the padded batch
    num_requests: int = 0  # rows of attention
    num_decodes: int = 0  # leading rows with one query token each
    # Most query tokens of a row. In decode graphs, the rows per request.
    max_query_len: int = 0
    max_seq_len: int = 0  # longest context
    short: bool = False  # max_seq_len is below the engine's limit
    unnumbered: bool = False  # the batch is not numbered, in an engine with numbered batches (see input_batch.py)
    purpose: str = ""  # names a graph that is not a step of the engine's model, "" for a step
    extra: tuple[tuple[str, int], ...] = ()  # names and sizes of further fields that the batch uses, see KeyField

    def __hash__(self) -> int:
        """Hash some of the fields, which is cheaper than all; a step looks up several keys."""
        return hash((self.num_tokens, self.num_requests, self.max_query_len, self.max_seq_len, self.purpose))

    @property
    def is_decode(self) -> bool:
        """Whether the graph serves batches of decodes only."""
        return self.num_decodes > 0

    @property
    def variant(self) -> str:
        """The variant of the forward in the graph; "" for the usual one."""
        return self.extra[0][0] if self.extra else ""

    @property
    def name(self) -> str:
        """The graph's name in metrics and logs, unique within an engine.

        `decode 8`, `short-256 8`, `verify-4 32`, `verify-4-short-256 32`, `draft-3 16`, `follow-verify-4 32`,
        `plain-decode 8`, `full 512`, `piecewise 512`, `decode 8 rank 16`.
        """
        kind = f"short-{self.max_seq_len}" if self.short else "decode" if self.is_decode else self.kind.value
        if self.is_decode and (self.purpose or self.max_query_len > 1):
            purpose = self.purpose or f"verify-{self.max_query_len}"
            kind = f"{purpose}-{kind}" if self.short else purpose
        kind = f"plain-{kind}" if self.unnumbered else kind
        return " ".join([f"{kind} {self.num_tokens}", *(f"{name} {size}" for name, size in self.extra)])


@dataclass(frozen=True)
class KeyField:
    """A further host value of a batch that launches depend on, rounded up to one of `sizes`.

    Batches with the value 0 use the graphs without the field.
    """

    name: str
    sizes: tuple[int, ...]

    def size_for(self, value: int) -> int | None:
        """Return the smallest size of at least `value`; 0 for 0, None if `value` exceeds all sizes."""
        return 0 if value == 0 else min((size for size in self.sizes if size >= value), default=None)


def decode_key(num_requests: int, max_seq_len: int, short: bool = False, *, query_len: int = 1) -> GraphKey:
    """Return the key of a full graph of num_requests decodes, with query_len rows for each."""
    num_rows = num_requests * query_len
    return GraphKey(GraphKind.FULL, num_rows, num_rows, num_rows, query_len, max_seq_len, short)


def mixed_key(num_tokens: int, max_num_seqs: int, max_seq_len: int) -> GraphKey:
    """Return the key of a full graph for any batch of up to num_tokens tokens; the device finds the decodes.

    The graph has a row more than there are requests; all padding tokens belong to it.
    """
    return GraphKey(GraphKind.FULL, num_tokens, min(num_tokens, max_num_seqs) + 1, 0, num_tokens, max_seq_len)


_MIXED_KINDS = {
    GraphMode.PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.BREAKABLE: GraphKind.BREAKABLE,
}

# Up to this number of rows, a matrix product takes about as long as reading its weights.
MOST_ROWS_READ = 256


class Dispatcher:
    """Maps every batch shape to the smallest graph that holds it, preferring decode graphs.

    `keys` are all keys that `dispatch` may return.
    """

    def __init__(
        self,
        graph: GraphConfig,
        scheduler: SchedulerConfig,
        fields: Sequence[KeyField] = (),
        query_lens: Sequence[int] = (),
        rare: Sequence[int] = (),
        token_sizes: Sequence[int] | None = None,
    ):
        """Build the tables.

        fields: further fields of the keys; each combination of their sizes has graphs of all sizes. query_lens: rows
        per request in decodes with several rows. rare: see EngineConfig.rare_query_lens. token_sizes: those of
        graph.token_sizes that are captured; None: all.
        """
        most, longest = scheduler.max_num_seqs * max(query_lens, default=1), scheduler.max_model_len
        self._fields = tuple(fields)

        def sizes_of(number: int) -> tuple[int, ...]:
            most_requests = scheduler.max_num_batched_tokens // number
            fitting = [size for size in sorted(graph.decode_sizes) if number == 1 or size <= most_requests]
            return few_sizes(fitting, number) if number in rare else tuple(fitting)

        decode_sizes = sizes_of(1)
        self.decode_keys = tuple(decode_key(size, longest) for size in decode_sizes)
        short_keys = [
            decode_key(*shape, short=True) for shape in sorted(graph.short_shapes(1)) if shape[0] in decode_sizes
        ]
        several_keys: dict[int, tuple[GraphKey, ...]] = {}
        for number in query_lens:
            sizes = sizes_of(number)
            several_keys[number] = tuple(decode_key(size, longest, query_len=number) for size in sizes)
            short_keys += [
                decode_key(size, context, short=True, query_len=number)
                for size, context in sorted(graph.short_shapes(number))
                if size in sizes
            ]
        self.several_keys = tuple(key for keys in several_keys.values() for key in keys)
        self.short_keys = tuple(short_keys)
        kind = _MIXED_KINDS.get(graph.mode, GraphKind.FULL)
        self.token_keys = tuple(
            mixed_key(size, most, longest) if kind is GraphKind.FULL else GraphKey(kind, size)
            for size in sorted(graph.token_sizes if token_sizes is None else token_sizes)
        )
        self._decode_table = _table(self.decode_keys)
        self._several_tables = {number: _table(keys) for number, keys in several_keys.items()}
        # Keys by (max_query_len, num_tokens), short contexts first.
        self._short_keys: dict[tuple[int, int], list[GraphKey]] = {}
        for key in self.short_keys:
            self._short_keys.setdefault((key.max_query_len, key.num_tokens), []).append(key)
        self._token_table = _table(self.token_keys)
        usual_keys = self.decode_keys + self.several_keys + self.short_keys + self.token_keys
        # By the sizes of the fields: a map from each key without the fields to the key with them.
        self._with_fields: dict[tuple[int | None, ...], dict[GraphKey, GraphKey]] = {}
        for sizes in product(*((0, *field.sizes) for field in self._fields)):
            names = (field.name for field in self._fields)
            extra = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size)
            self._with_fields[sizes] = {key: replace(key, extra=extra) for key in usual_keys}
        self.keys = tuple(key for keys in self._with_fields.values() for key in keys.values())

    def dispatch(
        self,
        num_tokens: int,
        num_requests: int,
        uniform_query_len: int | None,
        longest: int,
        values: Mapping[str, int] | None = None,
    ) -> GraphKey | None:
        """Return the key of the graph that serves the batch; None if it runs without a graph.

        uniform_query_len: rows per request if all requests are decodes with equally many; otherwise None. longest: the
        longest context, this step's tokens included. values: values of further fields by name, 0 if missing.
        """
        key = self._usual_key(num_tokens, num_requests, uniform_query_len, longest)
        if not values or key is None:
            return key
        sizes = [field.size_for(values.get(field.name, 0)) for field in self._fields]
        return self._with_fields.get(tuple(sizes), {}).get(key)  # None if a value is larger than all sizes

    def _usual_key(
        self, num_tokens: int, num_requests: int, uniform_query_len: int | None, longest: int
    ) -> GraphKey | None:
        if not 1 <= num_requests <= num_tokens:
            return None
        if uniform_query_len == 1 and num_requests == num_tokens < len(self._decode_table):
            return self._shortest(self._decode_table[num_tokens], longest)
        several_table = self._several_tables.get(uniform_query_len or 0, ())
        if num_tokens < len(several_table):
            return self._shortest(several_table[num_tokens], longest)
        return self._token_table[num_tokens] if num_tokens < len(self._token_table) else None

    def _shortest(self, key: GraphKey, longest: int) -> GraphKey:
        """Return the key with as many decodes as `key` and the smallest sufficient max_seq_len."""
        short_keys = self._short_keys.get((key.max_query_len, key.num_tokens), ())
        return next((short for short in short_keys if longest <= short.max_seq_len), key)


def _table(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Return a list whose item n is the smallest key of at least n tokens. keys: in ascending order."""
    table: list[GraphKey] = []
    for key in keys:
        table += [key] * (key.num_tokens + 1 - len(table))
    return table


def few_sizes(sizes: Sequence[int], query_len: int = 1) -> tuple[int, ...]:
    """Thin out ascending capture sizes: up to MOST_ROWS_READ rows keep one size per power of two, above keep all.

    For batches that are rare or do little work: up to that number of rows, padding costs little. query_len: rows per
    request.
    """
    powers = [1 << power for power in range((MOST_ROWS_READ // query_len).bit_length())]
    padded = {min((size for size in sizes if size >= power), default=sizes[-1]) for power in powers if sizes}
    return tuple(sorted(padded | {size for size in sizes if size > max(powers, default=0)}))
