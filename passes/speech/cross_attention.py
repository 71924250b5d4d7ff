"""The op of cross-attention: each token of a step attends to all keys of one clip.

The keys and values of several clips follow each other, the same number for each clip. Nothing is masked, and nothing is
written, so steps of any shape call the same op: prompts, decodes, and drafts.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from compiled_engine.passes.framework.op_library import define_op


def reference(
    q_THd: torch.Tensor,
    k_EHd: torch.Tensor,
    v_EHd: torch.Tensor,
    clip_T: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """Return the attention [T, H, d] of each query to the keys of its token's clip, and zeros for a negative clip.

    k_EHd, v_EHd: keys and values of all clips; clip c has rows c * length to (c + 1) * length. clip_T: int32, the clip
    of each token. scale: factor of the products of queries and keys.
    """
    out_THd = torch.zeros_like(q_THd, memory_format=torch.contiguous_format)
    for clip in clip_T.unique().tolist():
        if clip < 0:
            continue
        (own_N,) = (clip_T == clip).nonzero(as_tuple=True)
        rows = slice(clip * length, (clip + 1) * length)
        q_1HNd, k_1HLd, v_1HLd = (
            x.transpose(0, 1).unsqueeze(0) for x in (q_THd[own_N], k_EHd[rows].to(q_THd.dtype), v_EHd[rows])
        )
        result_1HNd = scaled_dot_product_attention(q_1HNd, k_1HLd, v_1HLd, scale=scale)
        out_THd[own_N] = result_1HNd.squeeze(0).transpose(0, 1)
    return out_THd


def launch(
    q_THd: torch.Tensor,
    k_EHd: torch.Tensor,
    v_EHd: torch.Tensor,
    clip_T: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """Return the attention of each query to all keys of its clip, [T, H, d], computed by the kernel.

    k_EHd, v_EHd: keys and values of clips one after the other, `length` of each. clip_T: the clip of each query.
    """
    from compiled_engine.passes.speech.cross_attention_kernel import attend_to_clips  # Triton is optional

    return attend_to_clips(q_THd, k_EHd, v_EHd, clip_T, length, scale)


# Without a reference for Inductor on CPUs: the keys to read depend on the values of clip_T.
cross_attention = define_op(
    "cross_attention(Tensor q_THd, Tensor k_EHd, Tensor v_EHd, Tensor clip_T, int length, float scale) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=lambda q_THd: torch.empty_like(q_THd, memory_format=torch.contiguous_format),
)
