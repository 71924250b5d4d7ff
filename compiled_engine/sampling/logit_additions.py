"""Single logits of a row that something is added to before a token is chosen; minus infinity forbids a token.

logit_bias.py, bad_words.py and min_tokens.py each state such additions for a row; here all are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch


class Additions(NamedTuple):
    """values [n] float32 to add to the logits of token_ids [n] int64."""

    token_ids: np.ndarray
    values: np.ndarray


class LogitAdder(Protocol):
    """One feature of one request."""

    def additions(self, output_ids: Sequence[int]) -> Additions | None:
        """What to add before the token that follows `output_ids`, the tokens generated so far, is chosen."""
        ...


def forbid(token_ids: Sequence[int]) -> Additions:
    return Additions(np.array(token_ids, dtype=np.int64), np.full(len(token_ids), -np.inf, dtype=np.float32))


def add_(logits_RV: torch.Tensor, additions: Sequence[tuple[int, Additions]]) -> None:
    """Make each (index of the row in logits_RV, additions) in place; logits_RV is float32 [R, V].

    A row, and a token of a row, may come repeatedly.
    """
    rows_N = np.repeat([row for row, _ in additions], [len(each.token_ids) for _, each in additions])
    token_ids_N = np.concatenate([each.token_ids for _, each in additions])
    values_N = np.concatenate([each.values for _, each in additions])
    rows, token_ids, values = (
        torch.from_numpy(array).to(logits_RV.device) for array in (rows_N, token_ids_N, values_N)
    )
    logits_RV.index_put_((rows, token_ids), values, accumulate=True)
