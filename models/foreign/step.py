"""The arguments of a step on their way to attention, past code that does not know of them."""

from __future__ import annotations

import torch

from compiled_engine.attention.inputs import AttentionInputs


class Step:
    """Each attention module of a model has this one object; the model's forward fills it in.

    Keyword arguments would be the way, but not all families hand theirs on to their attention.
    """

    def __init__(self) -> None:
        self.inputs: AttentionInputs | None = None
        self.kv_caches: list[torch.Tensor] = []
