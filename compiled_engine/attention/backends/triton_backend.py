"""The attention backend that launches the engine's own Triton and Gluon kernels, the default on CUDA."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import triton

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.coded_decode import CodedPlan, coded_decode
from compiled_engine.attention.backends.decode_splits import BatchFacts, Splits, contexts_of_drafts
from compiled_engine.attention.backends.decoded_contexts import (
    FEWEST_TOKENS,
    DecodedContexts,
    decode_contexts,
    prefill_sources,
)
from compiled_engine.attention.backends.hopper_prefill import hopper_prefill, on_hopper
from compiled_engine.attention.backends.kernel_arguments import NewKeys
from compiled_engine.attention.backends.kernel_choice import (
    ROTATING,
    Kernel,
    LayerFacts,
    Plan,
    choice_of,
    has_large_tiles,
    layer_facts,
    num_multiprocessors,
)
from compiled_engine.attention.backends.latent_step import attend_latents
from compiled_engine.attention.backends.short_decode import ShortTiles, short_decode
from compiled_engine.attention.backends.short_drafts import fits_one_tile, short_drafts
from compiled_engine.attention.backends.triton_decode import decode
from compiled_engine.attention.backends.triton_latent_rows import write_latents
from compiled_engine.attention.backends.triton_latents import require_sizes
from compiled_engine.attention.backends.triton_listed_decode import listed_decode
from compiled_engine.attention.backends.triton_packed import attend_packed
from compiled_engine.attention.backends.triton_prefill import (
    KeySplits,
    PrefillTiles,
    fewest_rows,
    prefill,
    prefill_tiles,
)
from compiled_engine.attention.backends.triton_rope_decode import rope_decode
from compiled_engine.attention.backends.triton_write_kv import write_kv
from compiled_engine.attention.backends.wide_tiles import is_wide, most_rows
from compiled_engine.attention.backends.work_list import WorkLayout, write_lists
from compiled_engine.attention.case import AttentionCase, GraphSupport, KVFormat, Support, names_of, require
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.kv_codes import kernels_convert
from compiled_engine.kernels.launch_arguments import dependent_launch, require_dense
from compiled_engine.kv_format import is_coded

# Shared memory of a thread block in bytes for which all kernels have tiles; on Hopper, some have larger ones.
MIN_SHARED_MEMORY = 96 << 10
BLOCK_SIZE_MULTIPLE = 16
HEAD_DIM_MULTIPLE = 8
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 576
MAX_GROUP = 32
DTYPES_INTERPRETED = (torch.float16, torch.float32)
DTYPES = (torch.bfloat16, *DTYPES_INTERPRETED)


class TritonBackend:
    """Attention by the engine's own kernels. KV blocks have multiples of 16 tokens, heads multiples of 8 elements.

    kernel_choice.py chooses the kernel of each batch. A batch with prompts has separate kernels for its decodes and its
    prompts, because a tile of 16 rows needs fewer registers than a tile of 128. Heads have 16 to 576 elements. Launches
    depend only on tensor shapes and on AttentionInputs.host_3, and kernels read everything else from the device, so a
    CUDA graph can capture every batch.
    """

    name = "triton"
    default_block_size = 16

    def accept(self, case: AttentionCase) -> Support:
        require(case.device == "cuda" or triton.knobs.runtime.interpret, "device", case.device, "cuda")
        if torch.cuda.is_available():
            device = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
            memory, least = device["max_shared_mem"], f"from {MIN_SHARED_MEMORY} bytes on"
            require(memory >= MIN_SHARED_MEMORY, "the GPU's shared memory of a block", memory, least)
        if case.latent_dim:
            cache: KVFormat | None = case.require_latent()
            require_sizes(case)
        else:
            cache = None if case.packed else case.require_paged()
        if cache is not None and torch.cuda.is_available():
            converts = kernels_convert(cache.dtype, torch.device("cuda", torch.cuda.current_device()))
            require(converts, "kv_cache_dtype", cache.dtype, "others below compute capability 8.9")
        # Triton's interpreter multiplies matrices of bfloat16 wrongly.
        dtypes = DTYPES if case.device == "cuda" else DTYPES_INTERPRETED
        require(case.dtype in dtypes, "dtype", case.dtype, names_of(dtypes))
        if cache is not None:
            blocks = f"multiples of {BLOCK_SIZE_MULTIPLE}"
            require(cache.block_size % BLOCK_SIZE_MULTIPLE == 0, "block_size", cache.block_size, blocks)
        if case.latent_dim:
            return Support(GraphSupport.ALWAYS)
        head_dims = f"multiples of {HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        fits = case.head_dim % HEAD_DIM_MULTIPLE == 0 and MIN_HEAD_DIM <= case.head_dim <= MAX_HEAD_DIM
        require(fits, "head_dim", case.head_dim, head_dims)
        most = most_rows(case.dtype.itemsize) if is_wide(case.head_dim) else MAX_GROUP
        groups = f"up to {most} times num_kv_heads {case.num_kv_heads}"
        require(case.group <= most, "num_heads", case.num_heads, groups)
        if cache is None:
            case.require_packed()
            return Support(GraphSupport.ALWAYS)
        device = torch.device(case.device)
        layer = layer_facts(case.num_heads, case.num_kv_heads, case.head_dim, case.dtype, cache.dtype, device)
        in_one_tile = not is_coded(cache.dtype) and fits_one_tile(2, case.group)
        return Support(
            GraphSupport.ALWAYS,
            short_contexts=layer.short_contexts,
            contexts_of_drafts=partial(contexts_of_drafts, in_one_tile=in_one_tile),
        )

    def work_length(self, num_tokens: int, num_requests: int, case: AttentionCase) -> int:
        if case.packed or case.latent_dim:
            return 0
        large = has_large_tiles(torch.device(case.device))
        queries = fewest_rows(case.head_dim, case.dtype.itemsize, large) // case.group
        return WorkLayout(num_requests, case.num_kv_heads, queries).length(num_tokens)

    def plan(self, inputs: AttentionInputs, case: AttentionCase) -> None:
        if case.packed or case.latent_dim:
            return
        batch = BatchFacts.of(inputs.sizes, case.num_kv_heads, num_multiprocessors(inputs.seq_lens_R.device))
        if batch.listed:
            heads = case.num_heads, case.num_kv_heads, case.head_dim
            facts = case.dtype.itemsize, has_large_tiles(inputs.seq_lens_R.device)
            _, layout = _listed_work(batch.num_requests, batch.max_seq_len, *heads, *facts)
            write_lists(inputs, inputs.work_W, layout, batch.min_keys)

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        require_dense(kv_cache_N2PKd, k_TKd=k_TKd, v_TKd=v_TKd)
        early = dependent_launch(k_TKd.device)["DEPENDENT_LAUNCH"]
        write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K, early)

    def write_latents(
        self, row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor, latent_dim: int
    ) -> None:
        require_dense(cache_N1P1w, row_T1w=row_T1w)
        write_latents(row_T1w, cache_N1P1w, slot_mapping_T, latent_dim)

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        require_dense(kv_cache_N2PKd, q_THd=q_THd, out_THd=out_THd)
        layer, batch, plan = choice_of(q_THd, kv_cache_N2PKd, inputs, scoring.sliding_window)
        match plan:
            case Plan(Kernel.LISTED_DECODE):
                _attend_listed(q_THd, kv_cache_N2PKd, out_THd, inputs, scoring, batch, layer)
            case Plan(Kernel.CODED_DECODE, CodedPlan() as coded):
                coded_decode(q_THd, None, kv_cache_N2PKd, out_THd, inputs, batch.num_requests, coded, scoring)
            case Plan(Kernel.DECODE, Splits() as splits):
                decode(q_THd, kv_cache_N2PKd, out_THd, inputs, batch.query_len, splits, scoring)

    def attend_latents(
        self,
        q_THd: torch.Tensor,
        weight_Cr: torch.Tensor,
        cache_N1P1w: torch.Tensor,
        out_THv: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> None:
        require_dense(cache_N1P1w, q_THd=q_THd, weight_Cr=weight_Cr, out_THv=out_THv)
        attend_latents(q_THd, weight_Cr, cache_N1P1w, out_THv, inputs, scale)

    def attend_packed(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
        biases_HW: torch.Tensor | None = None,
    ) -> None:
        attend_packed(q_THd, k_TKd, v_TKd, out_THd, inputs, scoring, biases_HW)

    def attend_unrotated(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        rotation: Rotation,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> bool:
        """Implement AttentionBackend.attend_unrotated: for decodes with a plain rotation, if one kernel is faster."""
        if not rotation.is_plain or rotation.cos_T1d.shape[-1] != q_THd.shape[-1]:
            return False
        _, batch, plan = choice_of(q_THd, kv_cache_N2PKd, inputs, scoring.sliding_window, unrotated=True)
        if plan.kernel not in ROTATING:
            return False
        angles = {"cos_T1d": rotation.cos_T1d, "sin_T1d": rotation.sin_T1d}
        require_dense(kv_cache_N2PKd, q_THd=q_THd, k_TKd=k_TKd, v_TKd=v_TKd, out_THd=out_THd, **angles)
        operands = q_THd, k_TKd, v_TKd, rotation, kv_cache_N2PKd, out_THd
        match plan:
            case Plan(Kernel.SHORT_DECODE, ShortTiles() as tiles):
                short_decode(*operands, inputs, batch.num_requests, scoring, tiles)
            case Plan(Kernel.SHORT_DRAFTS, ShortTiles() as tiles):
                short_drafts(*operands, inputs, batch.query_len, scoring, tiles)
            case Plan(Kernel.ROPE_DECODE, Splits() as splits):
                rope_decode(*operands, inputs, batch.num_requests, splits, scoring)
            case Plan(Kernel.CODED_DECODE, CodedPlan() as coded):
                new = NewKeys(k_TKd, v_TKd, rotation)
                coded_decode(q_THd, new, kv_cache_N2PKd, out_THd, inputs, batch.num_requests, coded, scoring)
        return True


@lru_cache(maxsize=64)
def _listed_work(
    num_requests: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    large: bool,
) -> tuple[PrefillTiles, WorkLayout]:
    """Return the prefill tiles for a batch with a work list, and the layout of that list."""
    tiles = prefill_tiles(head_dim, element_size, max_seq_len, large)
    return tiles, WorkLayout(num_requests, num_kv_heads, tiles.rows // (num_heads // num_kv_heads))


def _attend_listed(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    scoring: Scoring,
    batch: BatchFacts,
    layer: LayerFacts,
) -> None:
    """Launch the kernels that take their work from the work list: for decodes, then for prompts if there are any."""
    num_sms, heads = layer.num_sms, (layer.num_heads, layer.num_kv_heads, q_THd.shape[2])
    facts = q_THd.element_size(), has_large_tiles(q_THd.device)
    tiles, layout = _listed_work(batch.num_requests, batch.max_seq_len, *heads, *facts)
    work_W = inputs.work_W
    if not work_W.numel():
        work_W = q_THd.new_empty(layout.length(batch.num_tokens), dtype=torch.int32)
        write_lists(inputs, work_W, layout, batch.min_keys)
    has_prompts = batch.num_requests > batch.num_decodes
    decoded: DecodedContexts | None = None
    if has_prompts and is_coded(kv_cache_N2PKd.dtype) and batch.num_tokens >= FEWEST_TOKENS:
        # Before the decodes: prefill kernels start when all that came before these has ended.
        decoded = decode_contexts(q_THd, kv_cache_N2PKd, inputs, work_W, batch, scoring)
    splits = None
    if has_prompts and decoded is None:  # before the partial results of decodes, which run at the same time
        splits = KeySplits.of(out_THd, layout, tiles, num_sms, batch.max_seq_len)
    listed_decode(q_THd, kv_cache_N2PKd, out_THd, inputs, work_W, layout, batch.min_keys, num_sms, scoring)
    if not has_prompts:
        return
    for cache_N2PKd, step, how, num_tiles in prefill_sources(decoded, kv_cache_N2PKd, inputs, scoring):
        if step.keys_ahead_T is None and on_hopper(q_THd, cache_N2PKd, tiles.rows, how):
            hopper_prefill(q_THd, cache_N2PKd, out_THd, step, work_W, layout, num_sms, how, num_tiles)
        else:
            prefill(q_THd, cache_N2PKd, out_THd, step, work_W, layout, tiles, num_sms, how, num_tiles, splits)


BACKEND: AttentionBackend = TritonBackend()
