"""Replaces the embeddings of image tokens by those that the vision tower has computed.

The tower's embeddings are rows of a parameter, which is filled before the step. An input that the pass adds, the step
tensor IMAGE_INDEX, has the row of each token, -1 for tokens of text. The rows replace elements of the value that enters
the first layer, which transformers' models call inputs_embeds. So a family's own factor on embeddings, such as Gemma's,
applies to tokens of text alone. With further levels (deepstack, Qwen3-VL), the rows have further parts, each added to
the value that leaves one of the first layers.

The pass only runs in a separate variant of the forward (graphs/compiler/signature.py), so steps without images run
unchanged code.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.passes.framework.graph_inputs import add_parameter, argument
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, emit, is_call
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.layout.layer_inputs import entering, stack_of
from compiled_engine.passes.parallel.tensor_parallel import all_reduce

# The forward's variant for steps that compute positions of images.
IMAGES = "images"
# Name of the kept parameter with the embeddings, [rows, (1 + levels) * D].
EMBEDDINGS = "image_embeddings"
IMAGE_INDEX = StepTensor("image_index_T", ("tokens",), torch.int32, padding=-1, variants=(IMAGES,))


def embeddings_parameter(num_rows: int, levels: int, hidden_size: int, dtype: torch.dtype) -> Parameter:
    """Return the parameter with num_rows rows: an image token's embedding, then `levels` parts for later layers."""
    name = str(dtype).removeprefix("torch.")
    return Parameter(EMBEDDINGS, (num_rows, (1 + levels) * hidden_size), name, KEPT)


def part_of(embeddings: torch.Tensor, level: int, hidden_size: int) -> torch.Tensor:
    """Return the part of the images' embeddings for a level, [rows, D].

    Level 0 replaces elements of the first layer's input; level n is added to the input of layer n.
    """
    return embeddings[:, level * hidden_size : (level + 1) * hidden_size]


class MergeEmbeddings(GraphPass):
    """Puts the embeddings of images into the input of layer 0, and further parts of them to inputs of later layers.

    levels: the number of further parts; part n, from 1 on, is added to the input of layer n. num_rows: the number of
    embeddings that the parameter holds. Runs after the layers that were not traced have been added (see
    repeated_layers) and after tensor_parallel, and before all passes that fuse ops.
    """

    name = "merge_embeddings"
    required = True  # without it, images have no effect

    def __init__(self, num_rows: int, levels: int = 0) -> None:
        self._num_rows, self._levels = num_rows, levels

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 1 + self._levels

    def run(self, graph: fx.Graph) -> PassResult:
        path = stack_of(graph)
        values = [entering(graph, f"{path}.{layer}.") for layer in range(1 + self._levels)]
        missing = tuple(f"layer {layer}: {found}" for layer, found in enumerate(values) if isinstance(found, str))
        if missing:
            return PassResult(0, missing)
        index_T = argument(graph, IMAGE_INDEX.name)
        first: torch.Tensor = values[0].meta["val"]  # type: ignore[union-attr]
        hidden_size = int(first.shape[1])
        described = embeddings_parameter(self._num_rows, self._levels, hidden_size, first.dtype)
        embeddings = add_parameter(graph, described)
        with graph.inserting_before(embeddings.next):
            is_image_T1 = emit(graph, aten.unsqueeze.default, emit(graph, aten.ge.Scalar, index_T, 0), 1)
        replacements = []
        for level, value in enumerate(values):
            assert isinstance(value, fx.Node)
            merged = _merged(graph, value, embeddings, index_T, is_image_T1, level, hidden_size)
            replacements.append(Replacement(value.name, merged))
        return PassResult(len(replacements), replacements=tuple(replacements))


def _merged(
    graph: fx.Graph,
    value: fx.Node,
    embeddings: fx.Node,
    index_T: fx.Node,
    is_image_T1: fx.Node,
    level: int,
    hidden_size: int,
) -> fx.Node:
    """Insert ops that put part `level` of the images' embeddings into a value: part 0 replaces rows, others are added.

    index_T, is_image_T1: each token's row in `embeddings`, and whether it is an image token. Returns the node that
    users of the value read from then on.
    """
    users, before = list(value.users), _residual(value) if level else None
    with graph.inserting_before(value if before is not None else value.next):
        part = emit(graph, aten.slice.Tensor, embeddings, 1, level * hidden_size, (level + 1) * hidden_size)
        rows_TD = emit(graph, aten.index_select.default, part, 0, emit(graph, aten.clamp_min.default, index_T, 0))
        if level == 0:
            merged = emit(graph, aten.where.self, is_image_T1, rows_TD, value)
        else:  # a sum, with which the next layer's norm fuses
            added_TD = emit(graph, aten.where.ScalarOther, is_image_T1, rows_TD, 0)
            merged = emit(graph, aten.add.Tensor, before or value, added_TD)
    if before is not None:
        value.replace_input_with(before, merged)
        return value
    for user in users:
        user.replace_input_with(value, merged)
    return merged


def _residual(value: fx.Node) -> fx.Node | None:
    """If a value is the sum of an all-reduce and another operand, return the other operand; otherwise return None.

    One kernel may compute the all-reduce, the sum and the norm after it, so no op may be inserted between these three.
    """
    if not is_call(value, aten.add.Tensor):
        return None
    left, right = value.all_input_nodes[0], value.all_input_nodes[-1]
    return left if is_call(right, all_reduce) else right if is_call(left, all_reduce) else None
