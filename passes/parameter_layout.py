"""Where parameters live in memory: some are slices of a packed tensor that a pass asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedParameter:
    """`members` (parameter names as in the checkpoint) concatenated along dimension 0 into one tensor."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class ParameterLayout:
    """All packed parameters; those not named as members stand alone under their own name."""

    packed: tuple[PackedParameter, ...] = ()
