"""Describes how a graph's parameters are made: read from a checkpoint, packed from several, or computed from others.

Passes attach a `Parameter` to each placeholder, the plan stores it as JSON, and the loader allocates and fills the
tensor. Packed and computed parameters are therefore rebuilt from the checkpoint whenever weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework import rounding
from compiled_engine.quantisation import LinearScheme

WEIGHT, BUFFER, KEPT = "weight", "buffer", "kept"
# Roles of the parts of a checkpoint's quantised weight: codes, their scales and zero points, scales of whole rows, the
# order of their columns, and the scale of the linear's inputs.
QUANTISED = ("codes", "scales", "zeros", "row_scales", "columns", "input_scale")
CODES, SCALES, ZEROS, ROW_SCALES, COLUMNS, INPUT_SCALE = QUANTISED
# Role of the scales of an FP8 KV cache: not a tensor of the model, filled by the loader.
KV_SCALES = "kv_scales"
# Scales of weights that are quantised while they are loaded, by the weights and their scheme.
Scales = dict[tuple[tuple["Parameter", ...], str], torch.Tensor]
# First steps that quantise a weight while it is loaded; operand: its scheme.
QUANTISING = (CODES, SCALES)
# Operations on a tensor, in order: ("add", 1.0), ("mul", 2.0), ("to", "float32").
Steps = tuple[tuple[str, float | str], ...]
STEPS: Mapping[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "exp": lambda tensor, _: tensor.exp(),
    "neg": lambda tensor, _: tensor.neg(),
    "to": lambda tensor, dtype: tensor.to(getattr(torch, dtype)),
    # Put packed codes into the order that the kernels of experts read.
    "halves": lambda codes, unit: rounding.in_halves(codes, int(unit)),
    # Exchange rows and columns of the matrices of experts.
    "by_rows": lambda tensor, _: tensor.mT.contiguous(),
    # Repeat each row this many times, for scales of smaller tiles.
    "repeat_rows": lambda tensor, count: tensor.repeat_interleave(int(count), 0),
    "the_same": rounding.the_same,
    # For Hopper's kernel of four-bit codes.
    "words": lambda codes, _: rounding.to_words(codes),
    "transposed": lambda tensor, dtype: tensor.t().to(getattr(torch, dtype)).contiguous(),
}


@dataclass(frozen=True)
class Parameter:
    """The description of a tensor that a rank keeps on its device. shape, dtype: on that device, after sharding.

    - Without members: a tensor of the model, under the model's name for it, or one that a pass adds.
    - With members: the members concatenated along dimension 0. The members are views of this tensor.
    - With `make`: the result of applying the steps in `make` to the concatenated members. The members then have memory
      of their own only if another parameter of the graph needs them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    # WEIGHT: read from the checkpoint. BUFFER: has the model's values. KEPT: starts as zeros and is filled by its pass.
    # Roles in QUANTISED: parts of a checkpoint's quantised weight, named `weight name.role`.
    # KV_SCALES: the scales of a layer's keys and values, [2, K].
    role: str = WEIGHT
    members: tuple[Parameter, ...] = ()
    make: Steps = ()
    shard: Shard | None = None  # part of the undivided tensor; None: all of it
    scheme: str = ""  # how a weight is quantised, as text
    kind: ClassVar[str] = "parameter"

    @staticmethod
    def of(name: str, tensor: torch.Tensor, role: str = WEIGHT, shard: Shard | None = None) -> Parameter:
        """Return the description of a tensor of the model. tensor: only its shape and dtype are read; may be fake."""
        return Parameter(name, tuple(tensor.shape), _name(tensor.dtype), role, shard=shard)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The weight's shape: twice the columns of `shape` if codes are packed two per byte, otherwise `shape`."""
        *leading, columns = self.shape
        return (*leading, columns * self._per_element)

    @property
    def weight_shard(self) -> Shard | None:
        """The weight's shard: twice the columns of `shard` if codes are packed two per byte, otherwise `shard`."""
        shard, count = self.shard, self._per_element
        if shard is None or count == 1:
            return shard
        *leading, columns = shard.whole
        sections = shard.sections
        if shard.divides_input:
            sections = tuple(Section(section.length * count, section.parts) for section in sections)
        return replace(shard, whole=(*leading, columns * count), sections=sections)

    @property
    def _per_element(self) -> int:
        return LinearScheme.parse(self.scheme).weight.format.per_byte if self.role == CODES and self.scheme else 1

    def leaves(self) -> Iterator[Parameter]:
        """Yield the descriptions of the tensors that this parameter is made from.

        These are the members, or members of members, that have none themselves. A parameter without members yields
        itself.
        """
        if not self.members:
            yield self
        for member in self.members:
            yield from member.leaves()

    def renamed(self, rename: Callable[[str], str]) -> Parameter:
        """Return a copy in which the parameter and all its members are renamed. rename: old name -> new name."""
        return replace(self, name=rename(self.name), members=tuple(m.renamed(rename) for m in self.members))

    def divided(self, shards: Mapping[str, Shard]) -> Parameter:
        """Return a copy in which each tensor of the model has its shard. shards: name -> shard; missing: no shard."""
        if not self.members:
            return replace(self, shard=shards.get(self.name))
        return replace(self, members=tuple(member.divided(shards) for member in self.members))

    @staticmethod
    def from_json(item: Mapping[str, Any]) -> Parameter:
        """Return the parameter that was written to JSON as `dataclasses.asdict(parameter)`."""
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
    """Return the description of the members concatenated along dimension 0.

    Raises ValueError if their dtypes, or their sizes in other dimensions, differ.
    """
    if len({(member.shape[1:], member.dtype) for member in members}) != 1:
        shapes = ", ".join(f"{member.shape} {member.dtype}" for member in members)
        raise ValueError(f"the members of {name} must agree in all but their rows, got {shapes or 'none'}")
    rows = sum(member.shape[0] for member in members)
    return Parameter(name, (rows, *members[0].shape[1:]), members[0].dtype, members[0].role, members)


def made(parameter: Parameter, step: str, operand: float | str, result: torch.Tensor) -> Parameter:
    """Return the description of the tensor that an operation computes from the parameter when weights are loaded.

    step: the operation, a key of STEPS or an item of QUANTISING. operand: its argument. result: a tensor, maybe fake,
    with the shape and dtype of the computed tensor.
    """
    base = parameter if parameter.make else replace(parameter, members=(parameter,), shard=None)
    name = f"{parameter.name}.{step}({operand})"
    shape, dtype = tuple(result.shape), _name(result.dtype)
    return replace(base, name=name, shape=shape, dtype=dtype, make=(*base.make, (step, operand)))


def compute(
    parameter: Parameter,
    leaf: Callable[[Parameter], torch.Tensor],
    scales: Scales | None = None,
) -> torch.Tensor:
    """Compute the value of a parameter: concatenate its members' values and apply its steps.

    leaf: returns the value of a parameter without members. scales: a cache, read and filled here. The codes and the
    scales of a weight that is quantised at loading are two parameters; with the cache, its scales are computed once.
    """
    if not parameter.members:
        return leaf(parameter)
    parts = [compute(member, leaf, scales) for member in parameter.members]
    value = parts[0] if len(parts) == 1 else torch.cat(parts)
    for step, operand in parameter.make:
        if step in QUANTISING:
            value = _quantised(value, step, (parameter.members, str(operand)), {} if scales is None else scales)
        else:
            value = STEPS[step](value, operand)
    return value


def _quantised(weight: torch.Tensor, step: str, key: tuple[tuple[Parameter, ...], str], scales: Scales) -> torch.Tensor:
    if key not in scales:
        scales[key] = rounding.weight_scales(weight, key[1])
    return scales[key] if step == SCALES else rounding.weight_codes(weight, key[1], scales[key])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
