"""Launch of the kernel that norms, rotates, writes and attends for decodes with short contexts, one program a head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.attention.backends.decode_splits import SHORT_CONTEXTS, short_contexts_of
from compiled_engine.attention.backends.triton_tile import scales
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring

# Of these a tile fits the registers and the shared memory; query heads that share a K/V head are rows of a tile.
HEAD_DIMS = (64, 128)
MAX_GROUP = 16


@cache
def short_contexts(
    num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device_type: str
) -> tuple[int, ...]:
    """See short_contexts_of; nothing elsewhere than on Hopper, and for heads that the kernels do not take."""
    if device_type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return ()
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    fits = dtype.itemsize == 2 and head_dim in HEAD_DIMS and num_heads <= MAX_GROUP * num_kv_heads
    return short_contexts_of(num_requests, num_kv_heads, num_sms) if fits else ()


@dataclass(frozen=True)
class ShortTiles:
    """Keys of a tile; warps of a program; stages of a ring that tiles pass through, or 0 where a program holds the keys
    of one; the most registers of a thread, so that more programs share a multiprocessor, or 0 for all."""

    keys: int
    warps: int = 8
    stages: int = 0
    registers: int = 0

    @classmethod
    def of(cls, num_programs: int, num_sms: int, max_seq_len: int) -> ShortTiles:
        """For so many programs, and contexts of up to so many tokens.

        A program that has a multiprocessor to itself asks for all of a few keys at once. Up to four share one: if
        contexts may differ widely, that with the longest must not be slow, so there are two at a time, of more warps.
        Many more of them even each other out, and each waits less for its first keys than for the next program.
        """
        if num_programs <= num_sms:
            return cls(next(context for context in SHORT_CONTEXTS if max_seq_len <= context))
        if num_programs <= 2 * num_sms or (num_programs <= 4 * num_sms and max_seq_len > SHORT_CONTEXTS[-1]):
            return SEVERAL
        return MANY if num_programs <= 8 * num_sms else MOST


# Two, four and five programs share a multiprocessor.
SEVERAL = ShortTiles(64, warps=8, stages=2)
MANY = ShortTiles(32, warps=4, stages=3, registers=128)
MOST = ShortTiles(32, warps=4, stages=2, registers=96)


def short_decode(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    scoring: Scoring,
    tiles: ShortTiles,
) -> None:
    """Launch the kernel for the first num_decodes requests, whose queries are the first num_decodes tokens."""
    # Gluon takes a while to import, and only a Hopper needs it.
    from compiled_engine.attention.backends.short_decode_kernel import short_decode_kernel

    block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape[2:]
    scale_log2, cap_scale = scales(scoring)
    token_strides = [t.stride(0) for t in (q_THd, k_TKd, v_TKd, rotation.cos_T1d, rotation.sin_T1d)]
    short_decode_kernel[(num_kv_heads, num_decodes)](
        q_THd,
        k_TKd,
        v_TKd,
        rotation.q_norm_weight_d,
        rotation.k_norm_weight_d,
        rotation.cos_T1d,
        rotation.sin_T1d,
        kv_cache_N2PKd,
        out_THd,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scale_log2,
        inputs.block_table_RB.stride(0),
        *token_strides,
        out_THd.stride(0),
        STRIDE_MULTIPLE=math.gcd(8, *token_strides),
        Q_HEAD_STRIDE=q_THd.stride(1),
        K_HEAD_STRIDE=k_TKd.stride(1),
        V_HEAD_STRIDE=v_TKd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        OFFSET=rotation.norm_offset,
        WIDE=rotation.norm_wide,
        WINDOW=scoring.sliding_window,
        CAP_SCALE=cap_scale,
        GROUP=q_THd.shape[1] // num_kv_heads,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        KEYS=tiles.keys,
        WARPS=tiles.warps,
        STAGES=tiles.stages,
        maxnreg=tiles.registers or None,
        num_warps=tiles.warps,
        launch_pdl=True,
    )
