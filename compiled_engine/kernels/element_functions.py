"""Functions and sums whose bits for an element follow from its operands alone, wherever the element is.

On a CPU, PyTorch computes the last elements of a tensor by other instructions than whole vectors, and on every device
it chooses the order of a sum by the tensor's shape. The functions here use operations whose result IEEE 754 fixes, and
the library's exp and log1p, which compute every element alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Softplus of larger numbers is the number itself, as in PyTorch.
_LINEAR_FROM = 20.0


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    return 1 / torch.sqrt(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > _LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=_LINEAR_FROM))))


# By the names of PyTorch's functions.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "rsqrt": rsqrt,
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
}


def sum_in_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum over dimension `dim`, which is left out: halves are added until one element is left.

    The order follows from the size of the dimension alone.
    """
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        first, second = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        added = first.narrow(dim, 0, size - half) + second
        x = added if size == 2 * half else torch.cat((added, first.narrow(dim, half - 1, 1)), dim)
    return x.squeeze(dim)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension."""
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / sum_in_halves(powers, -1).unsqueeze(-1)
