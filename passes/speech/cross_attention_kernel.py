"""The Triton kernel of cross-attention to clips.

A program handles one token and one head, and reads the clip's keys once, with a running softmax as in FlashAttention
(Dao et al., arXiv:2205.14135). Decodes of different requests mostly attend to different clips, so no keys are shared
between their programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

# A program mostly waits for memory, so it reads many keys at a time. Some registers are spilled, which costs less on an
# H200 than more iterations of the loop, or than more warps.
MOST_KEYS, MOST_ELEMENTS, NUM_WARPS = 256, 16384, 4


@quick_launches
@triton.jit(do_not_specialize=["scale", "q_token_stride", "q_head_stride"])
def cross_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    clip_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    LENGTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the attention of one query to the LENGTH keys of its token's clip; zeros for a negative clip.

    Program (token, head). q_ptr, out_ptr: [T, NUM_HEADS, HEAD_DIM]; k_ptr, v_ptr: [clips * LENGTH, NUM_HEADS,
    HEAD_DIM]; clip_ptr: int32 [T]. All are contiguous, except that q may have any strides between tokens and between
    heads. BLOCK_D: HEAD_DIM rounded up to a power of two. BLOCK_L: keys read at a time.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1)
    d_D = tl.arange(0, BLOCK_D)
    inside_D = d_D < HEAD_DIM
    own = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    clip = tl.load(clip_ptr + token)
    q_own = token.to(tl.int64) * q_token_stride + head * q_head_stride
    q_D = tl.load(q_ptr + q_own + d_D, inside_D, other=0.0).to(tl.float32) * scale
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    length = tl.where(clip < 0, 0, LENGTH)
    for start in range(0, length, BLOCK_L):
        key_L = start + tl.arange(0, BLOCK_L)
        inside_L = key_L < LENGTH
        row_L = ((clip.to(tl.int64) * LENGTH + key_L) * NUM_HEADS + head) * HEAD_DIM
        inside_LD = inside_L[:, None] & inside_D[None, :]
        k_LD = tl.load(k_ptr + row_L[:, None] + d_D[None, :], inside_LD, other=0.0).to(tl.float32)
        v_LD = tl.load(v_ptr + row_L[:, None] + d_D[None, :], inside_LD, other=0.0).to(tl.float32)
        score_L = tl.where(inside_L, tl.sum(k_LD * q_D[None, :], 1), float("-inf"))
        new = tl.maximum(largest, tl.max(score_L, 0))
        shrink = tl.exp(largest - new)
        weight_L = tl.exp(score_L - new)
        sum_D = sum_D * shrink + tl.sum(weight_L[:, None] * v_LD, 0)
        total = total * shrink + tl.sum(weight_L, 0)
        largest = new
    out_D = tl.where(total > 0, sum_D / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(out_ptr + own + d_D, out_D.to(out_ptr.dtype.element_ty), inside_D)


def keys_at_a_time(block_d: int) -> int:
    return min(MOST_KEYS, MOST_ELEMENTS // block_d)


def attend_to_clips(
    q_THd: torch.Tensor,
    k_EHd: torch.Tensor,
    v_EHd: torch.Tensor,
    clip_T: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """Return the attention of each query to its clip's keys, by the kernel; see cross_attention.reference.

    Keys and values must be contiguous.
    """
    if q_THd.stride(-1) != 1:
        q_THd = q_THd.contiguous()
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    num_tokens, num_heads, head_dim = q_THd.shape
    block_d = next_power_of_2(head_dim)
    cross_attention_kernel[(num_tokens, num_heads)](
        q_THd,
        k_EHd,
        v_EHd,
        clip_T,
        out_THd,
        scale,
        q_THd.stride(0),
        q_THd.stride(1),
        LENGTH=length,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_L=keys_at_a_time(block_d),
        num_warps=NUM_WARPS,
        **dependent_launch(q_THd.device),
    )
    return out_THd
