"""Causal depthwise convolution over packed sequences, with PyTorch's ops.

A request's last inputs before the step are kept in the convolution's state: the input at position p in slot p mod N.
Shapes: T tokens and R requests of the step, D channels, W weights per channel, S rows of the state, N slots of a row.
"""

from __future__ import annotations

import torch

from compiled_engine.kernels.element_functions import silu
from compiled_engine.recurrence.sequences import Sequences


def convolve_reference(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    factor_TD: torch.Tensor | None,
    gate_TD: torch.Tensor | None,
    state_SDN: torch.Tensor,
    out_TD: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute `recurrence.op.convolve` with PyTorch's ops, on any device. Writes out_TD and updates state_SDN."""
    num_before, num_slots = weight_DW.shape[1] - 1, state_SDN.shape[2]
    if num_slots > num_before:  # there are slots for drafts
        sequences, _ = sequences.joined()
    if factor_TD is not None:
        x_TD = x_TD * factor_TD
    x, weight = x_TD.float(), weight_DW.float()
    request_T, place_T = sequences.places(len(x))
    position_T = sequences.num_before[request_T] + place_T
    before_RDN = state_SDN[sequences.rows_R.clamp(min=0).long()].float()
    y_TD = x * weight[:, num_before]
    for distance in range(1, num_before + 1):
        inside_T1 = (place_T >= distance).unsqueeze(1)
        exists_T1 = (position_T >= distance).unsqueeze(1)
        kept_TD = torch.where(exists_T1, before_RDN[request_T, :, (position_T - distance) % num_slots], 0)
        earlier_TD = torch.where(inside_T1, x.roll(distance, 0), kept_TD)
        y_TD += earlier_TD * weight[:, num_before - distance]
    if bias_D is not None:
        y_TD += bias_D.float()
    y_TD = y_TD.to(out_TD.dtype)
    if activation == "silu":
        y_TD = silu(y_TD) if invariant else torch.nn.functional.silu(y_TD)
    if gate_TD is not None:
        y_TD = y_TD * gate_TD
    out_TD.copy_(torch.where(sequences.real(request_T).unsqueeze(1), y_TD, 0))
    sequences.store(state_SDN, _newest(x_TD, state_SDN, sequences))


def _newest(x_TD: torch.Tensor, state_SDN: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return the new state of each request, [R, D, N]: its last N inputs, this step's included, in their slots."""
    num_slots = state_SDN.shape[2]
    slot_1N = torch.arange(num_slots, device=x_TD.device).unsqueeze(0)
    last_R1 = (sequences.num_before + sequences.lens - 1).unsqueeze(1)
    place_RN = sequences.lens.unsqueeze(1) - 1 - (last_R1 - slot_1N) % num_slots  # of the slot's newest input
    new_RND = x_TD[(sequences.starts.unsqueeze(1) + place_RN).clamp(0, len(x_TD) - 1)]
    kept_RDN = state_SDN[sequences.rows_R.clamp(min=0).long()]
    return torch.where((place_RN >= 0).unsqueeze(1), new_RND.transpose(1, 2).to(state_SDN.dtype), kept_RDN)
