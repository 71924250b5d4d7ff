"""What only looks like a rotation of queries and keys before attention: it stays, and the reason is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_rope_kv_write import (
    Rotation,
    attention_graph,
    interleaved,
    norm_with,
    scaled,
    textbook_norm,
    turned,
    unnormed,
)

from compiled_engine.models.textbook.layers import rotate
from compiled_engine.passes.rope.rope_kv_write import RopeKVWrite


def overlapping(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(x[..., :8], cos, sin), x[..., 4:12]), dim=-1)


def from_the_middle(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(x[..., 4:12], cos, sin), x[..., 8:]), dim=-1)


def of_a_head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(x[:, :1], cos, sin), x[:, 1:]), dim=1)


def in_fp64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(x.double(), cos, sin).to(x.dtype)


def normed_and_its_weight(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return textbook_norm(x, weight), weight


def normed_again(pair: Any, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return textbook_norm(rotate(pair[0], cos, sin), pair[1])


def cast(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(x, cos, sin).float().to(x.dtype)


def twice(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.add(x * cos, torch.cat((-second, first), dim=-1) * sin, alpha=2)


def uneven(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.split(10, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def halves_with(**alphas: float) -> Rotation:
    """As in_halves, with a multiple of what is subtracted or added."""

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        difference = torch.sub(first * cos, second * sin, alpha=alphas.get("difference", 1))
        return torch.cat((difference, torch.add(second * cos, first * sin, alpha=alphas.get("total", 1))), dim=-1)

    return rotation


def narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def weight_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def one_plus_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return textbook_norm(x, 1 + weight)


def halves_of(change: str) -> Rotation:
    """As in_halves, but for one thing."""

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :8], (x + 1 if change == "two values" else x)[..., 8:]
        one, other = first * cos, second * cos
        less = one + second * sin if change in ("backwards", "two sums") else one - second * sin
        more = other - first * sin if change in ("backwards", "two differences") else other + first * sin
        return torch.cat((more, less) if change == "swapped" else (less, more), dim=-1)

    return rotation


def neighbours_of_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.stack((-x[..., half:], x[..., :half]), dim=-1).flatten(-2) * sin


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"rotate_q": halves_of(change), "rotate_k": halves_of(change), "cos": (7, 1, 8), "sin": (7, 1, 8)}, reason)
            for change, reason in (
                *((change, "q: it is not rotated") for change in ("two values", "backwards", "two sums", "swapped")),
                ("two differences", "q: it is not rotated"),
            )
        ),
        ({"rotate_q": neighbours_of_halves}, "q: it is not x \\* cos"),
        ({"rotate_q": interleaved}, "rotated in different ways"),
        ({"rotate_q": turned("back")}, "q: it is not x \\* cos"),
        ({"rotate_k": turned("back")}, "k: it is not x \\* cos"),
        ({"rotate_q": turned("heads")}, "q: it is not x \\* cos"),
        ({"rotate_q": turned("another x")}, "q: it is not x \\* cos"),
        ({"rotate_q": turned("other parts")}, "q: it is not x \\* cos"),
        ({"rotate_q": uneven, "rotate_k": uneven}, "q: it is not x \\* cos"),
        ({"rotate_q": twice}, "q: it is not rotated"),
        *(
            ({"rotate_q": rotation, "rotate_k": rotation, "cos": (7, 1, 8), "sin": (7, 1, 8)}, "q: it is not rotated")
            for rotation in (halves_with(difference=2), halves_with(total=2))
        ),
        ({"rotate_k": lambda x, cos, sin: x}, "k: it is not rotated"),
        (
            {"rotate_q": overlapping, "rotate_k": overlapping, "cos": (7, 1, 8), "sin": (7, 1, 8)},
            "not the rest of each head",
        ),
        (
            {"rotate_q": from_the_middle, "rotate_k": from_the_middle, "cos": (7, 1, 8), "sin": (7, 1, 8)},
            "not the rest of each head",
        ),
        ({"rotate_q": of_a_head, "rotate_k": of_a_head}, "q: it is not rotated"),
        ({"rotate_q": in_fp64, "rotate_k": in_fp64}, "q: a cast follows the rotation"),
        (
            {
                **{"norm_q": normed_and_its_weight, "norm_k": normed_and_its_weight},
                **{"rotate_q": normed_again, "rotate_k": normed_again},
            },
            "q: norms precede and follow the rotation",
        ),
        ({"rotate_q": cast, "rotate_k": cast}, "q: it is not rotated"),
        ({"rotate_v": rotate}, "v is rotated too"),
        ({"rotate_k": lambda x, cos, sin: rotate(x, sin, cos)}, "different angles"),
        ({"rotate_k": lambda x, cos, sin: rotate(x, cos * 2, sin)}, "different angles"),
        ({"rotate_k": lambda x, cos, sin: rotate(x, cos, sin * 2)}, "different angles"),
        ({"cos": (16,), "sin": (16,)}, r"cos or sin is not \[tokens, heads, head size\]"),
        ({"cos": (1, 1, 16)}, r"cos or sin is not \[tokens, 1, head size\]"),
        ({"rotate_q": scaled}, "q: a product follows the rotation"),
        ({"also": lambda q, k: (q,)}, "rotated q is used elsewhere"),
        ({"also": lambda q, k: (k,)}, "rotated k is used elsewhere"),
        ({"norm_k": unnormed}, "normed differently"),
        ({"norm_k": norm_with(1e-5)}, "normed differently"),
        ({"norm_q": narrow}, "fp32"),
        ({"norm_q": weight_in_fp32}, "normed differently"),
        ({"norm_k": norm_with(1e-6, dim=-2)}, "mean of its squares"),
        ({"norm_q": one_plus_weight}, "weight of its norm"),
        ({"k_weight": (1,)}, "weight of its norm"),
        ({"q_weight": (4, 1)}, "weight of its norm"),
    ],
)
def test_what_only_looks_like_it_stays_and_is_named(changes: dict[str, Any], reason: str) -> None:
    module = attention_graph(**changes)
    before = str(module.graph)
    result = RopeKVWrite().run(module.graph)
    assert (result.matches, len(result.near_misses), str(module.graph)) == (0, 1, before)
    assert re.search(reason, result.near_misses[0])
