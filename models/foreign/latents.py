"""Multi-head latent attention: keys and values of all heads are linear in one latent row for each token.

A key of head h is (W_h c, p): c is the token's latent, p a rotated part that all heads share. A value is V_h c. So the
cache can hold one row (c, p) for each token, where keys and values would take a hundred times as much memory.
`compiled_engine/attention/latents.py` describes how queries attend to rows.

transformers' modules compute keys and values from latents and rotated parts in their method `expand_kv`; here the
method returns rows and latents instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

_METHOD = "expand_kv"


class LatentAttention:
    """Mixin for an attention module with latents: its keys are the rows (c, p), its values the latents c.

    The op of latent attention takes the weight of kv_b_proj, and expands rows itself where that is cheaper.
    """

    kv_b_proj: nn.Linear  # from latents to the heads' keys, without the rotated part, and values

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [1, 1, T, r + p] as keys and latents [1, 1, T, r] as values.

        kv_nope: latents [1, 1, T, r]. k_rot: rotated parts [1, 1, T, p].
        """
        return torch.cat((kv_nope, k_rot), dim=-1), kv_nope


class Expansion(NamedTuple):
    """The arguments (latents, rotated) and results (keys, values) of a call of `expand_kv`."""

    latents: torch.Tensor
    rotated: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@contextmanager
def expansions_recorded(model: nn.Module) -> Iterator[dict[nn.Module, Expansion]]:
    """Record the last call of `expand_kv` of each module within a `with` block. Yields the calls by module."""
    found: dict[nn.Module, Expansion] = {}
    modules = [module for module in model.modules() if hasattr(module, _METHOD)]

    def record(module: Any) -> None:
        expand = module.expand_kv

        def expanded(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = expand(latents, rotated)
            found[module] = Expansion(latents, rotated, keys, values)
            return keys, values

        module.expand_kv = expanded

    for each in modules:
        record(each)
    try:
        yield found
    finally:
        for each in modules:
            del each.expand_kv


def latent_dim_of(module: Any, expansion: Expansion | None, keys: torch.Tensor, values: torch.Tensor) -> int:
    """Return the size of a module's latents if LatentAttention can compute the module's attention; 0 if it cannot.

    expansion: the module's last call of `expand_kv`, None without one. keys, values: those of the module's attention,
    which must be the results of that call.
    """
    if expansion is None or expansion.keys is not keys or expansion.values is not values:
        return 0
    linear, latent_dim = getattr(module, "kv_b_proj", None), expansion.latents.shape[-1]
    if type(linear) is not nn.Linear or linear.bias is not None or linear.weight.shape[1] != latent_dim:
        return 0
    if not expansion.latents.shape[:2] == expansion.rotated.shape[:2] == (1, 1):
        return 0
    own = keys.shape[-1] - expansion.rotated.shape[-1]
    sizes = keys.shape[1] * (own + values.shape[-1]), own
    if sizes != (linear.weight.shape[0], getattr(module, "qk_nope_head_dim", None)):
        return 0
    fits = values.shape[-1] <= keys.shape[-1]  # ForeignAttention takes the result's memory from the shape of queries
    return latent_dim if fits and _expands_linearly(type(module)) else 0


def _expands_linearly(module_class: Any) -> bool:
    """Return whether a class's `expand_kv` computes keys (W_h c, p) and values V_h c from c and p.

    To find out, the method is called for small sizes with whole numbers, for which results are exact.
    """
    heads, own, shared, value, latent, tokens = 2, 3, 2, 5, 4, 3
    weight_Hdr = torch.arange(heads * (own + value) * latent, dtype=torch.float32, device="cpu")
    weight_Hdr = weight_Hdr.view(heads, own + value, latent) % 7
    latents_Tr, rotated_Tp = (
        torch.arange(tokens * size, dtype=torch.float32, device="cpu").view(tokens, size) % 5
        for size in (latent, shared)
    )
    small = SimpleNamespace(
        kv_b_proj=lambda x: x @ weight_Hdr.flatten(0, 1).t(),
        qk_nope_head_dim=own,
        qk_rope_head_dim=shared,
        v_head_dim=value,
    )
    keys_HTd, values_HTv = (latents_Tr @ part.transpose(1, 2) for part in weight_Hdr.split([own, value], dim=1))
    keys_HTd = torch.cat((keys_HTd, rotated_Tp.expand(heads, -1, -1)), dim=-1)
    try:
        found = module_class.expand_kv(small, latents_Tr[None, None], rotated_Tp[None, None])
        return all(map(torch.equal, found, (keys_HTd[None], values_HTv[None])))
    except Exception:  # another method may need anything else
        return False
