"""Gives all image tokens, in every layer, the layer's embedding of one fixed token, as in Gemma 4.

In small Gemma 4 models, each layer has its own embeddings of tokens, besides the embeddings that enter the first layer.
Image tokens have each layer's embedding of the padding token.

The pass only runs in the variant of the forward for steps with images.
"""

from __future__ import annotations

from torch import fx

from compiled_engine.passes.framework.graph_inputs import argument
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import aten, emit
from compiled_engine.passes.images.merge_embeddings import IMAGE_INDEX


class LayerTokens(GraphPass):
    """Replaces the ids of image tokens by `token_id`, so that they have the embeddings of that token in every layer.

    The embeddings of image tokens that enter the first layer come from the vision tower, see merge_embeddings.
    """

    name = "layer_tokens"
    required = True  # without it, tokens of images have the embeddings of the placeholder

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 1

    def run(self, graph: fx.Graph) -> PassResult:
        ids_T, index_T = argument(graph, "input_ids_T"), argument(graph, IMAGE_INDEX.name)
        users = list(ids_T.users)
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            is_image_T = emit(graph, aten.ge.Scalar, index_T, 0)
            replaced_T = emit(graph, aten.where.ScalarSelf, is_image_T, self._token_id, ids_T)
        for user in users:
            user.replace_input_with(ids_T, replaced_T)
        return PassResult(1)
