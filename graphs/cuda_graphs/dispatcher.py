"""Chooses the CUDA graph for a batch from the batch's shape, by tables that are built once.

A graph is identified by its key (`GraphKey`). Decode graphs are captured for numbers of requests, other graphs for
numbers of tokens. A batch is padded to the smallest captured size that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple, TypeVar

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig

T = TypeVar("T")


class GraphKind(Enum):
    """The part of a forward that is captured as CUDA graphs.

    Unless the kind is FULL, attention is not captured: it runs between graphs, on the unpadded batch.
    """

    FULL = "full"  # the whole forward, attention included
    PIECEWISE = "piecewise"  # the compiled pieces between attention ops
    BREAKABLE = "breakable"  # eager code between attention ops


class GraphKey(NamedTuple):
    """Identifies a captured graph by everything that its kernel launches depend on.

    Launches outside of attention depend only on num_tokens and `extra`. The fields from num_rows to max_seq_len
    describe the captured attention; they are 0 if attention is not captured. A row is a run of consecutive tokens of a
    request, see AttentionInputs.
    """

    kind: GraphKind
    num_tokens: int  # of the padded batch
    num_rows: int = 0  # of attention, padding included; a request may have several
    num_decodes: int = 0  # leading rows with one query token each
    # As in AttentionInputs.host_3: most query tokens of a row; in decode graphs, the rows per request.
    max_query_len: int = 0
    max_seq_len: int = 0  # longest context
    short: bool = False  # max_seq_len is below the engine's limit
    without_offsets: bool = False  # the rows have no offsets, in an engine where rows may have some
    purpose: str = ""  # names a graph that is not a step of the engine's model, "" for a step
    extra: tuple[tuple[str, int], ...] = ()  # names and sizes of further fields that the batch uses, see KeyField

    @property
    def is_decode(self) -> bool:
        """Whether the graph serves only batches in which all requests decode."""
        return self.num_decodes > 0

    @property
    def variant(self) -> str:
        """The name of the forward's variant that was captured, the first name in `extra`; "" for the usual forward."""
        return self.extra[0][0] if self.extra else ""

    @property
    def name(self) -> str:
        """The graph's name in metrics and logs, unique within an engine.

        Examples: `decode 8`, `short-256 8`, `verify-4 32`, `verify-4-short-256 32`, `draft-3 16`, `follow-verify-4 32`,
        `plain-decode 8`, `full 512`, `piecewise 512`, `decode 8 rank 16`, `tower 1024`.
        """
        kind = f"short-{self.max_seq_len}" if self.short else "decode" if self.is_decode else self.kind.value
        if self.purpose and not self.is_decode:
            kind = self.purpose
        if self.is_decode and (self.purpose or self.max_query_len > 1):
            purpose = self.purpose or f"verify-{self.max_query_len}"
            kind = f"{purpose}-{kind}" if self.short else purpose
        kind = f"plain-{kind}" if self.without_offsets else kind
        return " ".join([f"{kind} {self.num_tokens}", *(f"{name} {size}" for name, size in self.extra)])


@dataclass(frozen=True)
class KeyField:
    """A field of GraphKey.extra: a number besides the batch's shape on which the launches of a graph depend.

    An example is a variant of the forward, such as that for adapters: 1 if the batch runs it. The host knows the number
    for each batch, and rounds it up to one of `sizes`; graphs are captured for each of these sizes. A batch with the
    number 0 uses the graphs without the field.
    If token_sizes is given, the field exists only in graphs that serve prompts and decodes alike and hold one of these
    numbers of tokens. Batches of only decodes use these graphs too. Such a graph has no other field.
    """

    name: str
    sizes: tuple[int, ...]
    token_sizes: tuple[int, ...] | None = None  # None: all graphs have the field

    def size_for(self, value: int) -> int | None:
        """Return the smallest of `sizes` that is at least `value`; 0 for 0, None if `value` exceeds all sizes."""
        return 0 if value == 0 else min((size for size in self.sizes if size >= value), default=None)


def decode_key(num_requests: int, max_seq_len: int, short: bool = False, *, query_len: int = 1) -> GraphKey:
    """Return the key of a FULL graph for `num_requests` requests that all decode.

    query_len: query tokens per request; more than 1 if drafts are verified. Each query token is a row of attention.
    max_seq_len, short: see GraphKey.
    """
    num_rows = num_requests * query_len
    return GraphKey(GraphKind.FULL, num_rows, num_rows, num_rows, query_len, max_seq_len, short)


def mixed_key(num_tokens: int, max_num_seqs: int, max_seq_len: int) -> GraphKey:
    """Return the key of a FULL graph for any batch of up to `num_tokens` tokens, decodes and prompts mixed.

    The device determines which requests are decodes. The graph has one row more than a batch can have requests
    (`max_num_seqs` at most); all padding tokens belong to that row.
    """
    return GraphKey(GraphKind.FULL, num_tokens, min(num_tokens, max_num_seqs) + 1, 0, num_tokens, max_seq_len)


_MIXED_KINDS = {
    GraphMode.PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE: GraphKind.PIECEWISE,
    GraphMode.BREAKABLE: GraphKind.BREAKABLE,
}

# Up to this number of rows, a matrix product takes about as long as reading its weights.
MOST_ROWS_READ = 256
# Least numbers of tokens for `prompt_sizes`. The kernels of longer prompts take longer than their launches.
PROMPT_SIZES = (*range(64, 513, 64), *range(640, 1025, 128))


class Dispatcher:
    """Maps the shape of a batch to the key of the smallest graph that holds the batch. Decode graphs are preferred.

    keys: all keys that `dispatch` may return. Keys without `extra` are also in one of three tuples: decode_keys (decode
    graphs for contexts of any length), short_keys (decode graphs for short contexts) and token_keys (other graphs, by
    number of tokens).
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
        """Build the tables from batch shapes to graph keys.

        fields: the fields that GraphKey.extra may have. There is a key for each graph and each combination of the
        fields' sizes; a field with token_sizes limits this, see KeyField.
        query_lens: the numbers of query tokens per decoding request for which there are graphs, besides 1. For numbers
        in `rare`, only few batch sizes are captured, see EngineConfig.rare_query_lens. token_sizes: token counts that
        are captured, a subset of graph.token_sizes; None: all of them.
        """
        most, longest = scheduler.max_num_seqs * max(query_lens, default=1), scheduler.max_model_len
        self._fields = tuple(fields)

        def sizes_of(query_len: int) -> tuple[int, ...]:
            most_requests = scheduler.max_num_batched_tokens // query_len
            fitting = [size for size in sorted(graph.decode_sizes) if query_len == 1 or size <= most_requests]
            return few_sizes(fitting, query_len) if query_len in rare else tuple(fitting)

        # Rows per request -> padded tokens -> keys: those for short contexts by ascending context, then the usual key.
        decodes: dict[int, dict[int, list[GraphKey]]] = {}
        for query_len in (1, *query_lens):
            decodes[query_len] = {size * query_len: [] for size in sizes_of(query_len)}
            for size, context in sorted(graph.short_shapes(query_len)):
                if (keys := decodes[query_len].get(size * query_len)) is not None:
                    keys.append(decode_key(size, context, short=True, query_len=query_len))
            for num_tokens, keys in decodes[query_len].items():
                keys.append(decode_key(num_tokens // query_len, longest, query_len=query_len))
        of_any_length = [keys for of_len in decodes.values() for keys in of_len.values()]
        self.decode_keys = tuple(keys[-1] for keys in of_any_length)
        self.short_keys = tuple(key for keys in of_any_length for key in keys[:-1])
        kind = _MIXED_KINDS.get(graph.mode, GraphKind.FULL)
        self.token_keys = tuple(
            mixed_key(size, most, longest) if kind is GraphKind.FULL else GraphKey(kind, size)
            for size in sorted(graph.token_sizes if token_sizes is None else token_sizes)
        )
        self._decode_tables = {query_len: _table(of_len) for query_len, of_len in decodes.items()}
        self._token_table = _table({key.num_tokens: key for key in self.token_keys})
        usual_keys = self.decode_keys + self.short_keys + self.token_keys
        # Sizes of the fields -> a map from each key without the fields to the key with the fields.
        self._with_fields: dict[tuple[int | None, ...], dict[GraphKey, GraphKey]] = {}
        # Sizes of the fields -> table by number of tokens, if one of the fields has token_sizes.
        self._limited_tables: dict[tuple[int | None, ...], list[GraphKey]] = {}
        for sizes in product(*((0, *field.sizes) for field in self._fields)):
            present = [(field, size) for field, size in zip(self._fields, sizes, strict=True) if size]
            extra = tuple((field.name, size) for field, size in present)
            limits = [field.token_sizes for field, _ in present if field.token_sizes is not None]
            if limits and len(present) > 1:
                continue
            if limits:
                kept = tuple(key for key in self.token_keys if key.num_tokens in limits[0])
                self._limited_tables[sizes] = _table({key.num_tokens: key._replace(extra=extra) for key in kept})
            self._with_fields[sizes] = {key: key._replace(extra=extra) for key in (kept if limits else usual_keys)}
        self.keys = tuple(key for keys in self._with_fields.values() for key in keys.values())

    def dispatch(
        self,
        num_tokens: int,
        num_requests: int,
        uniform_query_len: int | None,
        longest: int,
        values: Mapping[str, int] | None = None,
    ) -> GraphKey | None:
        """Return the key of the graph that serves a batch; None if no graph does.

        uniform_query_len: query tokens per request if all requests are decodes with the same number; otherwise None.
        longest: the longest context, this step's tokens included. values: the batch's value of each further field, by
        name; 0 if missing.
        """
        if not 1 <= num_requests <= num_tokens:
            return None
        key = self._usual_key(num_tokens, num_requests, uniform_query_len, longest)
        if not values or key is None:
            return key
        sizes = tuple(field.size_for(values.get(field.name, 0)) for field in self._fields)
        if (table := self._limited_tables.get(sizes)) is not None:
            return table[num_tokens] if num_tokens < len(table) else None
        return self._with_fields.get(sizes, {}).get(key)  # None if a value is larger than all sizes

    def _usual_key(
        self, num_tokens: int, num_requests: int, uniform_query_len: int | None, longest: int
    ) -> GraphKey | None:
        decode_table = self._decode_tables.get(uniform_query_len or 0, ())
        if num_tokens < len(decode_table) and num_tokens == num_requests * (uniform_query_len or 0):
            *short_keys, key = decode_table[num_tokens]
            for short_key in short_keys:
                if longest <= short_key.max_seq_len:
                    return short_key
            return key
        return self._token_table[num_tokens] if num_tokens < len(self._token_table) else None


def _table(of_sizes: Mapping[int, T]) -> list[T]:
    """Return a list whose item n is the value for the smallest size that is at least n.

    of_sizes: size -> value, in ascending order. The list ends with the largest size.
    """
    table: list[T] = []
    for size, value in of_sizes.items():
        table += [value] * (size + 1 - len(table))
    return table


def prompt_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes to capture for a variant of the forward whose steps have prompts, in ascending order.

    sizes: the numbers of tokens to select from, ascending. PROMPT_SIZES has numbers of tokens from 64 to 1,024. For
    each of them, the smallest size that is at least this number is selected, unless it is more than twice as large.
    """
    near = ([size for size in sizes if least <= size <= 2 * least] for least in PROMPT_SIZES)
    return tuple(sorted({min(found) for found in near if found}))


def few_sizes(sizes: Sequence[int], query_len: int = 1) -> tuple[int, ...]:
    """Return the sizes to capture for batches that are rare or do little work, in ascending order.

    sizes: the numbers of requests to select from, ascending. query_len: rows per request. Up to MOST_ROWS_READ rows,
    where padding costs little, one size is selected for each power of two: the smallest size of at least that power, or
    the largest size if none is. Above, all sizes are selected.
    """
    powers = [1 << power for power in range((MOST_ROWS_READ // query_len).bit_length())]
    padded = {min((size for size in sizes if size >= power), default=sizes[-1]) for power in powers if sizes}
    return tuple(sorted(padded | {size for size in sizes if size > max(powers, default=0)}))
