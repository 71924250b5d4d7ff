"""Allocate the parameters of a rank.

These are the parameters that the rank's compiled graphs name or, in eager mode, the parameters of its model. A
parameter is allocated once, even if several graphs name it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.framework.parameter import (
    BUFFER,
    KEPT,
    KV_SCALES,
    QUANTISED,
    WEIGHT,
    Parameter,
    Scales,
    compute,
)

GIB = 2**30
# Returns uninitialised memory on the device, uint8 [n], for a number of bytes n.
Allocate = Callable[[int], torch.Tensor]
# Most bytes at a time of tensors that are on the device only to compute derived parameters from them.
STAGED_BYTES = 2**28


class InsufficientMemoryError(MemoryError):
    """Raised if the device has too little free memory for the parameters, or for the KV cache of one request."""


@dataclass(frozen=True)
class Weights:
    """A rank's parameters: their descriptions, and their tensors by name.

    A packed parameter is several tensors of the model, its members, concatenated. `tensors` also has these members, and
    buffers. A tied tensor is in `tensors` under each of its names; `parameters` lists it only under the first name.
    """

    parameters: tuple[Parameter, ...]
    tensors: dict[str, torch.Tensor]

    def leaves(self) -> list[Parameter]:
        """Return the descriptions of the tensors that are read from a checkpoint, each tensor once."""
        return list({leaf.name: leaf for parameter in self.parameters for leaf in parameter.leaves()}.values())

    def filled(self) -> list[torch.Tensor]:
        """Return the tensors into which weights are written, each tensor once. No two of them share memory.

        Buffers and recurrence states are not among them.
        """
        written = {part.name: part for parameter in self.parameters for part in _written(parameter)}
        return [self.tensors[name] for name, part in written.items() if _is_filled(part)]

    def batches(self) -> Iterator[list[tuple[Parameter, torch.Tensor]]]:
        """Yield batches of (parameter, tensor). The caller must fill the tensors before the next iteration.

        The first batch has the parameters that are stored as they are read. Other parameters are derived: computed on
        the device from tensors that are read, their sources. Each later batch has the sources of some derived
        parameters, which are computed one by one after the caller has filled the sources. If all sources take more than
        STAGED_BYTES, there are several such batches, and a source that two of them need is yielded twice.
        """
        written = {part.name: part for parameter in self.parameters for part in _written(parameter)}
        yield [(part, self.tensors[part.name]) for part in written.values() if not part.make and part.role != KEPT]
        for group in _grouped([part for part in written.values() if part.make]):
            device = self.tensors[group[0].name].device
            staged = {
                leaf.name: (leaf, torch.empty(leaf.shape, dtype=leaf.torch_dtype, device=device))
                for part in group
                for leaf in part.leaves()
                if leaf.name not in self.tensors
            }
            yield list(staged.values())
            self._make(group, self.tensors | {name: tensor for name, (_, tensor) in staged.items()})

    def _make(self, group: Iterable[Parameter], values: Mapping[str, torch.Tensor]) -> None:
        scales: Scales = {}
        for part in group:
            result = compute(part, lambda leaf: values[leaf.name], scales)
            assert (tuple(result.shape), result.dtype) == (part.shape, part.torch_dtype), part.name
            self.tensors[part.name].copy_(result)


def parameters_of(model: nn.Module, shards: Mapping[str, Shard] | None = None) -> tuple[Parameter, ...]:
    """Return descriptions of all parameters and recurrence states of a model, none packed, for eager mode.

    shards: the shard of each parameter that is divided among ranks, by name.
    """
    shards = shards or {}
    states = (Parameter.of(name, model.get_buffer(name), KEPT) for name in sorted(states_of(model)))
    return (*(Parameter.of(name, p, shard=shards.get(name)) for name, p in model.named_parameters()), *states)


def states_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the model's buffers that hold recurrence states.

    These buffers are described as parameters with the role KEPT.
    """
    names: Any = getattr(model, "row_states", frozenset())
    return frozenset(names)


def materialize(
    model: nn.Module, parameters: Iterable[Parameter], device: torch.device, allocate: Allocate | None = None
) -> Weights:
    """Allocate parameters on the device, and move the model's buffers there.

    Returns the parameters with their tensors. The tensors replace the model's parameters; parameters of the model that
    are not named in `parameters` stay on the meta device. Parameters of the role KEPT are filled with zeros, all others
    are uninitialised. If one graph uses a tensor alone and another graph packs it, the tensor becomes a view of the
    packed tensor.

    parameters: those of all graphs, with repetitions. allocate: provides the memory of the tensors that
    `Weights.filled` lists; None: PyTorch's allocator does.

    Before anything is allocated, raises ValueError for parameters that do not fit the model or each other, and
    InsufficientMemoryError if the device has too little free memory.
    """
    names: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(own), name), []).append(name)
    owners = {name: owner for owner, several in names.items() for name in several}
    named = {p.renamed(lambda name: owners.get(name, name)): None for p in parameters if p.members or p.role != BUFFER}
    stored = sorted(named, key=lambda parameter: not parameter.members)  # packed ones first: members become their views
    _check(stored, {name: model.get_parameter(name) for name in names})
    states = states_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in states}
    _check_memory(stored, buffers.values(), device)

    tensors: dict[str, torch.Tensor] = {name: buffer.to(device) for name, buffer in buffers.items()}
    for parameter in stored:
        given = allocate if all(map(_is_filled, _written(parameter))) else None
        if parameter.members or (parameter.role in (*QUANTISED, KV_SCALES) and parameter.name not in tensors):
            tensor = _empty(torch.empty(parameter.shape, dtype=parameter.torch_dtype, device="meta"), device, given)
        elif parameter.role == KEPT:
            tensor = torch.zeros(parameter.shape, dtype=parameter.torch_dtype, device=device)
        elif parameter.name in tensors:
            continue
        else:
            tensor = _empty(model.get_parameter(parameter.name), device, given)
        _place(parameter, tensor, tensors)

    for owner in names.keys() & tensors.keys():
        tensors |= dict.fromkeys(names[owner], nn.Parameter(tensors[owner], requires_grad=False))
    for name in (*owners, *buffers, *states):
        if name in tensors:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, tensors[name])
    kept = model.state_dict().keys()
    read = (Parameter.of(name, buffer, BUFFER) for name, buffer in buffers.items() if name in kept)
    return Weights((*stored, *read), tensors)


def _place(parameter: Parameter, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Add a parameter's tensor to `tensors`, and a view of its rows for each member of a packed parameter."""
    tensors[parameter.name] = tensor
    if parameter.members and not parameter.make:
        rows = [member.shape[0] for member in parameter.members]
        for member, view in zip(parameter.members, tensor.split(rows), strict=True):
            _place(member, view, tensors)


def _written(parameter: Parameter) -> Iterator[Parameter]:
    """Yield the parts of a parameter that are written separately.

    For a packed parameter, these are the parts of its members. Any other parameter, derived ones included, is one part.
    """
    if not parameter.members or parameter.make:
        yield parameter
    else:
        for member in parameter.members:
            yield from _written(member)


def _is_filled(part: Parameter) -> bool:
    return part.role not in (KEPT, BUFFER)


def _empty(like: torch.Tensor, device: torch.device, allocate: Allocate | None) -> torch.Tensor:
    """Return an uninitialised tensor on the device, with the shape, strides and dtype of `like`.

    allocate: provides the memory; None: PyTorch's allocator does.
    """
    shape, strides = like.shape, like.stride()
    if allocate is None:
        # empty_like of a tensor without storage imports sympy.
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=device)
    return allocate(_extent(shape, strides) * like.itemsize).view(like.dtype).as_strided(shape, strides)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements that a strided tensor spans in memory, from its first to its last element."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _grouped(made: list[Parameter]) -> Iterator[list[Parameter]]:
    """Yield derived parameters in groups, so that the inputs of a group take at most STAGED_BYTES together.

    A parameter whose inputs take more is a group of its own. Parameters with the same inputs follow each other.
    """
    group: list[Parameter] = []
    for parameter in sorted(made, key=lambda p: [leaf.name for leaf in p.leaves()]):
        if group and _staged_bytes([*group, parameter]) > STAGED_BYTES:
            yield group
            group = []
        group.append(parameter)
    if group:
        yield group


def _staged_bytes(made: Iterable[Parameter]) -> int:
    return sum({leaf.name: leaf.nbytes for parameter in made for leaf in parameter.leaves()}.values())


def _check(stored: list[Parameter], own: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless the parameters fit the model and each other.

    own: the model's parameters by name; tied ones are listed under their first name.
    """
    leaves = {leaf.name: leaf for parameter in stored for leaf in parameter.leaves() if leaf.role == WEIGHT}
    if unknown := [name for name in leaves if name not in own]:
        raise ValueError(f"parameters that the model lacks: {', '.join(unknown)}")
    for name, leaf in leaves.items():
        if (leaf.shape, leaf.torch_dtype) != (tuple(own[name].shape), own[name].dtype):
            has = f"{tuple(own[name].shape)} {own[name].dtype}"
            raise ValueError(f"{name} would be {leaf.shape} {leaf.torch_dtype}, but the model's is {has}")
    uses = Counter(part.name for p in stored if p.members and not p.make for part in _written(p))
    if repeated := [name for name, count in uses.items() if count > 1]:
        raise ValueError(f"parameters to be packed more than once: {', '.join(repeated)}")
    if taken := [p.name for p in stored if (p.members or p.role == KEPT) and p.name in own]:
        raise ValueError(f"added parameters must have new names; these are taken: {', '.join(taken)}")
    names = Counter(parameter.name for parameter in stored)
    if ambiguous := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"parameters that are described in two ways: {', '.join(ambiguous)}")


def _check_memory(stored: list[Parameter], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    made = [part for parameter in stored for part in _written(parameter) if part.make]
    members = {part.name for p in stored if p.members and not p.make for part in _written(p)}
    alone = [parameter for parameter in stored if parameter.members or parameter.name not in members]
    staged = max((_staged_bytes(group) for group in _grouped(made)), default=0)
    needed = sum(parameter.nbytes for parameter in alone) + sum(buffer.nbytes for buffer in buffers) + staged
    free = _free_memory(device)
    if needed > free:
        raise InsufficientMemoryError(
            f"the model's parameters need {needed / GIB:.2f} GiB; {device} has {free / GIB:.2f} GiB free"
        )


def _free_memory(device: torch.device) -> int:
    """Return the device's free memory in bytes.

    On CUDA, memory that torch has reserved but does not use counts as free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available
