"""Foreign code without its batch dimension computes what it computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import graph_of, random_tensors, rewrite, run

from compiled_engine.passes.layout.normalise_layout import NormaliseLayout

T, H, D = 5, 3, 4


def repeated_heads(x: torch.Tensor) -> torch.Tensor:
    """As where keys are repeated for the queries of a group: a new dimension in the middle."""
    heads = x[None].transpose(1, 2)  # [1, H, T, d]
    return heads[:, :, None].expand(1, H, 2, T, D).reshape(1, 2 * H, T, D).transpose(1, 2)[0]


def repeated_between(x: torch.Tensor) -> torch.Tensor:
    return x[None].unsqueeze(2).expand(1, T, 6, H, D) * 2


def repeated_at_both_ends(x: torch.Tensor) -> torch.Tensor:
    return x[None, ..., None].expand(2, T, H, D, 3).sum(0)


@pytest.mark.parametrize("function", [repeated_heads, repeated_between, repeated_at_both_ends])
def test_values_that_are_repeated(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = random_tensors(x=(T, H, D))
    module = graph_of(lambda x: (function(x),), inputs, {})
    rewrite(NormaliseLayout(), module)
    torch.testing.assert_close(run(module, inputs)[0], function(**inputs), rtol=0, atol=0)
