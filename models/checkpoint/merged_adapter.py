"""Merge a LoRA adapter into a checkpoint's tensors while they are read.

Adapters may have any rank, use DoRA, change embeddings and replace whole tensors. The merged model runs like any other
model. Matrix products are computed in fp32, and results are rounded once, to the wider of the checkpoint's and the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_engine.models.checkpoint.adapter_folder import (
    EMBEDDING,
    OUTPUT,
    Adapter,
    LowRank,
    is_finite,
    match_modules,
)
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES


def merge(adapter: Adapter, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors, by name, with the adapter merged. dtype: the model's.

    If the adapter changes a tied embedding or output projection, the result holds a tensor for each of them. Raises
    ValueError if the checkpoint lacks a module of the adapter, or stores it quantised or in another shape, and if
    results are not finite.
    """
    merged = dict(tensors)
    if f"{OUTPUT}.weight" not in tensors and adapter.parts_tied_weights:
        merged |= {f"{OUTPUT}.weight": t for name, t in tensors.items() if name.endswith(f"{EMBEDDING}.weight")}
    replaced = {**adapter.whole, **{f"{module}.weight": tensor for module, tensor in adapter.bases.items()}}
    for name, tensor in replaced.items():
        place = name if name in merged else name.replace("language_model.", "")
        if place not in merged:
            raise ValueError(f"{adapter.path}: the base model has no tensor {name}")
        if merged[place].shape != tensor.shape:
            raise _misfit(adapter, name, tensor, merged[place])
        _require_finite(adapter, name, tensor, dtype)
        merged[place] = tensor
    known = {name.removesuffix(".weight") for name in merged if name.endswith(".weight")}
    names = match_modules(adapter, known)
    for module, low_rank in (*adapter.linears.items(), *adapter.embeddings.items()):
        name = f"{names[module]}.weight"
        transposed = module in adapter.embeddings or adapter.transposed
        merged[name] = _changed(adapter, name, merged[name], low_rank, dtype, transposed=transposed)
    return merged


def _changed(
    adapter: Adapter, name: str, weight: torch.Tensor, low_rank: LowRank, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    """Return the tensor `weight`, called `name`, with `low_rank` merged into it.

    transposed: whether the weight is stored as [K, N]. dtype: the model's. Raises ValueError if the weight is quantised
    or has another shape, or if the result is not finite.
    """
    if weight.dtype not in STORED_DTYPES:
        raise ValueError(
            f"{adapter.path}: {name} is quantised ({weight.dtype}); allowed: a base model of full precision"
        )
    delta_NK = low_rank.scale * (low_rank.b_NR.float() @ low_rank.a_RK.float())
    weight_NK = weight.T if transposed else weight
    if delta_NK.shape != weight_NK.shape:
        raise _misfit(adapter, name, delta_NK, weight_NK)
    changed_NK = weight_NK.float() + delta_NK
    if low_rank.magnitude_N is not None:
        changed_NK *= (low_rank.magnitude_N.float() / changed_NK.norm(dim=1)).unsqueeze(1)
    changed = changed_NK.T if transposed else changed_NK
    _require_finite(adapter, name, changed, dtype)
    return changed.to(torch.promote_types(weight.dtype, dtype)).contiguous()


def _require_finite(adapter: Adapter, name: str, changed: torch.Tensor, dtype: torch.dtype) -> None:
    if not is_finite(changed, dtype):
        raise ValueError(f"{adapter.path}: {name} would have values that are not finite in {dtype}")


def _misfit(adapter: Adapter, name: str, found: torch.Tensor, expected: torch.Tensor) -> ValueError:
    return ValueError(
        f"{adapter.path}: {name} would be {list(found.shape)}, but the base model's is {list(expected.shape)}"
    )
