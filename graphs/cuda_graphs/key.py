"""The key of a captured graph: its kind, and every host value that its kernels were launched with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GraphKind(Enum):
    """FULL: the whole forward, attention included. PIECEWISE: the compiled pieces between attentions. BREAKABLE: eager
    code between attentions. In the last two, attention runs between graphs, on the unpadded batch.
    """

    FULL = "full"
    PIECEWISE = "piecewise"
    BREAKABLE = "breakable"


@dataclass(frozen=True)
class GraphKey:
    """The key of a captured graph.

    num_tokens: tokens of the padded batch, on which every launch outside of attention depends. Attention's launches
    depend on the others, which are 0 if attention is not captured: num_requests rows, of which the first num_decodes
    have one query token each, none more than max_query_len, and contexts of at most max_seq_len, which is less than the
    engine's limit in graphs for short contexts. Where all rows are decodes, max_query_len is the number of rows that
    share a request. unnumbered: the rows have no numbers, in an engine whose rows may have them (see InputBatch).
    purpose: what a graph holds that is not a step of the engine's model, "" for a step. extra: the sizes of further
    fields, by name, for batches that use them.
    """

    kind: GraphKind
    num_tokens: int  # of the padded batch
    num_requests: int = 0  # rows of attention
    num_decodes: int = 0  # leading rows with one query token each
    # Most query tokens of a row; in graphs of decodes the rows per request: its newest token and its drafts.
    max_query_len: int = 0
    max_seq_len: int = 0
    short: bool = False
    unnumbered: bool = False
    purpose: str = ""
    extra: tuple[tuple[str, int], ...] = ()

    def __hash__(self) -> int:
        """Cheaper than that of all fields: a step looks up several keys."""
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
        """A name, unique within an engine.

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
    """A host value of a batch that a pass launches kernels with, rounded up to one of `sizes`.

    Batches that do not use the pass have 0, and use the graphs without the field.
    """

    name: str
    sizes: tuple[int, ...]

    def size_for(self, value: int) -> int | None:
        """Return the smallest size of at least `value`; None if it exceeds all."""
        return 0 if value == 0 else min((size for size in self.sizes if size >= value), default=None)


def decode_key(num_requests: int, max_seq_len: int, short: bool = False, *, query_len: int = 1) -> GraphKey:
    """A full graph of num_requests decodes, with query_len rows for each."""
    num_rows = num_requests * query_len
    return GraphKey(GraphKind.FULL, num_rows, num_rows, num_rows, query_len, max_seq_len, short)


def mixed_key(num_tokens: int, max_num_seqs: int, max_seq_len: int) -> GraphKey:
    """Return the key of a full graph of any batch of up to num_tokens tokens; the device finds the decodes.

    It has one row more than requests, to which all padding tokens belong.
    """
    return GraphKey(GraphKind.FULL, num_tokens, min(num_tokens, max_num_seqs) + 1, 0, num_tokens, max_seq_len)
