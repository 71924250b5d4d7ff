"""The held-out loss, reproducible from a model folder alone.

The text of `held_out.txt` is tokenised whole and cut into consecutive windows. Every window is a sequence of
its own; its first token is context only, every other is scored given the tokens before it in the same window.
The loss is the mean of the negative log-probabilities of the scored tokens, in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

HELD_OUT_WINDOW = 512
HELD_OUT_DEFINITION = (
    "held_out.txt is tokenised whole, nothing added, and cut into consecutive windows of "
    f"{HELD_OUT_WINDOW} tokens, the last one shorter; each window is a sequence of its own, its first token "
    "is context and every other one is scored; the loss is the mean over all scored tokens, computed in fp32 "
    "from the bf16 weights as stored"
)


class TextEncoder(Protocol):
    """The part of a Hugging Face tokenizer in use; `verbose` lets it warn of long texts."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...


def held_out_windows(tokenizer: TextEncoder, text: str) -> list[list[int]]:
    """Token ids of `text` in consecutive windows of HELD_OUT_WINDOW tokens.

    The last window is as long as what is left, and left out if that is one token, which could not be scored.
    """
    return cut_windows(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def cut_windows(token_ids: Sequence[int]) -> list[list[int]]:
    """Cut token ids as `held_out_windows` does."""
    starts = range(0, len(token_ids) - 1, HELD_OUT_WINDOW)
    return [list(token_ids[start : start + HELD_OUT_WINDOW]) for start in starts]


def scored_tokens(windows: Sequence[Sequence[int]]) -> int:
    """The number of tokens of these windows that count towards the loss."""
    return sum(len(window) - 1 for window in windows)


@torch.no_grad()
def mean_nats_per_token(
    forward: Callable[[Tensor], Tensor],
    windows: Sequence[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 8,
) -> float:
    """Mean negative log-probability of the scored tokens, in nats.

    `forward` maps token ids [B, T], int64, to logits [B, T, V] of any float dtype.

    Raises:
        ValueError: `windows` has no scored token.
    """
    if scored_tokens(windows) == 0:
        raise ValueError(f"windows must hold at least one window of two tokens, got {len(windows)} windows")
    total_nats = 0.0
    for _, group in groupby(windows, key=len):
        same_length = list(group)
        for first in range(0, len(same_length), batch_size):
            ids_BT = torch.tensor(same_length[first : first + batch_size], device=device)
            logits_BTV = forward(ids_BT)[:, :-1].float()
            nats_N = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
            total_nats += nats_N.double().sum().item()
    return total_nats / scored_tokens(windows)
