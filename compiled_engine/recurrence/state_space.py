"""Scan of a state space model, Mamba 2 (Dao and Gu, 2024), over packed sequences, with PyTorch's ops.

A head's state S [k, v] has a column for each element v of the head. For each token, with a step size dt > 0, S is
multiplied by exp(dt * A), S += B^T (dt * x), and the token's result is C S + D * x. In the words of matrix_states.py, C
is a query, B a key and dt * x the value.

Shapes: those of matrix_states.py, and G groups of heads that share B and C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from compiled_engine.kernels.element_functions import softplus
from compiled_engine.recurrence.matrix_states import Drafted, TokenValues, apply_to_step, read, written
from compiled_engine.recurrence.sequences import Sequences


def scan_reference(
    x_THv: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGk: torch.Tensor,
    C_TGk: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    least_dt: float,
    most_dt: float | None,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    out_THv: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute `recurrence.op.scan` with PyTorch's ops, on any device.

    Writes out_THv, and updates state_SHkv and `drafted`.
    """
    grown = softplus if invariant else functional.softplus
    dt_TH = grown(dt_TH.float() + dt_bias_H.float()).clamp(least_dt, most_dt)
    x_THv, num_heads = x_THv.float(), x_THv.shape[1]
    B_THk, C_THk = (x.float().repeat_interleave(num_heads // x.shape[1], 1) for x in (B_TGk, C_TGk))
    skipped_THv = x_THv * D_H.float().unsqueeze(-1)
    values = TokenValues(C_THk, B_THk, x_THv * dt_TH.unsqueeze(-1), (dt_TH * A_H.float()).unsqueeze(-1), skipped_THv)
    apply_to_step(_StateSpace(invariant), values, state_SHkv, drafted, out_THv, sequences, invariant)


@dataclass(frozen=True)
class _StateSpace:
    """The scan of Mamba 2, as a Rule of matrix_states.py. `TokenValues.other` is D * x, [T, H, v].

    invariant: see `read`.
    """

    invariant: bool

    def one_token(
        self, state_RHkv: torch.Tensor, values_R: TokenValues
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_RHk, k_RHk, v_RHv, g_RH1, skipped_RHv = values_R
        state_RHkv = written(state_RHkv * g_RH1.exp().unsqueeze(-1), k_RHk, v_RHv)
        return read(state_RHkv, q_RHk, self.invariant) + skipped_RHv, state_RHkv, v_RHv

    def chunk(self, state_Hkv: torch.Tensor, values_C: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
        q_HCk, k_HCk, v_HCv, g_HC1, skipped_HCv = (x.transpose(0, 1) for x in values_C)
        g_HC = g_HC1.squeeze(-1).cumsum(-1)
        decay_HCC = (g_HC.unsqueeze(-1) - g_HC.unsqueeze(-2)).tril().exp().tril()
        grown_HC1, left_HC1 = g_HC.exp().unsqueeze(-1), (g_HC[:, -1:] - g_HC).exp().unsqueeze(-1)
        y_HCv = grown_HC1 * (q_HCk @ state_Hkv) + (q_HCk @ k_HCk.mT * decay_HCC) @ v_HCv + skipped_HCv
        state_Hkv = state_Hkv * grown_HC1[:, -1:] + (k_HCk * left_HC1).mT @ v_HCv
        return y_HCv.transpose(0, 1), state_Hkv
