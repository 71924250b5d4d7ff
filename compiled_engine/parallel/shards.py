"""Finds the slice of each parameter that a rank holds, and adds the all-reduces that an eager model needs.

Slices are found by comparing the shapes in the whole model with those in a model of one rank's sizes. In a compiled
model a pass inserts the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from compiled_engine.parallel.group import current_group


class Section(NamedTuple):
    """`length` consecutive rows or columns of a whole parameter, cut into `parts` equal parts for the ranks."""

    length: int
    parts: int


class Place(NamedTuple):
    """`length` rows or columns, which begin at `start` in the whole parameter and at `local` in a rank's slice."""

    start: int
    length: int
    local: int


@dataclass(frozen=True)
class Shard:
    """The division of a parameter of shape `whole` among ranks along `dim`.

    dim None: every rank has the whole parameter.
    """

    whole: tuple[int, ...]
    dim: int | None = None
    # Adjacent parts along `dim`, each cut separately: several if the parameter is packed. If a section has fewer parts
    # than ranks, neighbouring ranks hold the same part.
    sections: tuple[Section, ...] = ()
    # Other ranks hold zeros, so that the sum over ranks counts it once: the bias of a linear with a divided input.
    first_only: bool = False
    # The last dimension is that of the outputs, as in the transpose of a linear's weight, or in biases of experts.
    outputs_last: bool = False
    # The weight of a norm over a row of which each rank has a part, so that the mean of squares is one over the ranks.
    norms_row: bool = False

    @property
    def divides_input(self) -> bool:
        """Whether the parameter is divided along its inputs, so that each rank's matrix product is a partial sum."""
        return self.dim is not None and self.dim > 0 and self.dim == len(self.whole) - 1 - self.outputs_last

    def places(self, rank: int, num_ranks: int) -> list[Place]:
        """Return the place of a rank's part of each section, in the whole parameter and in the rank's slice.

        Sections are the parts of a packed parameter, such as q, k and v. Places count along the dimension `dim`, which
        must not be None.
        """
        found, start, local = [], 0, 0
        for length, parts in self.sections:
            size = length // parts
            found.append(Place(start + rank * parts // num_ranks * size, size, local))
            start += length
            local += size
        return found

    def of(self, tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
        """Return the slice of `tensor` that a rank holds, a view unless there are several sections.

        If first_only is True, ranks other than the first get zeros, so that a sum over ranks counts the tensor once.
        """
        if self.first_only and rank:
            return torch.zeros_like(tensor)
        if self.dim is None:
            return tensor
        parts = [tensor.narrow(self.dim, place.start, place.length) for place in self.places(rank, num_ranks)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def divides_vocabulary(name: str, shard: Shard) -> bool:
    """Return whether the parameter is an embedding of whose rows each rank has a part."""
    return shard.dim == 0 and "embed" in name


def compare_shapes(whole: nn.Module, local: nn.Module) -> dict[str, Shard]:
    """Return the shard of each parameter by the parameter's name. Tied parameters are listed under each of their names.

    whole, local: the whole model, and the model with the sizes of one rank. A module's attribute `packed`, parameter
    name -> sizes, gives the sizes of the sections (such as q, k and v) that a parameter consists of; its attribute
    `outputs_last` names parameters whose last dimension is that of the outputs, and `norms_row` weights of norms over
    divided rows. Raises ValueError for a parameter that would be cut along more than one dimension.
    """
    packed, packed_here = _packed(whole), _packed(local)
    here = dict(local.named_parameters(remove_duplicate=False))
    found = {
        name: shard_of(name, tuple(p.shape), tuple(here[name].shape), packed.get(name), packed_here.get(name))
        for name, p in whole.named_parameters(remove_duplicate=False)
    }
    for path, module in whole.named_modules():
        for name in getattr(module, "outputs_last", ()):
            found[f"{path}.{name}"] = replace(found[f"{path}.{name}"], outputs_last=True)
        for name in getattr(module, "norms_row", ()):
            found[f"{path}.{name}"] = replace(found[f"{path}.{name}"], norms_row=True)
    for name, shard in list(found.items()):
        owner, _, attribute = name.rpartition(".")
        beside = f"{owner}.bias" if attribute == "weight" else f"{name}_bias"
        if shard.divides_input and (bias := found.get(beside)) is not None:
            found[beside] = Shard(bias.whole, first_only=True)
    return found


def shard_of(
    name: str,
    whole: tuple[int, ...],
    local: tuple[int, ...],
    packed: Sequence[int] | None = None,
    packed_here: Sequence[int] | None = None,
) -> Shard:
    """Return a parameter's shard, found from the shapes of the whole parameter and of a rank's slice.

    packed, packed_here: sizes of the sections of a packed parameter, in the whole parameter and in a rank's slice.
    Raises ValueError if the shapes differ in more than one dimension.
    """
    cut = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=True)) if a != b]
    if len(cut) > 1:
        raise ValueError(f"{name} would be cut along dimensions {cut}; a rank's share is cut along one")
    if not cut:
        return Shard(whole)
    sizes = zip(packed or (whole[cut[0]],), packed_here or (local[cut[0]],), strict=True)
    return Shard(whole, cut[0], tuple(Section(length, length // part) for length, part in sizes))


def _packed(model: nn.Module) -> dict[str, Sequence[int]]:
    return {
        f"{path}.{name}": sizes
        for path, module in model.named_modules()
        for name, sizes in getattr(module, "packed", {}).items()
    }


def add_collectives(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Register hooks on modules of `model` that sum the modules' outputs over the ranks.

    The hooks are on linears with a divided input, on experts, and on embeddings with a divided vocabulary. Norms of
    divided rows get a forward that averages over the ranks. shards: the shard of each parameter by name, see
    compare_shapes.
    """
    for path, module in model.named_modules():
        own = {name: shards.get(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
        if any(shard is not None and shard.divides_input for shard in own.values()):
            module.register_forward_hook(_summed)
        elif isinstance(module, nn.Embedding) and (shard := own["weight"]) is not None and shard.dim == 0:
            divided = _DividedEmbedding(module.weight.shape[0])
            module.register_forward_pre_hook(divided.before)
            module.register_forward_hook(divided.after)
        elif any(shard is not None and shard.norms_row for shard in own.values()):
            module.forward = _averaging(module.forward)


def _summed(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return current_group().all_reduce(output)


def _averaging(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the forward of a norm that runs `forward` with each mean of squares averaged over the ranks."""

    def run(*arguments: Any, **keywords: Any) -> torch.Tensor:
        with _RootsOfAverages():
            return forward(*arguments, **keywords)

    return run


class _RootsOfAverages(TorchFunctionMode):
    """Averages the argument of `torch.rsqrt` over the ranks: a mean of squares plus a constant that ranks share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rsqrt:
            group = current_group()
            return func(group.all_reduce(args[0] / group.size))
        return func(*args, **(kwargs or {}))


class _DividedEmbedding:
    """Hooks of an embedding with a divided vocabulary.

    Tokens whose rows other ranks have get zeros, and then the outputs are summed over ranks. The embedding's own
    forward, which may scale its rows, still runs.
    """

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._elsewhere: torch.Tensor

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
        """Return the token ids converted to this rank's row indices; tokens whose rows other ranks have get row 0."""
        rows = arguments[0] - current_group().rank * self._num_rows
        self._elsewhere = (rows < 0) | (rows >= self._num_rows)
        return (rows.masked_fill(self._elsewhere, 0),)

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return current_group().all_reduce(output.masked_fill(self._elsewhere.unsqueeze(-1), 0.0))
