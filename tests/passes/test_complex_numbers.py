"""Complex numbers in a graph become pairs of real ones; results stay, and ops that the pass does not know are named."""

from __future__ import annotations

import pytest
import torch
from pass_cases import graph_of, random_tensors, rewrite, run

from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.layout.complex_numbers import ComplexNumbers, has_complex_value

EVERY_BATCH = CompileRange(1, 64)


def turns_of(angles: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([angles.cos(), angles.sin()], -1))


def rotated(x: torch.Tensor, lengths: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of heads [T, H, d] as DeepSeek-V2 does, and lengthen them."""
    turns = torch.view_as_complex(torch.stack([lengths, 0 * lengths], -1)) * 1.5 * turns_of(angles)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns.unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("dim", [1, -2])
def test_the_results_stay(dim: int) -> None:
    inputs = random_tensors(x=(5, 3, 8), lengths=(5, 4), angles=(5, 4))
    module = graph_of(rotated, inputs, {})
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default):
        if has_complex_value(node):
            node.args = (node.args[0], dim)  # the same dimension
    expected = ComplexNumbers().contract(module.graph, EVERY_BATCH)
    result = rewrite(ComplexNumbers(), module)
    assert result.matches == expected > 0
    assert not result.near_misses
    assert not any(map(has_complex_value, module.graph.nodes))
    torch.testing.assert_close(run(module, inputs), rotated(**inputs))


def test_ops_that_are_not_known_are_named_and_kept() -> None:
    def conjugate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).reciprocal())

    inputs = random_tensors(x=(5, 2))
    module = graph_of(conjugate, inputs, {})
    result = rewrite(ComplexNumbers(), module)
    assert [miss for miss in result.near_misses if "reciprocal" in miss and "not known" in miss]
    torch.testing.assert_close(run(module, inputs), conjugate(**inputs))
