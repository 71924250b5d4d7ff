"""Makes the cross-attention of an eager model read stored keys and values of clips.

In compiled models, the pass hoist_encoder does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.speech.hoist_encoder import cross_parameters
from compiled_engine.speech import SpeechConfig, SpeechDescription


class EagerSpeech:
    """Allocates the keys and values of clips, and makes an eager model read them. Implements EagerFeature."""

    def __init__(self, config: EngineConfig, limits: SpeechConfig, speech: SpeechDescription) -> None:
        model, num_rows = config.model, limits.num_slots * speech.length
        self._of_layers = [
            cross_parameters(layer, num_rows, model.num_kv_heads, model.head_dim, model.dtype)
            for layer in range(model.num_layers)
        ]

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        return tuple(parameter for pair in self._of_layers for parameter in pair)

    def callables(
        self, model: nn.Module, callables: Mapping[str, Forward], tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Forward]:
        step: Any = model.step
        step.kept = [tuple(tensors[parameter.name] for parameter in pair) for pair in self._of_layers]
        return callables
