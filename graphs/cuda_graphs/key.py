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

    Values outside the key must not influence a capture, unless they are constant for the engine's lifetime. Launches
    outside attention depend on num_tokens alone. Attention's launches depend on the next four fields, which are 0 if
    attention is not captured.
    """

    kind: GraphKind
    num_tokens: int  # of the padded batch
    num_requests: int = 0  # rows of attention
    num_decodes: int = 0  # leading rows with one query token each
    # Most query tokens of a row; in graphs of decodes the rows per request: its newest token and its drafts.
    max_query_len: int = 0
    max_seq_len: int = 0  # longest context
    short: bool = False  # max_seq_len is below the engine's limit
    drafts: int = 0  # drafts per request if the graph holds drafting passes, otherwise 0
    prefills_head: bool = False  # the graph holds a draft head's pass over a step's tokens
    no_head: bool = False  # a step without drafts that computes no inputs for the draft head
    extra: tuple[tuple[str, int], ...] = ()  # (name, size) of further fields, for batches that use them

    def __hash__(self) -> int:
        """Hash a few fields only: cheaper, as a step looks up several keys."""
        return hash((self.num_tokens, self.num_requests, self.max_query_len, self.max_seq_len, self.drafts))

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
        if self.is_decode and (self.drafts or self.max_query_len > 1):
            purpose = f"draft-{self.drafts}" if self.drafts else f"verify-{self.max_query_len}"
            kind = f"{purpose}-{kind}" if self.short else purpose
        kind = f"follow-{kind}" if self.prefills_head else f"plain-{kind}" if self.no_head else kind
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


def decode_key(num_requests: int, max_seq_len: int, short: bool = False) -> GraphKey:
    """Return the key of a full graph of num_requests decodes."""
    return GraphKey(GraphKind.FULL, num_requests, num_requests, num_requests, 1, max_seq_len, short)


def verify_key(num_requests: int, query_len: int, max_seq_len: int, short: bool = False) -> GraphKey:
    """Return the key of a full graph of num_requests decodes with drafts, query_len rows each."""
    num_rows = num_requests * query_len
    return GraphKey(GraphKind.FULL, num_rows, num_rows, num_rows, query_len, max_seq_len, short)


def mixed_key(num_tokens: int, max_num_seqs: int, max_seq_len: int) -> GraphKey:
    """Return the key of a full graph of any batch of up to num_tokens tokens; the device finds the decodes.

    It has one row more than requests, to which all padding tokens belong.
    """
    return GraphKey(GraphKind.FULL, num_tokens, min(num_tokens, max_num_seqs) + 1, 0, num_tokens, max_seq_len)
