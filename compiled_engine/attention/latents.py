"""Sizes of latent attention, the products with its weight, and the choice between its two ways to compute a request.

A token's row in the KV cache has a latent c of r elements and a rotated part p that all heads share. The weight of head
h maps a latent to the head's key, W_h c, and to its value, V_h c; a query (q, s) has the score q W_h c + s p.

Absorbed: the weight multiplies queries and results. A query (q W_h, s) attends to rows, and V_h maps the weighted sum
of latents to the result (DeepSeek-AI 2024, DeepSeek-V2). No key or value is computed, but a pair of a query and a row
takes r + p multiplications for its score and r for the sum.

Expanded: the keys and values of the whole context are computed first. That takes r multiplications for each of their
elements, which have to be made up for by shorter heads: a pair takes fewer multiplications by 2 r less the elements
that the weight gives a key and a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.kv_format import head_dim_of

# Keys and values are expanded for as many heads at a time as this memory holds, on each rank.
MOST_EXPANDED_BYTES = 512 << 20


class LatentHeads(NamedTuple):
    """Sizes of latent attention, in elements. A key has own + rotated elements, a row latent + rotated."""

    num_heads: int
    own: int  # of a head's key, computed from the latent
    rotated: int  # of a key, the same for all heads
    latent: int
    value: int  # of a head's value

    @classmethod
    def of(cls, q_THd: torch.Tensor, weight_Cr: torch.Tensor, width: int) -> LatentHeads:
        """Return the sizes of queries and of the weight that expands rows, for rows of `width` elements."""
        _, num_heads, key_dim = q_THd.shape
        latent = weight_Cr.shape[1]
        own = key_dim - (width - latent)
        return cls(num_heads, own, width - latent, latent, weight_Cr.shape[0] // num_heads - own)

    @classmethod
    def of_cache(cls, q_THd: torch.Tensor, weight_Cr: torch.Tensor, cache_N1P1w: torch.Tensor) -> LatentHeads:
        """Return the sizes of queries and of the weight that expands the rows of a cache."""
        return cls.of(q_THd, weight_Cr, head_dim_of(cache_N1P1w, weight_Cr.shape[1]))

    @property
    def key(self) -> int:
        return self.own + self.rotated

    @property
    def crossover(self) -> float:
        """Number of queries from which on expanding a long cached context takes fewer multiplications; see expands.

        171 for DeepSeek-V3, 398 for GLM-4.7-Flash; infinite if expanding saves nothing.
        """
        saved = 2 * self.latent - self.own - self.value
        return self.latent * (self.own + self.value) / saved if saved > 0 else float("inf")


def expands(query_len: int, seq_len: int, crossover: float) -> bool:
    """Return whether expanded attention takes fewer multiplications than absorbed attention, for one request.

    query_len: queries, the last tokens of the context. seq_len: tokens of the context. crossover: see LatentHeads.

    Both ways multiply the weight with each query or token: the context less the queries is what expanding multiplies
    more. A query sees the context up to itself, so there are query_len * (seq_len - query_len / 2) pairs.
    """
    return (seq_len - query_len) * crossover < query_len * (seq_len - query_len * 0.5)


def key_weights(weight_Cr: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
    """Return the part [H, own, r] of the weight that maps latents to the heads' keys."""
    return weight_Cr.view(heads.num_heads, -1, heads.latent)[:, : heads.own]


def value_weights(weight_Cr: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
    """Return the part [H, v, r] of the weight that maps latents to the heads' values."""
    return weight_Cr.view(heads.num_heads, -1, heads.latent)[:, heads.own :]


def queries_of_latents(q_THd: torch.Tensor, weight_Cr: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
    """Return queries [T, H, r] whose products with latents equal those of q with the keys, without the rotated part."""
    queries_THr = q_THd.new_empty(q_THd.shape[0], heads.num_heads, heads.latent)
    own_HTn = q_THd[..., : heads.own].transpose(0, 1)
    torch.bmm(own_HTn, key_weights(weight_Cr, heads), out=queries_THr.transpose(0, 1))
    return queries_THr


def write_values(latents_THr: torch.Tensor, weight_Cr: torch.Tensor, heads: LatentHeads, out_THv: torch.Tensor) -> None:
    """Write to out_THv the values that each head computes from its latents [T, H, r]."""
    to_values_Hrv = value_weights(weight_Cr, heads).transpose(1, 2)
    torch.bmm(latents_THr.transpose(0, 1), to_values_Hrv, out=out_THv.transpose(0, 1))
