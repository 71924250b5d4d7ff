"""Lets the tokens of an image attend to each other: each token also sees the keys of the image's later tokens.

An input that the pass adds, the step tensor KEYS_AHEAD, tells attention how many later keys a token sees. All tokens of
an image are in the step. In Gemma 3 image tokens see later keys in all layers, and windows of attention are at least
as long as an image. In Gemma 4 they see later keys only in the layers that have a window, and only within it.

The pass only runs in the variant of the forward for steps with images.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.passes.framework.graph_inputs import argument
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import attention_calls, change, named
from compiled_engine.passes.images.merge_embeddings import IMAGES

KEYS_AHEAD = StepTensor("keys_ahead_T", ("tokens",), torch.int32, variants=(IMAGES,))


class WholeImages(GraphPass):
    """Tells attention ops how many later keys each token sees: all ops or, with `in_windows`, those that have a window.

    Runs before all fusing passes.
    """

    name = "whole_images"
    required = True  # without it, tokens of an image do not see later ones

    def __init__(self, in_windows: bool = False) -> None:
        self._in_windows = in_windows

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(self._attentions(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        keys_ahead_T = argument(graph, KEYS_AHEAD.name)
        attentions = self._attentions(graph)
        for attention in attentions:
            change(attention, keys_ahead_T=keys_ahead_T)
        return PassResult(len(attentions))

    def _attentions(self, graph: fx.Graph) -> list[fx.Node]:
        found = attention_calls(graph)
        return [each for each in found if named(each)["sliding_window"]] if self._in_windows else found
