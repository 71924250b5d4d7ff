"""Chooses the attention kernel for a batch whose queries are rotated already, or for one whose queries are not.

docs/architecture.md, "Attention kernels", shows the choice as a table.
"""

from __future__ import annotations

from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from compiled_engine.attention.backends.coded_decode import CodedPlan, coded_plan
from compiled_engine.attention.backends.decode_splits import (
    BatchFacts,
    Splits,
    few_short_contexts,
    one_kernel_pays,
    plan_splits,
    short_contexts_of,
    short_splits,
)
from compiled_engine.attention.backends.short_decode import ShortTiles, exists_on_hopper
from compiled_engine.attention.backends.short_drafts import fits_one_tile, tiles_of_drafts
from compiled_engine.attention.backends.wide_tiles import is_wide
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.kernels.launch_arguments import is_hopper
from compiled_engine.kv_format import has_scales, is_coded


class Kernel(Enum):
    """The attention kernels for decodes, by the names of the functions that launch them.

    The kernels in ROTATING can also norm and rotate q and k, and write k and v.
    """

    SHORT_DECODE = "short_decode"
    SHORT_DRAFTS = "short_drafts"
    ROPE_DECODE = "rope_decode"
    CODED_DECODE = "coded_decode"
    DECODE = "decode"
    LISTED_DECODE = "listed_decode"


ROTATING = frozenset({Kernel.SHORT_DECODE, Kernel.SHORT_DRAFTS, Kernel.ROPE_DECODE, Kernel.CODED_DECODE})


class Plan(NamedTuple):
    """A kernel, and how its programs split or tile keys. For prompts, a prefill kernel follows LISTED_DECODE."""

    kernel: Kernel
    division: Splits | CodedPlan | ShortTiles | None = None  # None for LISTED_DECODE: splits are in the work list


class LayerFacts(NamedTuple):
    """The properties of a layer and its device that the choice of its kernels depends on."""

    num_heads: int
    num_kv_heads: int
    cache_dtype: torch.dtype
    num_sms: int
    on_hopper: bool  # Hopper's decode kernels exist for these heads
    on_gpu: bool = True  # not Triton's interpreter
    wide: bool = False  # heads of a size for which no kernel of ROTATING exists

    def short_contexts(self, num_requests: int) -> tuple[int, ...]:
        """Return the context lengths, ascending, up to which special kernels serve num_requests decodes.

        () if the layer has no such kernels. See short_contexts_of and few_short_contexts.
        """
        if self.on_hopper:
            return short_contexts_of(num_requests, self.num_kv_heads, self.num_sms)
        if self.on_gpu and is_coded(self.cache_dtype) and not self.wide:
            return few_short_contexts(num_requests, self.num_kv_heads, self.num_sms)
        return ()


@cache
def layer_facts(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> LayerFacts:
    """Return the facts of a layer. dtype: the dtype of queries."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    on_hopper = on_gpu and exists_on_hopper(num_heads, num_kv_heads, head_dim, dtype)
    num_sms = num_multiprocessors(device)
    return LayerFacts(num_heads, num_kv_heads, cache_dtype, num_sms, on_hopper, on_gpu, is_wide(head_dim))


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 16 for Triton's interpreter, or without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_large_tiles(device: torch.device) -> bool:
    """Return whether prompts have tiles that need Hopper's shared memory and instructions; False without a GPU."""
    return torch.cuda.is_available() and is_hopper(device)


class Choice(NamedTuple):
    """A layer's kernel plan for a batch, and the facts from which `choose` chose the plan."""

    layer: LayerFacts
    batch: BatchFacts
    plan: Plan


def choice_of(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    sliding_window: int,
    *,
    unrotated: bool = False,
) -> Choice:
    """Return the kernel plan that `choose` chooses for the arguments of a layer's attention, with its facts."""
    _, num_heads, head_dim = q_THd.shape
    num_kv_heads = kv_cache_N2PKd.shape[3]
    layer = layer_facts(num_heads, num_kv_heads, head_dim, q_THd.dtype, kv_cache_N2PKd.dtype, q_THd.device)
    return _choice(inputs.sizes, layer, sliding_window, unrotated)


# Choosing takes the host longer than a look-up in the cache, and the layers of a step need few different choices.
@lru_cache(maxsize=64)
def _choice(sizes: tuple[int, ...], layer: LayerFacts, sliding_window: int, unrotated: bool) -> Choice:
    batch = BatchFacts.of(sizes, layer.num_kv_heads, layer.num_sms)
    return Choice(layer, batch, choose(batch, layer, sliding_window, unrotated=unrotated))


def choose(batch: BatchFacts, layer: LayerFacts, sliding_window: int, *, unrotated: bool = False) -> Plan:
    """Return the kernel plan for a batch. The plan depends only on the key of a CUDA graph and on the device.

    sliding_window: see Scoring. unrotated: q and k are not rotated yet; if the chosen kernel is not in ROTATING, they
    must be rotated by a separate kernel first.
    """
    if batch.num_decodes < batch.num_requests:
        return Plan(Kernel.LISTED_DECODE)
    num_requests, bound = batch.num_requests // batch.query_len, batch.max_seq_len
    num_programs = num_requests * layer.num_kv_heads
    num_keys = min(bound, (sliding_window or bound) + batch.query_len - 1)
    coded = is_coded(layer.cache_dtype)
    if coded and layer.on_hopper and batch.query_len == 1:
        scaled = has_scales(layer.cache_dtype)
        plan = coded_plan(num_requests, layer.num_kv_heads, num_keys, layer.num_sms, scaled)
        return Plan(Kernel.CODED_DECODE, plan)
    splits = plan_splits(num_requests, layer.num_kv_heads, num_keys, layer.num_sms)
    if batch.query_len > 1:
        contexts = layer.short_contexts(num_requests)
        if unrotated and not coded and num_programs <= layer.num_sms:
            tiles = tiles_of_drafts(bound, contexts)
            if tiles is not None and fits_one_tile(batch.query_len, layer.num_heads // layer.num_kv_heads):
                return Plan(Kernel.SHORT_DRAFTS, tiles)
        return Plan(Kernel.DECODE, short_splits(num_requests, bound, contexts) or splits)
    if unrotated and not layer.wide:
        short = short_splits(num_requests, bound, layer.short_contexts(num_requests))
        whole = short is not None and short.count == 1
        if whole and not coded:
            return Plan(Kernel.SHORT_DECODE, ShortTiles.of(num_programs, layer.num_sms, bound))
        if whole or (not batch.listed and one_kernel_pays(short or splits, bound)):
            return Plan(Kernel.ROPE_DECODE, short or splits)
    return Plan(Kernel.LISTED_DECODE) if batch.listed else Plan(Kernel.DECODE, splits)
