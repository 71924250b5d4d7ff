"""What an attention backend is: the protocol that torch, cpp, triton and flash_attn implement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.config import ModelConfig


class GraphSupport(Enum):
    """In which CUDA graphs a backend's kernels may be captured."""

    NEVER = "never"
    UNIFORM_DECODE = "uniform decode"
    ALWAYS = "always"


@dataclass(frozen=True)
class AttentionCase:
    """The facts that decide whether a backend can run a model on a device."""

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None
    soft_cap: float = 0.0
    sinks: bool = False

    @classmethod
    def all_of(cls, model: ModelConfig, block_size: int, device: torch.device) -> tuple[AttentionCase, ...]:
        """One for each shape of heads that the model's layers have, in order; each names its narrowest window."""
        windows = [window for window in model.sliding_windows if window is not None]
        shapes = dict.fromkeys(model.heads_of(layer) for layer in range(model.num_layers))
        return tuple(
            cls(
                device.type,
                model.dtype,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                block_size,
                min(windows, default=None),
                model.attention_soft_cap,
                model.attention_sinks,
            )
            for shape in shapes
        )


class AttentionBackend(Protocol):
    """Stateless; all methods may be called inside a CUDA graph capture that `graph_support` allows.

    A backend that derives from this class need not define `attend_unrotated`, `short_contexts` and `records_decodes`:
    whether, on a CPU, what it calls for decodes follows from their number alone.
    """

    name: str
    graph_support: GraphSupport
    default_block_size: int
    records_decodes: bool = False

    def unsupported(self, case: AttentionCase) -> str | None:
        """Why this backend cannot run the case, naming the field and what is allowed; None when it can."""
        ...

    def work_length(self, num_tokens: int, num_requests: int, case: AttentionCase) -> int:
        """How long `work_W` must be for batches of up to so many tokens and rows; 0 if the backend plans nothing."""
        ...

    def plan(self, inputs: AttentionInputs, case: AttentionCase) -> None:
        """Once a step, when the lengths are on the device: write into `inputs.work_W` what every `attend` reads."""
        ...

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

    def short_contexts(self, case: AttentionCase, num_requests: int) -> tuple[int, ...]:
        """Up to which contexts, ascending, so many decodes have kernels of their own in `attend_unrotated`.

        A captured graph does not know how long contexts are, so such batches have graphs of their own.
        """
        return ()
