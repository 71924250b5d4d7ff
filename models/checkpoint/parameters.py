"""Gives a model's parameters their memory: once for each packed tensor, once for each that stands alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import psutil
import torch
from torch import nn

GIB = 2**30


class InsufficientMemoryError(MemoryError):
    """The device has less free memory than the model's parameters, or the KV cache of one request, need."""


def materialize(
    model: nn.Module,
    packed: Mapping[str, Sequence[str]],
    device: torch.device,
    wanted: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate every parameter (uninitialised) on the device, and move the buffers there.

    packed: name of a packed parameter -> its members, parameters that become views of its rows, in this order. wanted:
    the parameters to allocate, those of a stage; the others stay on the meta device. None: all.
    Returns packed tensors, parameters that are in no packed tensor, and buffers, each under its name; a tied
    parameter appears under each of its names. Raises, before anything is allocated, ValueError where `packed` does not
    fit the model, and InsufficientMemoryError for a device that is too small.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(every[name]) for name in every.keys() & set(every if wanted is None else wanted)}
    parameters = {name: parameter for name, parameter in every.items() if id(parameter) in chosen}
    _check_packed(parameters, packed)
    _check_memory([*parameters.values(), *model.buffers()], device)

    placed: dict[int, nn.Parameter] = {}
    tensors: dict[str, torch.Tensor] = {}
    for packed_name, names in packed.items():
        members = [parameters[name] for name in names]
        rows = [member.shape[0] for member in members]
        tensor = torch.empty((sum(rows), *members[0].shape[1:]), dtype=members[0].dtype, device=device)
        tensors[packed_name] = tensor
        for member, view in zip(members, tensor.split(rows), strict=True):
            placed[id(member)] = nn.Parameter(view, requires_grad=False)
    members_of_any = {name for names in packed.values() for name in names}
    for name, parameter in parameters.items():
        if name in members_of_any:
            continue
        if id(parameter) not in placed:
            # empty_like of a tensor without storage imports sympy.
            tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
            placed[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
        tensors[name] = placed[id(parameter)]

    for name, parameter in parameters.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, placed[id(parameter)])
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        tensors[name] = buffer.to(device)
        setattr(model.get_submodule(owner), attribute, tensors[name])
    return tensors


def _check_packed(parameters: dict[str, nn.Parameter], packed: Mapping[str, Sequence[str]]) -> None:
    members = [name for names in packed.values() for name in names]
    unknown = [name for name in members if name not in parameters]
    if unknown:
        raise ValueError(f"parameters to be packed that the model lacks: {', '.join(unknown)}")
    uses = Counter(id(parameters[name]) for name in members)
    repeated = [name for name in members if uses[id(parameters[name])] > 1]
    if repeated:
        raise ValueError(f"parameters to be packed more than once: {', '.join(repeated)}")
    if taken := packed.keys() & parameters.keys():
        raise ValueError(f"packed parameters must have names of their own, these are taken: {', '.join(taken)}")
    for packed_name, names in packed.items():
        kinds = {(parameters[name].shape[1:], parameters[name].dtype) for name in names}
        if len(kinds) != 1:
            shapes = ", ".join(f"{tuple(parameters[name].shape)} {parameters[name].dtype}" for name in names)
            raise ValueError(f"the members of {packed_name} must agree in all but their rows, got {shapes or 'none'}")


def _check_memory(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    needed = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    free = _free_memory(device)
    if needed > free:
        raise InsufficientMemoryError(
            f"the model's parameters need {needed / GIB:.2f} GiB; {device} has {free / GIB:.2f} GiB free"
        )


def _free_memory(device: torch.device) -> int:
    """Bytes; on CUDA what torch has reserved and does not use counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available
