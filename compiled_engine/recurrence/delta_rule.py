"""Gated delta rule (Yang et al., 2024, Gated Delta Networks) over packed sequences, with PyTorch's ops.

A head's state S [k, v] maps keys to values. For each token, S is multiplied by exp(g), a value is written under the
token's key, S += key^T (beta * (value - key S)), and the token's result is query S.

Shapes: T tokens and R requests of the step, S rows of the state, H value heads, G query and key heads, k and v their
head sizes, C tokens of a chunk, N slots for updates of drafts, w = k + v + 1 elements of an update: the key, the value
that is written under it, and g.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.recurrence.sequences import Sequences

CHUNK = 64
EPS = 1e-6  # for normalising queries and keys


class Drafted(NamedTuple):
    """Tensors that a delta rule keeps in addition to its states in an engine with drafts, see states.py."""

    drafts_SHNw: torch.Tensor  # fp32, the updates of the last step's drafts, in slots by position
    lengths_SHv: torch.Tensor  # int32, for each column of a state, the number of tokens that it has


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
) -> None:
    """Compute `recurrence.op.apply_rule` with PyTorch's ops, on any device.

    Writes out_THv, and updates state_SHkv and `drafted`.
    """
    q_THk, k_THk = (_prepared(x, v_THv.shape[1], normalises) for x in (q_TGk, k_TGk))
    q_THk = q_THk * q_THk.shape[-1] ** -0.5
    values = q_THk, k_THk, v_THv.float(), g_TH.float(), beta_TH.float()
    num_certain_R = sequences.lens
    if drafted is not None:
        sequences, num_certain_R = sequences.joined()
    states_RHkv = sequences.states(state_SHkv)
    if drafted is not None:
        _apply_drafts(states_RHkv, drafted, sequences, num_certain_R)
    out_THv.zero_()
    alone_R = (num_certain_R == 1) & (sequences.rows_R >= 0)
    if alone_R.any():
        tokens = sequences.starts[alone_R]
        y_RHv, states_RHkv[alone_R], _ = _one_token(states_RHkv[alone_R], *(x[tokens] for x in values))
        out_THv[tokens] = y_RHv.to(out_THv.dtype)
    for request, (row, start, length) in enumerate(
        zip(sequences.rows_R.tolist(), sequences.starts.tolist(), num_certain_R.tolist(), strict=True)
    ):
        if row < 0 or length < 2:
            continue
        state_Hkv = states_RHkv[request]
        for first in range(start, start + length, CHUNK):
            chunk = slice(first, min(first + CHUNK, start + length))
            y_CHv, state_Hkv = _chunk(state_Hkv, *(x[chunk].transpose(0, 1) for x in values))
            out_THv[chunk] = y_CHv.to(out_THv.dtype)
        states_RHkv[request] = state_Hkv
    sequences.store(state_SHkv, states_RHkv)
    if drafted is not None:
        _compute_drafts(states_RHkv, drafted, alone_R, num_certain_R, values, out_THv, sequences)


def _compute_drafts(
    states_RHkv: torch.Tensor,
    drafted: Drafted,
    alone_R: torch.Tensor,
    num_certain_R: torch.Tensor,
    values: tuple[torch.Tensor, ...],
    out_THv: torch.Tensor,
    sequences: Sequences,
) -> None:
    """Write the results of drafts to out_THv, and the drafts' updates and the states' lengths to `drafted`.

    states_RHkv: the states after each request's num_certain_R tokens that are no drafts. alone_R: requests that may
    have drafts. values: q, k, v, g and beta of all tokens, see `_one_token`.
    """
    (_, k_THk, _, g_TH, _), (drafts_SHNw, lengths_SHv) = values, drafted
    lengths_R = sequences.num_before + num_certain_R
    sequences.store(lengths_SHv, lengths_R[:, None, None].expand(-1, *lengths_SHv.shape[1:]))
    for draft in range(int(torch.where(alone_R, sequences.lens, 0).max()) - 1):
        has_draft_R = alone_R & (sequences.lens > draft + 1)
        tokens, rows = sequences.starts[has_draft_R] + draft + 1, sequences.rows_R[has_draft_R].long()
        y_RHv, states_RHkv[has_draft_R], written_RHv = _one_token(
            states_RHkv[has_draft_R], *(x[tokens] for x in values)
        )
        out_THv[tokens] = y_RHv.to(out_THv.dtype)
        slots = (lengths_R[has_draft_R] + draft) % drafts_SHNw.shape[2]
        drafts_SHNw[rows, :, slots] = torch.cat((k_THk[tokens], written_RHv, g_TH[tokens, :, None]), -1)


def _apply_drafts(
    states_RHkv: torch.Tensor, drafted: Drafted, sequences: Sequences, num_certain_R: torch.Tensor
) -> None:
    """Apply the previous step's right drafts to the states, in place. They precede this step's first token.

    A request with several certain tokens has no right drafts, since it had no drafts in the previous step.
    """
    rows_R = sequences.rows_R.clamp(min=0).long()
    continues_R = (sequences.rows_R >= 0) & (sequences.num_before > 0)
    lengths_R = torch.where(continues_R, drafted.lengths_SHv[rows_R, 0, 0], 0)
    num_right_R = torch.where(continues_R, sequences.num_before - lengths_R, 0)
    assert not num_right_R[num_certain_R > 1].any()  # the kernel does not apply any to them
    for draft in range(int(num_right_R.max())):
        right_R = num_right_R > draft
        slots = (lengths_R[right_R] + draft) % drafted.drafts_SHNw.shape[2]
        update_RHw = drafted.drafts_SHNw[rows_R[right_R], :, slots]
        key_size = states_RHkv.shape[2]
        k_RHk, written_RHv, g_RH1 = update_RHw.split([key_size, update_RHw.shape[2] - key_size - 1, 1], -1)
        decayed_RHkv = states_RHkv[right_R] * g_RH1.unsqueeze(-1).exp()
        states_RHkv[right_R] = _written(decayed_RHkv, k_RHk, written_RHv)


def _prepared(x_TGk: torch.Tensor, num_heads: int, normalises: bool) -> torch.Tensor:
    """Return queries or keys in fp32, with heads repeated to `num_heads`: [T, num_heads, k].

    normalises: divide each by its L2 norm first.
    """
    x = x_TGk.float()
    if normalises:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def _written(decayed_RHkv: torch.Tensor, k_RHk: torch.Tensor, written_RHv: torch.Tensor) -> torch.Tensor:
    """Return the states after values are written under keys, see the module."""
    return decayed_RHkv + torch.einsum("rhk,rhv->rhkv", k_RHk, written_RHv)


def _one_token(
    state_RHkv: torch.Tensor,
    q_RHk: torch.Tensor,
    k_RHk: torch.Tensor,
    v_RHv: torch.Tensor,
    g_RH: torch.Tensor,
    beta_RH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the rule to one token of each request.

    Returns (results [R, H, v], new states [R, H, k, v], values that are written under the keys [R, H, v]).
    """
    decayed_RHkv = state_RHkv * g_RH.exp()[..., None, None]
    known_RHv = torch.einsum("rhkv,rhk->rhv", decayed_RHkv, k_RHk)
    written_RHv = (v_RHv - known_RHv) * beta_RH.unsqueeze(-1)
    state_RHkv = _written(decayed_RHkv, k_RHk, written_RHv)
    return torch.einsum("rhkv,rhk->rhv", state_RHkv, q_RHk), state_RHkv, written_RHv


def _chunk(
    state_Hkv: torch.Tensor,
    q_HCk: torch.Tensor,
    k_HCk: torch.Tensor,
    v_HCv: torch.Tensor,
    g_HC: torch.Tensor,
    beta_HC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to a chunk of C tokens of one request at once. Returns (results [C, H, v], new state [H, k, v]).

    The value that a token writes depends on the values that earlier tokens write. All of them together are the solution
    of a triangular system of equations.
    """
    g_HC = g_HC.cumsum(-1)
    decay_HCC = (g_HC.unsqueeze(-1) - g_HC.unsqueeze(-2)).tril().exp().tril()
    grown_HC1, beta_HC1 = g_HC.exp().unsqueeze(-1), beta_HC.unsqueeze(-1)
    keys_HCC = (k_HCk * beta_HC1) @ k_HCk.mT * decay_HCC
    wanted_HCv = beta_HC1 * (v_HCv - grown_HC1 * (k_HCk @ state_Hkv))
    written_HCv = torch.linalg.solve_triangular(keys_HCC, wanted_HCv, upper=False, unitriangular=True)
    y_HCv = (q_HCk * grown_HC1) @ state_Hkv + (q_HCk @ k_HCk.mT * decay_HCC) @ written_HCv
    left_HC1 = (g_HC[:, -1:] - g_HC).exp().unsqueeze(-1)
    state_Hkv = state_Hkv * grown_HC1[:, -1:] + (k_HCk * left_HC1).mT @ written_HCv
    return y_HCv.transpose(0, 1), state_Hkv
