"""What attention has to know about a batch, as explicit tensors.

Shape suffixes used in tensor names throughout the project: T tokens in the step, R requests (rows) in the step,
B blocks a request may own, H query heads, K key/value heads, d head size, D hidden size, V vocabulary size,
N blocks in the pool, P slots in a block (the block size).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class AttentionInputs:
    """One batch, decodes first.

    query_start_loc_R1: int32 [R+1], where each request's tokens start; the last entry is T.
    seq_lens_R: int32 [R], tokens in the KV cache once this step's are written; 0 for a padding row, which reads
        nothing and whose output is zeros.
    block_table_RB: int32 [R, B], block numbers of each request, in order; entries past the end are 0.
    slot_mapping_T: int64 [T], block * block_size + offset where each token's K and V go; -1 writes nothing.
    host_3: int32 [3] on the CPU: how many leading requests have exactly one query token, the longest query, and
        an upper bound of seq_lens_R. Whatever a captured kernel used of these is part of its GraphKey.
    backend: name of the attention backend.
    work_W: int32 [W], what the backend's `plan` wrote for this batch. Empty if nobody planned: a backend that wants a
        plan then makes one at each call.
    """

    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RB: torch.Tensor
    slot_mapping_T: torch.Tensor
    host_3: torch.Tensor
    backend: str
    work_W: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32, device="cpu"))

    def flat(self) -> tuple[Any, ...]:
        """The fields in their order: the last arguments of both attention ops."""
        return tuple([getattr(self, name) for name in FIELDS])


FIELDS = tuple(field.name for field in fields(AttentionInputs))


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    scale: of the products. sliding_window: how many keys a query sees, itself included; 0 means all. soft_cap: scores
    are soft_cap * tanh(score / soft_cap) (Gemma 2); 0 means none. sinks_H: for each query head the score of a further
    key without a value (GPT-OSS), any float dtype.
    """

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks_H: torch.Tensor | None = None


class Rotation(NamedTuple):
    """What is left to do to q and k before attention: a norm where there are weights, and the rotation.

    cos_T1d, sin_T1d: of each token's position. norm_offset is added to the weights; norm_wide: the norm is rounded
    after its weight alone. rotary_dim, interleaved, wide and norm_last: other forms, see RopeForm.
    """

    q_norm_weight_d: torch.Tensor | None
    k_norm_weight_d: torch.Tensor | None
    eps: float
    cos_T1d: torch.Tensor
    sin_T1d: torch.Tensor
    norm_offset: float = 0.0
    norm_wide: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    wide: bool = False
    norm_last: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether whole heads are rotated, after their norm, elements half a head apart, in their own dtype."""
        return not (self.rotary_dim or self.interleaved or self.wide or self.norm_last)


def inputs_of(arguments: tuple[Any, ...]) -> AttentionInputs:
    """From the arguments of an attention op."""
    return AttentionInputs(*arguments[-len(FIELDS) :])


def without_inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention op before those that `inputs_of` reads."""
    return arguments[: -len(FIELDS)]
