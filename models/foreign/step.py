"""The arguments of a step on their way to attention, past code that does not know of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.attention.inputs import AttentionInputs


class Step:
    """All attention modules of a model share this object; the model's forward fills it in, except the windows, which
    are constant.

    Keyword arguments would be simpler, but not all families pass them to their attention.
    """

    def __init__(self, sliding_windows: Sequence[int | None]) -> None:
        self.sliding_windows = tuple(sliding_windows)
        self.inputs: AttentionInputs | None = None
        self.kv_caches: list[torch.Tensor] = []
