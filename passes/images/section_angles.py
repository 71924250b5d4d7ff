"""Computes rotary angles from positions in three dimensions: time, height and width (M-RoPE, Qwen2-VL).

Each pair of elements is rotated by one of a token's three positions; `sections` has the number of pairs for each of the
three. In text the three positions are equal, so the usual forward has one position for each token. An input that the
pass adds, the step tensor POSITION_DELTAS, has the differences between the three positions and the usual one. They are
zero outside of prompts with images.

The pass only runs in the variant of the forward for steps with images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.passes.framework.graph_inputs import argument, is_parameter
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, aten, emit, factors, is_call
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.images.merge_embeddings import IMAGES
from compiled_engine.passes.rope.rope_angles import column_of

# Ops with which positions are repeated for time, height and width, and one of the three is taken.
_REPEATING = (aten.select.int, aten.slice.Tensor, aten.expand.default, aten.unsqueeze.default)
POSITION_DELTAS = StepTensor("position_deltas_T3", ("tokens", 3), torch.int32, variants=(IMAGES,))


def angles_of_sections(
    positions_T: torch.Tensor, deltas_T3: torch.Tensor, inv_freq_p: torch.Tensor, sections: Sequence[int], mixed: bool
) -> torch.Tensor:
    """Return the angles of p pairs, fp32 [T, p]: (position + delta) * inverse frequency.

    deltas_T3: the differences between a token's time, height and width and its position. sections: number of pairs that
    are rotated by time, by height and by width. mixed: pairs alternate between time, height and width until the numbers
    for height and for width are used up, and further pairs take time, as in Qwen3-VL. Otherwise the pairs of time come
    first, then those of height, then those of width.
    """
    positions_T3 = (positions_T[:, None] + deltas_T3).float()
    time_Tp, height_Tp, width_Tp = (positions_T3[:, axis, None] * inv_freq_p for axis in range(3))
    pair_p = torch.arange(inv_freq_p.shape[0], device=inv_freq_p.device)
    if mixed:
        of_height_p = (pair_p % 3 == 1) & (pair_p < 3 * sections[1])
        of_width_p = (pair_p % 3 == 2) & (pair_p < 3 * sections[2])
    else:
        of_height_p = (pair_p >= sections[0]) & (pair_p < sections[0] + sections[1])
        of_width_p = pair_p >= sections[0] + sections[1]
    return torch.where(of_height_p, height_Tp, torch.where(of_width_p, width_Tp, time_Tp))


# Runs once a step, and only in steps with images, so it has no kernel of its own.
section_angles = define_op(
    "section_angles(Tensor positions_T, Tensor deltas_T3, Tensor inv_freq_p, int[] sections, bool mixed) -> Tensor",
    cpu=angles_of_sections,
    cuda=angles_of_sections,
    fake=lambda positions_T, inv_freq_p: inv_freq_p.new_empty((positions_T.shape[0], inv_freq_p.shape[0])),
    reference=angles_of_sections,
)


class SectionAngles(GraphPass):
    """Replaces rotary angles of one position per token by angles of its positions in three dimensions.

    sections, mixed: see `angles_of_sections`.
    """

    name = "section_angles"
    required = True  # without it, tokens of images have wrong positions

    def __init__(self, sections: Sequence[int], mixed: bool) -> None:
        self._sections, self._mixed = list(sections), mixed

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of calls of cos: each computation of rotary angles has one."""
        return len(graph.find_nodes(op="call_function", target=aten.cos.default))

    def run(self, graph: fx.Graph) -> PassResult:
        positions_T, deltas_T3 = argument(graph, "positions_T"), argument(graph, POSITION_DELTAS.name)
        replacements, near_misses = [], []
        for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            columns = [(rows, other) for column, other in factors(product) if (rows := column_of(column)) is not None]
            found = next((other for rows, other in columns if _are_positions(rows, positions_T)), None)
            if found is None:
                continue
            if not is_parameter(found) or found.meta["val"].shape != (sum(self._sections),):
                near_misses.append(f"{product.name}: the factor of positions has no {sum(self._sections)} frequencies")
                continue
            with graph.inserting_before(product):
                arguments = positions_T, deltas_T3, found, self._sections, self._mixed
                angles = emit(graph, section_angles, *arguments)
            product.replace_all_uses_with(angles)
            replacements.append(Replacement(product.name, angles))
        graph.eliminate_dead_code()
        return PassResult(len(replacements), tuple(near_misses), tuple(replacements))


def _are_positions(rows: fx.Node, positions_T: fx.Node) -> bool:
    """Return whether a value is `positions_T`, maybe repeated three times and selected as in transformers' code."""
    while is_call(rows, *_REPEATING):
        rows = arg(rows, 0)
    return rows is positions_T
