"""Gated delta rule (Yang et al., 2024, Gated Delta Networks) over packed sequences, with PyTorch's ops.

A head's state S [k, v] maps keys to values. For each token, S is multiplied by exp(g), a value is written under the
token's key, S += key^T (beta * (value - key S)), and the token's result is query S. In Kimi delta attention (Kimi Team,
2025, Kimi Linear) g has a number for each row of S.

Shapes: those of matrix_states.py, and G query and key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_engine.kernels.element_functions import sum_in_halves
from compiled_engine.recurrence.decays_by_element import decays_to_end, products_by_element
from compiled_engine.recurrence.matrix_states import Drafted, TokenValues, apply_to_step, read, written
from compiled_engine.recurrence.sequences import Sequences

EPS = 1e-6  # for normalising queries and keys


def apply_rule_reference(
    q_TGk: torch.Tensor,
    k_TGk: torch.Tensor,
    v_THv: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    normalises: bool,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    out_THv: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute `recurrence.op.apply_rule` with PyTorch's ops, on any device.

    Writes out_THv, and updates state_SHkv and `drafted`.
    """
    q_THk, k_THk = (_prepared(x, v_THv.shape[1], normalises, invariant) for x in (q_TGk, k_TGk))
    q_THk = q_THk * q_THk.shape[-1] ** -0.5
    g_THe = g_TH.float().view(*v_THv.shape[:2], -1)
    values = TokenValues(q_THk, k_THk, v_THv.float(), g_THe, beta_TH.float())
    apply_to_step(_DeltaRule(invariant), values, state_SHkv, drafted, out_THv, sequences, invariant)


def _prepared(x_TGk: torch.Tensor, num_heads: int, normalises: bool, invariant: bool) -> torch.Tensor:
    """Return queries or keys in fp32, with heads repeated to `num_heads`: [T, num_heads, k].

    normalises: divide each by its L2 norm first. invariant: add in an order that depends on k alone.
    """
    x = x_TGk.float()
    if normalises:
        squares = sum_in_halves(x * x, -1).unsqueeze(-1) if invariant else (x * x).sum(-1, keepdim=True)
        x = x * torch.rsqrt(squares + EPS)
    return x.repeat_interleave(num_heads // x.shape[1], 1)


@dataclass(frozen=True)
class _DeltaRule:
    """The gated delta rule, as a Rule of matrix_states.py. `TokenValues.other` is beta, [T, H].

    invariant: see `read`.
    """

    invariant: bool

    def one_token(
        self, state_RHkv: torch.Tensor, values_R: TokenValues
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_RHk, k_RHk, v_RHv, g_RHe, beta_RH = values_R
        decayed_RHkv = state_RHkv * g_RHe.exp().unsqueeze(-1)
        known_RHv = read(decayed_RHkv, k_RHk, self.invariant)
        written_RHv = (v_RHv - known_RHv) * beta_RH.unsqueeze(-1)
        state_RHkv = written(decayed_RHkv, k_RHk, written_RHv)
        return read(state_RHkv, q_RHk, self.invariant), state_RHkv, written_RHv

    def chunk(self, state_Hkv: torch.Tensor, values_C: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the rule to C tokens of one request at once. Returns (results [C, H, v], new state [H, k, v]).

        The value that a token writes depends on the values that earlier tokens write. All of them together are the
        solution of a triangular system of equations.
        """
        q_HCk, k_HCk, v_HCv, g_HCe, beta_HC = (x.transpose(0, 1) for x in values_C)
        total_HCe, beta_HC1 = g_HCe.cumsum(1), beta_HC.unsqueeze(-1)
        grown_HCe = total_HCe.exp()
        if g_HCe.shape[-1] == 1:
            left_HCe = (total_HCe[:, -1:] - total_HCe).exp()
            decay_HCC = (total_HCe - total_HCe.mT).tril().exp().tril()
            keys_HCC, scores_HCC = (x_HCk @ k_HCk.mT * decay_HCC for x_HCk in (k_HCk * beta_HC1, q_HCk))
        else:
            left_HCe = decays_to_end(g_HCe)
            keys_HCC, scores_HCC = products_by_element(torch.stack((k_HCk * beta_HC1, q_HCk)), k_HCk, g_HCe)
        wanted_HCv = beta_HC1 * (v_HCv - (k_HCk * grown_HCe) @ state_Hkv)
        written_HCv = torch.linalg.solve_triangular(keys_HCC, wanted_HCv, upper=False, unitriangular=True)
        y_HCv = (q_HCk * grown_HCe) @ state_Hkv + scores_HCC @ written_HCv
        state_Hkv = state_Hkv * grown_HCe[:, -1:].mT + (k_HCk * left_HCe).mT @ written_HCv
        return y_HCv.transpose(0, 1), state_Hkv
