"""The attention backend of batch-invariant engines on a CPU.

Every token is computed by the kernel of decodes, whose result depends on the token's context alone. A chunk of a prompt
becomes one decode for each token, over the keys up to the token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.cpp_backend import CppBackend
from compiled_engine.attention.case import AttentionCase, GraphSupport, Support, names_of, require
from compiled_engine.attention.inputs import AttentionInputs, Scoring


class InvariantCppBackend(CppBackend):
    """Attention whose bits for a token depend on its context alone, see the module."""

    name = "invariant_cpp"

    def accept(self, case: AttentionCase) -> Support:
        super().accept(case)
        require(case.dtype == torch.float32, "dtype", case.dtype, names_of([torch.float32]))
        return Support(GraphSupport.NEVER)

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        super().attend(q_THd, kv_cache_N2PKd, out_THd, as_decodes(inputs, q_THd.shape[0]), scoring)


def as_decodes(inputs: AttentionInputs, num_tokens: int) -> AttentionInputs:
    """Return the inputs of a batch in which each token is a decode of its own. Padding tokens have no keys."""
    assert inputs.keys_ahead_T is None  # models with images are refused
    starts_R1, lens_R = inputs.query_start_loc_R1.long(), inputs.seq_lens_R
    query_lens_R = starts_R1.diff()
    num_queries = int(starts_R1[-1])
    row_T = torch.repeat_interleave(torch.arange(len(lens_R)), query_lens_R, output_size=num_queries)
    # A padding row has a query, and no keys.
    first_R = lens_R - query_lens_R - starts_R1[:-1] + 1
    lens_T = lens_R.new_zeros(num_tokens)
    lens_T[:num_queries] = (first_R[row_T] + torch.arange(num_queries)).clamp(min=0).int()
    table_TB = inputs.block_table_RB.new_zeros((num_tokens, inputs.block_table_RB.shape[1]))
    table_TB[:num_queries] = inputs.block_table_RB[row_T]
    host_3 = torch.tensor([num_tokens, 1, int(inputs.host_3[2])], dtype=torch.int32)
    start_T1 = torch.arange(num_tokens + 1, dtype=torch.int32)
    return replace(inputs, query_start_loc_R1=start_T1, seq_lens_R=lens_T, block_table_RB=table_TB, host_3=host_3)


BACKEND: AttentionBackend = InvariantCppBackend()
