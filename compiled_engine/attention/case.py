"""The description of a layer's attention, and a backend's answer: its support, or the reason for refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.kv_format import AUTO, CODED, cache_dtype


class Refused(ValueError):
    """Raised by a backend that cannot run a case. The message names a field, its value and what is allowed."""


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Refuse a case in which this does not hold."""
    if not holds:
        raise Refused(f"{field} is {value}; allowed: {allowed}")


def names_of(values: Sequence[object]) -> str:
    """Join allowed values for a message."""
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class KVFormat:
    """Storage of keys and values: dtype, that of queries or one of kv_format.CODED, and tokens in a block."""

    dtype: torch.dtype
    block_size: int


@dataclass(frozen=True)
class AttentionCase:
    """A layer's demands on attention on a kind of device.

    device: "cpu" or "cuda". dtype: of queries and results. head_dim: elements of a query and of a key; value_dim those
    of a value, None for as many. cache: None if keys and values are only those of the step. sliding_window,
    soft_cap, sinks: see Scoring. query_len: query tokens of each request, None if ragged.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache: KVFormat | None
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    value_dim: int | None = None
    causal: bool = True
    query_len: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    def with_block_size(self, block_size: int) -> AttentionCase:
        """Return the same case over a cache of other blocks."""
        return self if self.cache is None else replace(self, cache=replace(self.cache, block_size=block_size))

    @property
    def packed(self) -> bool:
        """Return whether tokens attend in both directions to those of their request in the step, without a cache."""
        return self.cache is None and not self.causal

    def require_packed(self) -> None:
        """Require what backends without a cache do: whole groups of query heads, all sizes equal."""
        whole = self.num_heads % self.num_kv_heads == 0
        require(whole, "num_heads", self.num_heads, f"multiples of num_kv_heads {self.num_kv_heads}")
        same = self.value_dim in (None, self.head_dim)
        require(same, "value_dim", self.value_dim, f"head_dim {self.head_dim}")

    def require_paged(self) -> KVFormat:
        """Require what all backends do, and return the format of the cache.

        That is whole groups of query heads, and causal attention over a paged cache in the dtype of the queries or in
        8 bits.
        """
        whole = self.num_heads % self.num_kv_heads == 0
        require(whole, "num_heads", self.num_heads, f"multiples of num_kv_heads {self.num_kv_heads}")
        same = self.value_dim in (None, self.head_dim)
        require(same, "value_dim", self.value_dim, f"head_dim {self.head_dim}")
        require(self.causal, "causal", self.causal, "True")
        if self.cache is None:
            raise Refused("cache is None; allowed: a paged cache")
        dtypes = (self.dtype, *(elements.dtype for elements in CODED))
        require(self.cache.dtype in dtypes, "kv_cache_dtype", self.cache.dtype, names_of(dtypes))
        return self.cache


def cases_of(
    model: ModelConfig, block_size: int, device: torch.device, kv_dtype: str = AUTO
) -> tuple[AttentionCase, ...]:
    """Return the different cases of a model's layers that attend, in the order of the layers. kv_dtype: see
    CacheConfig."""
    storage = KVFormat(cache_dtype(kv_dtype, model.dtype), block_size)
    layers = ((model.heads_of(layer), window) for layer, window in enumerate(model.sliding_windows))
    cases = (
        AttentionCase(
            device.type,
            model.dtype,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            storage if model.causal else None,
            window or 0,
            model.attention_soft_cap,
            model.attention_sinks,
            causal=model.causal,
        )
        for heads, window in layers
        if heads.num_heads
    )
    return tuple(dict.fromkeys(cases))


def planned_together(cases: Sequence[AttentionCase]) -> AttentionCase | None:
    """Return the case that attention is planned for once a step; None where each layer plans its own.

    A plan holds for layers with and without a window, but not for those with other heads.
    """
    shapes = {replace(case, sliding_window=0) for case in cases}
    return shapes.pop() if len(shapes) == 1 else None


class GraphSupport(Enum):
    """The CUDA graphs that may capture a backend's kernels, from the fewest to the most."""

    NEVER = "never"
    UNIFORM_DECODE = "uniform decode"
    ALWAYS = "always"


def no_short_contexts(num_requests: int) -> tuple[int, ...]:
    """Offer no kernels for short contexts."""
    return ()


def all_contexts(num_requests: int, contexts: tuple[int, ...]) -> tuple[int, ...]:
    """Return all of these contexts."""
    return contexts


@dataclass(frozen=True)
class Support:
    """A backend's offer for a case that it accepts.

    records_decodes: whether, on a CPU, the calls for decodes depend only on their number. short_contexts: context
    lengths, ascending, up to which a number of decodes uses special kernels in `attend_unrotated`; a captured graph
    does not know context lengths, so such batches have separate graphs. contexts_of_drafts: from a number of requests
    and such lengths to those for which `attend` launches other kernels where drafts are verified.
    """

    graphs: GraphSupport
    records_decodes: bool = False
    short_contexts: Callable[[int], tuple[int, ...]] = no_short_contexts
    contexts_of_drafts: Callable[[int, tuple[int, ...]], tuple[int, ...]] = all_contexts

    @classmethod
    def of_all(cls, supports: Sequence[Support]) -> Support:
        """Return what is offered for every one of several cases."""

        def short_contexts(num_requests: int) -> tuple[int, ...]:
            first, *others = (support.short_contexts(num_requests) for support in supports)
            return tuple(context for context in first if all(context in other for other in others))

        def contexts_of_drafts(num_requests: int, contexts: tuple[int, ...]) -> tuple[int, ...]:
            needed = {each for support in supports for each in support.contexts_of_drafts(num_requests, contexts)}
            return tuple(context for context in contexts if context in needed)

        order = list(GraphSupport)
        return cls(
            min((support.graphs for support in supports), key=order.index),
            all(support.records_decodes for support in supports),
            short_contexts,
            contexts_of_drafts,
        )
