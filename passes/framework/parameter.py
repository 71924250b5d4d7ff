"""The description of a parameter of a graph: read from a checkpoint, packed from several, or computed from others.

Passes put descriptions on a graph's placeholders, the plan keeps them as JSON, and the loader allocates and fills what
they name. So what a pass has packed or computed follows from the checkpoint each time that weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework import rounding

WEIGHT, BUFFER, KEPT = "weight", "buffer", "kept"
# Roles of a quantised weight of a checkpoint: its codes, their scales, and the scale of the linear's inputs.
CODES, SCALES, INPUT_SCALE = QUANTISED = ("codes", "scales", "input_scale")
# The role of factors of the codes in an FP8 KV cache: no tensor of the model, filled by the loader.
KV_SCALES = "kv_scales"
# Operations on a tensor, in order: ("add", 1.0), ("mul", 2.0), ("to", "float32").
Steps = tuple[tuple[str, float | str], ...]
STEPS: Mapping[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "to": lambda tensor, dtype: tensor.to(getattr(torch, dtype)),
    # Make from a weight that is quantised while it is loaded; operand: its scheme.
    "codes": rounding.weight_codes,
    "scales": rounding.weight_scales,
    # Repeat each row this many times, for scales of smaller tiles.
    "repeat_rows": lambda tensor, count: tensor.repeat_interleave(int(count), 0),
    "the_same": rounding.the_same,
}


@dataclass(frozen=True)
class Parameter:
    """A tensor that a rank keeps on its device, with the shape and dtype that it has there.

    Without members it is a tensor of the model, under the model's name. role: a weight is read from the checkpoint, a
    buffer has the model's values. A kept one is no tensor of the model: it begins as zeros, and its pass fills it. The
    QUANTISED roles are the parts of a quantised weight in a checkpoint; they are named `weight name.role`. KV_SCALES
    are those of a layer's keys and values, [2, K]. scheme: how a weight is quantised, as text. shard: the part of the
    undivided tensor; None for all of it. With members it contains their rows, and they are views of it. With `make` it
    is the result of these steps on those rows, and members have memory of their own only if they are named elsewhere
    too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = WEIGHT
    members: tuple[Parameter, ...] = ()
    make: Steps = ()
    shard: Shard | None = None
    scheme: str = ""
    kind: ClassVar[str] = "parameter"

    @staticmethod
    def of(name: str, tensor: torch.Tensor, role: str = WEIGHT, shard: Shard | None = None) -> Parameter:
        """Describe a tensor of the model, which may be fake or on the meta device."""
        return Parameter(name, tuple(tensor.shape), _name(tensor.dtype), role, shard=shard)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def leaves(self) -> Iterator[Parameter]:
        """Yield the tensors of the model that it consists of, or is made of."""
        if not self.members:
            yield self
        for member in self.members:
            yield from member.leaves()

    def renamed(self, rename: Callable[[str], str]) -> Parameter:
        """Return the same description with other names for it and its members."""
        return replace(self, name=rename(self.name), members=tuple(m.renamed(rename) for m in self.members))

    def divided(self, shards: Mapping[str, Shard]) -> Parameter:
        """Return the same description with these shards, by name, of the tensors that it consists of."""
        if not self.members:
            return replace(self, shard=shards.get(self.name))
        return replace(self, members=tuple(member.divided(shards) for member in self.members))

    @staticmethod
    def from_json(item: Mapping[str, Any]) -> Parameter:
        """Read the fields of `dataclasses.asdict` as JSON has them."""
        shard = item["shard"]
        if shard is not None:
            sections = tuple(Section(*section) for section in shard["sections"])
            shard = Shard(**shard | {"whole": tuple(shard["whole"]), "sections": sections})
        changes = {
            "shape": tuple(item["shape"]),
            "members": tuple(map(Parameter.from_json, item["members"])),
            "make": tuple((step, operand) for step, operand in item["make"]),
            "shard": shard,
        }
        return Parameter(**{**item, **changes})


def packed(name: str, members: tuple[Parameter, ...]) -> Parameter:
    """Describe the members' rows one below another. Raises ValueError if members differ in more than their rows."""
    if len({(member.shape[1:], member.dtype) for member in members}) != 1:
        shapes = ", ".join(f"{member.shape} {member.dtype}" for member in members)
        raise ValueError(f"the members of {name} must agree in all but their rows, got {shapes or 'none'}")
    rows = sum(member.shape[0] for member in members)
    return Parameter(name, (rows, *members[0].shape[1:]), members[0].dtype, members[0].role, members)


def made(parameter: Parameter, step: str, operand: float | str, result: torch.Tensor) -> Parameter:
    """Describe the result of one more step; result: a tensor of its shape and dtype, which may be fake."""
    base = parameter if parameter.make else replace(parameter, members=(parameter,), shard=None)
    name = f"{parameter.name}.{step}({operand})"
    shape, dtype = tuple(result.shape), _name(result.dtype)
    return replace(base, name=name, shape=shape, dtype=dtype, make=(*base.make, (step, operand)))


def compute(parameter: Parameter, leaf: Callable[[Parameter], torch.Tensor]) -> torch.Tensor:
    """Compute the value of a parameter. leaf: returns the values of the model's tensors."""
    if not parameter.members:
        return leaf(parameter)
    parts = [compute(member, leaf) for member in parameter.members]
    value = parts[0] if len(parts) == 1 else torch.cat(parts)
    for step, operand in parameter.make:
        value = STEPS[step](value, operand)
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
