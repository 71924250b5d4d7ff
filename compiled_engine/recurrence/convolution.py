"""Causal depthwise convolution over packed sequences, with PyTorch's ops.

A request's last inputs before the step are kept in the convolution's state. Shapes: T tokens and R requests of the
step, D channels, W weights per channel, S rows of the state, L = W - 1 inputs in a row.
"""

from __future__ import annotations

import torch

from compiled_engine.recurrence.sequences import Sequences


def convolve_reference(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    factor_TD: torch.Tensor | None,
    gate_TD: torch.Tensor | None,
    state_SDL: torch.Tensor,
    out_TD: torch.Tensor,
    sequences: Sequences,
) -> None:
    """Compute `recurrence.op.convolve` with PyTorch's ops, on any device. Writes out_TD and updates state_SDL."""
    if factor_TD is not None:
        x_TD = x_TD * factor_TD
    num_before = weight_DW.shape[1] - 1
    x, weight = x_TD.float(), weight_DW.float()
    request_T, place_T = sequences.places(len(x))
    before_RDL = sequences.states(state_SDL).float()
    y_TD = x * weight[:, num_before]
    for distance in range(1, num_before + 1):
        inside_T1 = (place_T >= distance).unsqueeze(1)
        # The state's slot, for tokens that precede this step's.
        slot_T = (num_before + place_T - distance).clamp(max=num_before - 1)
        earlier_TD = torch.where(inside_T1, x.roll(distance, 0), before_RDL[request_T, :, slot_T])
        y_TD += earlier_TD * weight[:, num_before - distance]
    if bias_D is not None:
        y_TD += bias_D.float()
    y_TD = y_TD.to(out_TD.dtype)
    if activation == "silu":
        y_TD = torch.nn.functional.silu(y_TD)
    if gate_TD is not None:
        y_TD = y_TD * gate_TD
    out_TD.copy_(torch.where(sequences.real(request_T).unsqueeze(1), y_TD, 0))
    sequences.store(state_SDL, _newest(x_TD, state_SDL, sequences))


def _newest(x_TD: torch.Tensor, state_SDL: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return the last L inputs of each request including this step's, oldest first, [R, D, L]: its new state."""
    length = state_SDL.shape[2]
    before_RDL = sequences.states(state_SDL)
    starts_R1, lens_R1 = sequences.starts.unsqueeze(1), sequences.lens.unsqueeze(1)
    slot_1L = torch.arange(length, device=x_TD.device).unsqueeze(0)
    place_RL = lens_R1 - length + slot_1L
    new_RLD = x_TD[(starts_R1 + place_RL).clamp(0, len(x_TD) - 1)]
    kept_RDL = before_RDL.gather(2, (lens_R1 + slot_1L).clamp(max=length - 1).unsqueeze(1).expand_as(before_RDL))
    return torch.where((place_RL >= 0).unsqueeze(1), new_RLD.transpose(1, 2).to(state_SDL.dtype), kept_RDL)
