"""Lets the tokens of an image attend to each other, as in Gemma 3: each also sees the keys up to the image's last one.

The step tensor KEYS_AHEAD tells attention how many later keys a token sees. All tokens of an image are in the step, and
windows of attention are at least as long as an image.

The pass only runs in the variant of the forward for steps with images.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.passes.framework.graph_inputs import argument
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import attention_calls, change
from compiled_engine.passes.images.merge_embeddings import IMAGES

KEYS_AHEAD = StepTensor("keys_ahead_T", ("tokens",), torch.int32, variants=(IMAGES,))


class WholeImages(GraphPass):
    """Passes KEYS_AHEAD to each attention. Runs before all fusing passes."""

    name = "whole_images"
    required = True  # without it, tokens of an image do not see later ones

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(attention_calls(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        keys_ahead_T = argument(graph, KEYS_AHEAD.name)
        attentions = attention_calls(graph)
        for attention in attentions:
            change(attention, keys_ahead_T=keys_ahead_T)
        return PassResult(len(attentions))
