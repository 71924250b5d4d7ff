"""Which rows of a batch are a rank's, where ranks share a computation of whole rows."""

from __future__ import annotations

import torch


def rows_of(rank: int, size: int, num_rows: int) -> slice:
    """As many rows for each of `size` ranks, one after another; fewer, or none, for the last ones."""
    share = rows_a_rank(size, num_rows)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def rows_a_rank(size: int, num_rows: int) -> int:
    """The most that a rank has."""
    return -(-num_rows // size)


def padded(x_TD: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Contiguous, with rows of zeros behind its own up to that many: collectives move as much of every rank."""
    if x_TD.shape[0] == num_rows:
        return x_TD.contiguous()
    padded_TD = x_TD.new_zeros((num_rows, *x_TD.shape[1:]))
    padded_TD[: x_TD.shape[0]] = x_TD
    return padded_TD
