"""Defines placements of checkpoint tensors in a model: plain data, so that later starts need not import transformers.

A checkpoint may store one tensor of the model as several tensors (such as one for each expert), or several as one. In
both cases a part of a checkpoint's tensor equals a part of a model's tensor. So each byte is read once and written to
its final position, which may be in a packed parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from compiled_engine.parallel.shards import Place
from compiled_engine.quantisation_names import MXFP4

Span = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Part `taken` of tensor `source` becomes part `placed` of parameter `target`.

    A part is a (start, end) for each dimension. Both parts have the same number of elements, in the same order unless
    `transposed` is set.
    """

    source: str
    taken: tuple[Span, ...]
    target: str
    placed: tuple[Span, ...]
    transposed: bool = False  # the source's last two dimensions are swapped
    # Encoding of the values: empty for none; MXFP4, with scales in `beside`; or a LinearScheme as text, with scales,
    # zero points and the order of columns in `beside`. `taken` is a part of the decoded values.
    decode: str = ""
    beside: tuple[str, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """Whether the source holds MXFP4 codes of experts. Their scales are in the tensor that `beside` names."""
        return self.decode == MXFP4

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source, *self.beside)

    def cut(self, dim: int, places: Sequence[Place]) -> list[Placement]:
        """Return the parts of this placement that fall into a rank's slice of the parameter `target`.

        In the result, `placed` counts from the start of the slice. places: the parts of dimension `dim` that the slice
        consists of. Raises ValueError if the source cannot be divided along that dimension.
        """
        back = dim - len(self.placed)  # negative index, since a source may lack leading dimensions
        if self.transposed and back >= -2:
            back = -3 - back
        (first, end), taken = self.placed[dim], self.taken[back] if len(self.taken) >= -back else None
        found = []
        for start, length, local in places:
            low, high = max(first, start), min(end, start + length)
            if low >= high:
                continue
            placed = low - start + local, high - start + local
            if taken is None or taken[1] - taken[0] != end - first:
                raise ValueError(f"{self.source} cannot be divided: it is {self.target} in another shape")
            part = taken[0] + low - first, taken[0] + high - first
            found.append(
                replace(self, taken=_replaced(self.taken, back, part), placed=_replaced(self.placed, dim, placed))
            )
        return found

    def view(self, source: torch.Tensor) -> torch.Tensor:
        """Return a view of the part `taken` of the tensor `source`.

        If `transposed`, the last two dimensions are swapped. The view has the shape of the part `placed`, except for
        dimensions of size 1.
        """
        part = _part(source, self.taken)
        return part.mT if self.transposed else part

    def place_in(self, target: torch.Tensor) -> torch.Tensor:
        """Return the part `placed` of the parameter `target`, as a view."""
        return _part(target, self.placed)


def whole(source: str, target: str, shape: Sequence[int]) -> Placement:
    """Return the placement of a whole checkpoint tensor `source` in a whole parameter `target` of the same shape."""
    spans = tuple((0, size) for size in shape)
    return Placement(source, spans, target, spans)


@dataclass(frozen=True)
class WeightPlan:
    """The placements of a checkpoint's tensors in a model, and the names of tensors that the model does not expect."""

    placements: tuple[Placement, ...]
    unexpected: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WeightPlan:
        data = json.loads(text)
        placements = tuple(
            Placement(
                **item
                | {key: tuple(tuple(span) for span in item[key]) for key in ("taken", "placed")}
                | {"beside": tuple(item["beside"])}
            )
            for item in data["placements"]
        )
        return WeightPlan(placements, tuple(data["unexpected"]))


def _part(tensor: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    for dim, (start, end) in enumerate(spans):
        tensor = tensor.narrow(dim, start, end - start)
    return tensor


def _replaced(spans: tuple[Span, ...], dim: int, span: Span) -> tuple[Span, ...]:
    changed = list(spans)
    changed[dim] = span
    return tuple(changed)
