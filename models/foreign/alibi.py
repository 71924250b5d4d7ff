"""Biases of attention scores that are linear in positions (ALiBi), computed by extra elements of queries and keys.

The score of a query and a key at position j is `scale * (q . k) + slope * j` (Press et al. 2022, "Train Short, Test
Long"). The query's position does not matter, since a softmax ignores a bias that all keys share. If `slope / scale` is
an extra element of the query and j an extra element of the key, the product of query and key includes the bias, and
attention needs no other kernel.

16-bit dtypes are not precise enough for j and for the slope. Therefore a key has j as two digits of 8 bits, which are
exact, and a query has each slope as a sum of two numbers: four extra products in all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from compiled_engine.models.foreign.interfaces import Step
from compiled_engine.models.foreign.observation import UnsupportedModelError

_BASE = 256  # bfloat16 has all whole numbers up to this one
LONGEST = _BASE * _BASE
"""Longest text, in tokens, whose positions have two digits."""
_MULTIPLE = 8  # heads are lengthened up to a multiple of this, so that the kernels' loads are aligned
_CHECKED = 4096  # positions for which biases must be linear


class Alibi:
    """Mixin for an attention module: adds ALiBi's biases of scores by extra elements of queries and keys.

    The module must have as many key heads as query heads.
    """

    step: Step | None  # None until the model is adapted
    queries_Hn: torch.Tensor  # the further elements of queries, fp32
    alibi_scale: float  # of the scores
    head_dim: int
    least = 4  # elements that biases need

    def with_positions(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k [1, H, T, d + n] with n extra elements for the bias, from q and k [1, H, T, d]."""
        positions_T = torch.arange(key.shape[2], device=key.device) if self.step is None else self.step.positions_T
        assert positions_T is not None
        of_keys = self.elements_of(positions_T).to(key.dtype).unsqueeze(0).expand(-1, key.shape[1], -1, -1)
        of_queries = torch.ones_like(of_keys) * self.queries_Hn[:, None].to(key.dtype)
        return torch.cat((query, of_queries), dim=-1), torch.cat((key, of_keys), dim=-1)

    def elements_of(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the extra elements of keys, [1 or H, T, n]: the two digits of each position, repeated."""
        digits_T2 = torch.stack((positions_T // _BASE, positions_T % _BASE), dim=-1)
        count = self.queries_Hn.shape[1]
        return torch.cat((digits_T2,) * -(-count // 2), dim=-1)[..., :count].unsqueeze(0)

    def hold_slopes(self, num_heads: int) -> None:
        """Register buffers for the slopes of `num_heads` heads, on the meta device. `fill` fills them later."""
        own: Any = self
        own.step = None
        count = self.least + -(self.head_dim + self.least) % _MULTIPLE
        own.register_buffer("queries_Hn", torch.empty(num_heads, count, device="meta"), persistent=False)

    def fill(self, slopes_H: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill the buffers. slopes_H: the slope of each head's biases. dtype: of the queries."""
        scaled_H = slopes_H / self.alibi_scale
        first_H = scaled_H.to(dtype).float()
        second_H = (scaled_H - first_H).to(dtype).float()
        self.queries_Hn = torch.zeros(self.queries_Hn.shape, device="cpu")
        self.queries_Hn[:, :4] = torch.stack((_BASE * first_H, first_H, _BASE * second_H, second_H), dim=-1)


class RoundedAlibi(Alibi):
    """Mixin like Alibi, for Falcon: its biases are rounded to bfloat16, and then scaled together with the scores.

    The extra element of a head's key is the head's rounded bias.
    """

    slopes_H: torch.Tensor  # bfloat16
    least = 1

    def elements_of(self, positions_T: torch.Tensor) -> torch.Tensor:
        biases_HT = self.slopes_H[:, None] * positions_T
        return biases_HT.unsqueeze(-1).expand(-1, -1, self.queries_Hn.shape[1])

    def hold_slopes(self, num_heads: int) -> None:
        super().hold_slopes(num_heads)
        own: Any = self
        own.register_buffer("slopes_H", torch.empty(num_heads, dtype=torch.bfloat16, device="meta"), persistent=False)

    def fill(self, slopes_H: torch.Tensor, dtype: torch.dtype) -> None:
        self.slopes_H = slopes_H.to(torch.bfloat16)
        self.queries_Hn = torch.zeros(self.queries_Hn.shape, device="cpu")
        self.queries_Hn[:, 0] = 1


def fill_slopes(model: Any) -> None:
    """Compute the slope of each head's biases on the CPU, and fill the buffers of the model's Alibi modules with them.

    A model without such modules is not changed. Raises UnsupportedModelError if the model's biases are not linear in
    positions.
    """
    modules = [module for module in model.modules() if isinstance(module, Alibi) and hasattr(module, "queries_Hn")]
    if not modules:
        return
    num_heads, rounded = modules[0].queries_Hn.shape[0], isinstance(modules[0], RoundedAlibi)
    slopes_H = _rounded_slopes(model, num_heads) if rounded else _slopes(model.base_model, num_heads)
    for module in modules:
        module.fill(slopes_H, next(model.parameters()).dtype)


def _rounded_slopes(model: Any, num_heads: int) -> torch.Tensor:
    """Return the slopes [H] of a Falcon model: its biases at position 1, which are rounded like the slopes."""
    mask_12 = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    slopes_H: torch.Tensor = sys.modules[type(model).__module__].build_alibi_tensor(mask_12, num_heads, torch.float32)
    return slopes_H[:, 0, 1]


def _slopes(decoder: Any, num_heads: int) -> torch.Tensor:
    """Return the slopes [H] of a decoder of transformers, from the biases that the decoder's own method computes.

    Raises UnsupportedModelError if the biases are not linear in positions.
    """
    if hasattr(decoder, "build_mpt_alibi_tensor"):
        biases_H1L = decoder.build_mpt_alibi_tensor(num_heads, _CHECKED, device="cpu")
    else:
        mask_1L = torch.ones(1, _CHECKED, dtype=torch.int64, device="cpu")
        biases_H1L = decoder.build_alibi_tensor(mask_1L, num_heads, torch.float32)
    biases_HL = biases_H1L.float().squeeze(1)
    slopes_H = biases_HL[:, 1] - biases_HL[:, 0]
    linear_HL = biases_HL[:, :1] + slopes_H[:, None] * torch.arange(_CHECKED, device="cpu")
    if not torch.allclose(biases_HL, linear_HL, rtol=1e-5, atol=1e-5):
        raise UnsupportedModelError("its biases of attention scores are not linear in positions")
    return slopes_H
