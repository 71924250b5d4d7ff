"""Describes a layer's attention (`AttentionCase`), and a backend's answer: its `Support`, or the error `Refused`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.kv_format import AUTO, CODED, cache_dtype, is_coded


class Refused(ValueError):
    """Raised by a backend that cannot run a case. The message gives the reason: mostly a field, and what is allowed."""


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise Refused unless `holds`. The message names the field, its value and what is allowed."""
    if not holds:
        raise Refused(f"{field} is {value}; allowed: {allowed}")


def names_of(values: Sequence[object]) -> str:
    """Return `values` as text, separated by commas, for an error message that says what is allowed."""
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class KVFormat:
    """The element type and the block size of a paged KV cache."""

    dtype: torch.dtype  # that of queries, or an 8-bit one of kv_format.CODED
    block_size: int  # tokens per block


@dataclass(frozen=True)
class AttentionCase:
    """Sizes, dtypes and options of a layer's attention on a type of device, which a backend supports or refuses."""

    device: str  # cpu or cuda
    dtype: torch.dtype  # of queries and results
    num_heads: int
    num_kv_heads: int
    head_dim: int  # elements of a query and of a key in the cache
    cache: KVFormat | None  # None: attention is among the step's tokens alone
    sliding_window: int = 0  # see Scoring, like soft_cap and sinks
    soft_cap: float = 0.0
    sinks: bool = False
    value_dim: int | None = None  # elements of a value; None: head_dim
    causal: bool = True
    query_len: int | None = None  # query tokens per request; None if they differ
    # Elements of the latent in a cache of latent rows, and of a head's key; 0: keys and values are cached. head_dim is
    # then that of a row.
    latent_dim: int = 0
    key_dim: int = 0
    num_biases: int = 0  # of scores, by relative position, of a head: W of op.packed_attention; 0: none

    @property
    def group(self) -> int:
        """Number of query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    def with_block_size(self, block_size: int) -> AttentionCase:
        """Return the case with another block size, or the case itself if it has no cache."""
        return self if self.cache is None else replace(self, cache=replace(self.cache, block_size=block_size))

    @property
    def packed(self) -> bool:
        """Whether attention is bidirectional among the tokens of each request, without a cache."""
        return self.cache is None and not self.causal

    def require_packed(self) -> None:
        """Raise Refused unless num_kv_heads divides num_heads, and values have head_dim elements.

        Scores must not have both biases and a soft cap.
        """
        whole = self.num_heads % self.num_kv_heads == 0
        require(whole, "num_heads", self.num_heads, f"multiples of num_kv_heads {self.num_kv_heads}")
        same = self.value_dim in (None, self.head_dim)
        require(same, "value_dim", self.value_dim, f"head_dim {self.head_dim}")
        capped = bool(self.num_biases and self.soft_cap)
        require(not capped, "soft_cap", self.soft_cap, "0 with biases by relative position")

    def require_paged(self) -> KVFormat:
        """Return the format of the paged cache. Raises Refused unless the case is attention over such a cache.

        num_kv_heads must divide num_heads, and values have head_dim elements. Attention must be causal, and the cache
        must have the dtype of queries or 8 bits, and no latent rows.
        """
        require(not self.latent_dim, "latent_dim", self.latent_dim, "0, keys and values that are stored apart")
        whole = self.num_heads % self.num_kv_heads == 0
        require(whole, "num_heads", self.num_heads, f"multiples of num_kv_heads {self.num_kv_heads}")
        same = self.value_dim in (None, self.head_dim)
        require(same, "value_dim", self.value_dim, f"head_dim {self.head_dim}")
        require(self.causal, "causal", self.causal, "True")
        require(not self.num_biases, "num_biases", self.num_biases, "0 with a paged cache")
        if self.cache is None:
            raise Refused("cache is None; allowed: a paged cache")
        self._require_dtype(self.cache)
        return self.cache

    def require_latent(self) -> KVFormat:
        """Return the format of the cache. Raises Refused unless the case is attention over paged latent rows.

        All heads' keys and values are products of a latent row with a weight (multi-head latent attention).

        Attention must be causal, without a window, a soft cap and sinks, and the cache must have the dtype of queries
        or 8 bits.
        """
        require(self.num_kv_heads == 1, "num_kv_heads", self.num_kv_heads, "1 with latent rows")
        require(self.causal, "causal", self.causal, "True")
        require(not self.sliding_window, "sliding_window", self.sliding_window, "0 with latent rows")
        require(not self.soft_cap, "soft_cap", self.soft_cap, "0 with latent rows")
        require(not self.sinks, "sinks", self.sinks, "False with latent rows")
        if self.cache is None:
            raise Refused("cache is None; allowed: a paged cache")
        self._require_dtype(self.cache)
        if is_coded(self.cache.dtype):
            require(self.latent_dim % 2 == 0, "latent_dim", self.latent_dim, "even numbers with an 8-bit KV cache")
        return self.cache

    def _require_dtype(self, cache: KVFormat) -> None:
        dtypes = (self.dtype, *(elements.dtype for elements in CODED))
        require(cache.dtype in dtypes, "kv_cache_dtype", cache.dtype, names_of(dtypes))


def cases_of(
    model: ModelConfig, block_size: int, device: torch.device, kv_dtype: str = AUTO
) -> tuple[AttentionCase, ...]:
    """Return the distinct cases of a model's attention layers, in layer order. kv_dtype: see CacheConfig."""
    storage = KVFormat(cache_dtype(kv_dtype, model.dtype), block_size)
    layers = ((layer, model.heads_of(layer), window) for layer, window in enumerate(model.sliding_windows))
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
            layer in model.attention_sinks,
            causal=model.causal,
            value_dim=heads.value_dim or None,
            latent_dim=heads.latent_dim,
            key_dim=heads.key_dim,
            num_biases=model.num_biases,
        )
        for layer, heads, window in layers
        if heads.num_heads
    )
    return tuple(dict.fromkeys(cases))


def planned_together(cases: Sequence[AttentionCase]) -> AttentionCase | None:
    """Return the case with which AttentionBackend.plan can plan the attention of all layers at once; None without one.

    cases: those of the model's layers. Layers with and without a window or sinks can share a plan, but layers with
    different heads cannot.
    """
    shapes = {replace(case, sliding_window=0, sinks=False) for case in cases}
    return shapes.pop() if len(shapes) == 1 else None


class GraphSupport(Enum):
    """The CUDA graphs that may capture a backend's kernels: no graph, graphs of decodes alone, or every graph."""

    NEVER = "never"
    UNIFORM_DECODE = "uniform decode"
    ALWAYS = "always"


def no_short_contexts(num_requests: int) -> tuple[int, ...]:
    """Implement Support.short_contexts for a backend without special kernels for short contexts: return ()."""
    return ()


def all_contexts(num_requests: int, contexts: tuple[int, ...]) -> tuple[int, ...]:
    """Implement Support.contexts_of_drafts if all special kernels serve requests with drafts: return `contexts`."""
    return contexts


@dataclass(frozen=True)
class Support:
    """A backend's support of a case that it accepts.

    A backend may have special kernels for short contexts. A captured graph does not know context lengths, so batches
    with short contexts have graphs of their own.
    """

    graphs: GraphSupport
    records_decodes: bool = False  # on a CPU, the calls for decodes depend only on their number
    # Maps a number of decodes to the context lengths, ascending, up to which special kernels serve them.
    short_contexts: Callable[[int], tuple[int, ...]] = no_short_contexts
    # Maps (number of requests, these lengths) to the lengths up to which special kernels serve requests with drafts.
    contexts_of_drafts: Callable[[int, tuple[int, ...]], tuple[int, ...]] = all_contexts

    @classmethod
    def of_all(cls, supports: Sequence[Support]) -> Support:
        """Return the support of several cases at once: graphs and short contexts that all of `supports` allow.

        Its `contexts_of_drafts` returns the lengths that any of `supports` returns.
        """

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
