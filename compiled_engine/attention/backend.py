"""The protocol of attention backends, which torch, cpp, triton and flash_attn implement."""

from __future__ import annotations

from typing import Protocol

import torch

from compiled_engine.attention.case import AttentionCase, Support
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring


class AttentionBackend(Protocol):
    """Stateless; all methods may be called inside a CUDA graph capture that `accept` allows.

    A backend that derives from this class plans nothing and has no kernels for unrotated queries unless it says so.
    """

    name: str
    default_block_size: int

    def accept(self, case: AttentionCase) -> Support:
        """Return what the backend offers for the case. Raises Refused where it cannot run it here."""
        ...

    def work_length(self, num_tokens: int, num_requests: int, case: AttentionCase) -> int:
        """Return the length of `work_W` for batches of up to so many tokens and rows; 0 if nothing is planned."""
        return 0

    def plan(self, inputs: AttentionInputs, case: AttentionCase) -> None:
        """Write into `inputs.work_W` what every `attend` of a step reads, once its lengths are on the device."""
        return

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        """Store K (index 0 of dim 1) and V (index 1) at each token's slot; slot -1 stores nothing."""
        ...

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        """Causal attention over the cache into `out_THd` (every element written).

        There may be more tokens in q and out than the requests have: padding, whose output nobody reads.
        """
        ...

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
        """Norm and rotate q and k, store k and v, and attend, all in one, if there is a kernel that does so for the
        batch. Otherwise False, with nothing done.

        The slot of a request with one query is that of its last position, or -1.
        """
        return False
