"""Recurrences whose state is a matrix: applies a step's tokens to the states, with PyTorch's ops.

A head's state S [k, v] maps keys to values. Each token multiplies S by exp(g), writes a value under its key,
S += key^T value, and reads S. g is a number, or one number for each row of S, which belongs to an element of the keys.
The rules differ in the value that they write and in what they add to the result: delta_rule.py, state_space.py.

Shapes: T tokens and R requests of the step, S rows of the state, H heads, k and v sizes of a key and of a value, C
tokens of a chunk, e numbers in g (1 or k), N slots for updates of drafts, w = k + v + e elements of an update: the key,
the value that is written under it, and g.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from compiled_engine.kernels.element_functions import sum_in_halves
from compiled_engine.recurrence.sequences import Sequences

CHUNK = 64


class Drafted(NamedTuple):
    """Tensors that are kept in addition to matrix states in an engine with drafts, see states.py."""

    drafts_SHNw: torch.Tensor  # fp32, the updates of the last step's drafts, in slots by position
    lengths_SHv: torch.Tensor  # int32, for each column of a state, the number of tokens that were applied to it


class TokenValues(NamedTuple):
    """The queries, keys, values and decays of tokens, in fp32. `other` depends on the rule."""

    q_THk: torch.Tensor
    k_THk: torch.Tensor
    v_THv: torch.Tensor
    g_THe: torch.Tensor
    other: torch.Tensor  # [T, H, ...]


class Rule(Protocol):
    """Protocol of a recurrence's arithmetic: how tokens update a matrix state, and the results that they read."""

    def one_token(
        self, state_RHkv: torch.Tensor, values_R: TokenValues
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Apply the rule to one token of each request.

        Returns (results [R, H, v], new states [R, H, k, v], values that are written under the keys [R, H, v]).
        """
        ...

    def chunk(self, state_Hkv: torch.Tensor, values_C: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the rule to C tokens of one request at once. Returns (results [C, H, v], new state [H, k, v])."""
        ...


def apply_to_step(
    rule: Rule,
    values: TokenValues,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    out_THv: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Apply a rule to the tokens of a step. Writes out_THv, zeros for padding; updates state_SHkv and `drafted`.

    invariant: process tokens one by one, so that a request's bits do not depend on how steps divide its tokens.
    """
    num_certain_R = sequences.lens
    if drafted is not None:
        sequences, num_certain_R = sequences.joined()
    states_RHkv = sequences.states(state_SHkv)
    if drafted is not None:
        _apply_drafts(states_RHkv, drafted, sequences, num_certain_R)
    out_THv.zero_()
    is_real_R = sequences.rows_R >= 0
    alone_R = (num_certain_R == 1) & is_real_R
    most_places = int(num_certain_R.max()) if invariant else 1
    for place in range(most_places):
        has_R = (num_certain_R > place) & is_real_R if invariant else alone_R
        if has_R.any():
            tokens = sequences.starts[has_R] + place
            y_RHv, states_RHkv[has_R], _ = rule.one_token(states_RHkv[has_R], _at(values, tokens))
            out_THv[tokens] = y_RHv.to(out_THv.dtype)
    for request, (row, start, length) in enumerate(
        zip(sequences.rows_R.tolist(), sequences.starts.tolist(), num_certain_R.tolist(), strict=True)
    ):
        if row < 0 or length < 2 or invariant:
            continue
        state_Hkv = states_RHkv[request]
        for first in range(start, start + length, CHUNK):
            chunk = slice(first, min(first + CHUNK, start + length))
            y_CHv, state_Hkv = rule.chunk(state_Hkv, _at(values, chunk))
            out_THv[chunk] = y_CHv.to(out_THv.dtype)
        states_RHkv[request] = state_Hkv
    sequences.store(state_SHkv, states_RHkv)
    if drafted is not None:
        _compute_drafts(rule, states_RHkv, drafted, alone_R, num_certain_R, values, out_THv, sequences)


def written(decayed_RHkv: torch.Tensor, k_RHk: torch.Tensor, written_RHv: torch.Tensor) -> torch.Tensor:
    """Return decayed state + key^T value for each request: its state after the value is written under the key."""
    return decayed_RHkv + k_RHk.unsqueeze(-1) * written_RHv.unsqueeze(-2)


def read(state_RHkv: torch.Tensor, x_RHk: torch.Tensor, invariant: bool) -> torch.Tensor:
    """Return the values that each request's state has under its key or query, x S: [R, H, v].

    invariant: add in an order that depends on the size of the keys alone.
    """
    if invariant:
        return sum_in_halves(state_RHkv * x_RHk.unsqueeze(-1), -2)
    return torch.einsum("rhkv,rhk->rhv", state_RHkv, x_RHk)


def _at(values: TokenValues, tokens: torch.Tensor | slice) -> TokenValues:
    return TokenValues(*(x[tokens] for x in values))


def _compute_drafts(
    rule: Rule,
    states_RHkv: torch.Tensor,
    drafted: Drafted,
    alone_R: torch.Tensor,
    num_certain_R: torch.Tensor,
    values: TokenValues,
    out_THv: torch.Tensor,
    sequences: Sequences,
) -> None:
    """Compute drafts: write their results to out_THv, and their updates to `drafted`, without advancing the states.

    Also writes to `drafted` the states' lengths: the number of tokens that were applied to each. num_certain_R: how
    many of each request's tokens are not drafts. states_RHkv: each request's state after these tokens; overwritten.
    alone_R: whether a request has exactly one such token; other requests have no drafts.
    """
    drafts_SHNw, lengths_SHv = drafted
    lengths_R = sequences.num_before + num_certain_R
    sequences.store(lengths_SHv, lengths_R[:, None, None].expand(-1, *lengths_SHv.shape[1:]))
    for draft in range(int(torch.where(alone_R, sequences.lens, 0).max()) - 1):
        has_draft_R = alone_R & (sequences.lens > draft + 1)
        tokens, rows = sequences.starts[has_draft_R] + draft + 1, sequences.rows_R[has_draft_R].long()
        y_RHv, states_RHkv[has_draft_R], written_RHv = rule.one_token(states_RHkv[has_draft_R], _at(values, tokens))
        out_THv[tokens] = y_RHv.to(out_THv.dtype)
        slots = (lengths_R[has_draft_R] + draft) % drafts_SHNw.shape[2]
        updates = values.k_THk[tokens], written_RHv, values.g_THe[tokens]
        drafts_SHNw[rows, :, slots] = torch.cat(updates, -1)


def _apply_drafts(
    states_RHkv: torch.Tensor, drafted: Drafted, sequences: Sequences, num_certain_R: torch.Tensor
) -> None:
    """Apply the accepted drafts of the previous step, which precede this step's first token, to the states, in place.

    num_certain_R: how many of each request's tokens are not drafts. A request with several such tokens has no accepted
    drafts, since it had no drafts in the previous step.
    """
    rows_R = sequences.rows_R.clamp(min=0).long()
    continues_R = (sequences.rows_R >= 0) & (sequences.num_before > 0)
    lengths_R = torch.where(continues_R, drafted.lengths_SHv[rows_R, 0, 0], 0)
    num_right_R = torch.where(continues_R, sequences.num_before - lengths_R, 0)
    assert not num_right_R[num_certain_R > 1].any()  # the kernels do not apply any to them
    key_size, value_size = states_RHkv.shape[2:]
    for draft in range(int(num_right_R.max())):
        right_R = num_right_R > draft
        slots = (lengths_R[right_R] + draft) % drafted.drafts_SHNw.shape[2]
        update_RHw = drafted.drafts_SHNw[rows_R[right_R], :, slots]
        k_RHk, written_RHv, g_RHe = update_RHw.tensor_split((key_size, key_size + value_size), -1)
        decayed_RHkv = states_RHkv[right_R] * g_RHe.unsqueeze(-1).exp()
        states_RHkv[right_R] = written(decayed_RHkv, k_RHk, written_RHv)
