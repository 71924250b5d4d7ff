"""Values that describe quantised linears: schemes, and rules that assign schemes to modules.

A scheme describes how a linear's weight and inputs are quantised: the element format, and the tile of elements that
share a scale. models/checkpoint converts a checkpoint's description to these values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from compiled_engine.quantisation_names import ONLINE


class Element(NamedTuple):
    """A format of quantised elements. An element is stored as a code, and its value is the code's value times a scale.

    A code's value is its entry in `values`, if these are given. With `zero` or `has_zeros` it is the code minus the
    code of 0. Otherwise it is the code itself.
    """

    dtype: torch.dtype  # of stored codes
    largest: float  # magnitude that a tile's largest element has before it is multiplied by the scale
    # Standard deviation of the values of random codes: normal floating-point ones, or integers that are equally likely.
    deviation: float
    zero: int | None = None  # the integer code of 0, for all tiles
    has_zeros: bool = False  # each tile has its own integer code of 0, a zero point
    per_byte: int = 1  # codes in a byte, the first in the lowest bits
    values: tuple[float, ...] = ()  # the value of each code
    scales: torch.dtype = torch.float32  # of stored scales; uint8: exponents of 2 plus 127 (E8M0)
    row_scales: bool = False  # each row has a scale in fp32, by which the scales of its tiles are multiplied

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 // self.per_byte


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = Element(torch.uint8, 6.0, 2.9, per_byte=2, values=(*_MAGNITUDES, *(-value for value in _MAGNITUDES)))
ELEMENTS = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0, 64.0),
    "e2m1": _E2M1,
    "mxfp4": _E2M1._replace(scales=torch.uint8),
    "nvfp4": _E2M1._replace(scales=torch.float8_e4m3fn, row_scales=True),
    "int8": Element(torch.int8, 127.0, 73.9),
    "uint8": Element(torch.uint8, 127.5, 73.9, has_zeros=True),
    "int4": Element(torch.uint8, 7.5, 4.6, zero=8, per_byte=2),
    "uint4": Element(torch.uint8, 7.5, 4.6, has_zeros=True, per_byte=2),
}
# Target that stands for all linears.
LINEAR = "Linear"
# Targets of output projections, and of the routers of experts: formats leave them unquantised unless they are named.
HEAD = "re:.*lm_head$"
ROUTER = r"re:.*\.(gate|router|shared_expert_gate)$"
_REORDERED = ", columns reordered"


# A tuple, since each launch looks up its kernel by the scheme, and a dataclass hashes more slowly.
class Rounding(NamedTuple):
    """How a matrix is quantised: an element format, and the size of the tiles that share a scale each.

    rows or columns 0: a tile spans all rows or all columns of the matrix.
    """

    element: str
    rows: int
    columns: int
    static: bool = False  # one scale, stored in the checkpoint; for inputs only

    def __str__(self) -> str:
        tile = "static" if self.static else f"{self.rows or '*'}x{self.columns or '*'}"
        return f"{self.element} {tile}"

    @staticmethod
    def parse(text: str) -> Rounding:
        element, tile = text.split(" ")
        if tile == "static":
            return Rounding(element, 0, 0, True)
        rows, columns = (0 if size == "*" else int(size) for size in tile.split("x"))
        return Rounding(element, rows, columns)

    @property
    def format(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    @property
    def largest(self) -> float:
        return self.format.largest

    @property
    def least(self) -> float:
        """The least code: the dtype's least value for integers, otherwise the negative of `largest`.

        For int8 it is -128, which inputs with a static scale use.
        """
        return torch.iinfo(self.dtype).min if self.is_integer else -self.largest

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point and not self.format.values

    def stored(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the shape in which a matrix of this size is stored. Its columns must fill whole bytes."""
        return num_rows, num_columns // self.format.per_byte

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the shape of the scales for a matrix of this size."""
        return -(-num_rows // (self.rows or num_rows)), -(-num_columns // (self.columns or num_columns))


class LinearScheme(NamedTuple):
    """How a linear's weight [N, K] (N outputs, K inputs) and its inputs [T, K] (T tokens) are quantised.

    If `inputs` is None, the inputs are not quantised.
    """

    weight: Rounding
    inputs: Rounding | None
    # A tile has any columns of the weight, as the checkpoint says for each linear, instead of neighbouring ones.
    reordered: bool = False

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f", inputs {self.inputs}"
        return f"{self.weight}{inputs}{_REORDERED * self.reordered}"

    @staticmethod
    def parse(text: str) -> LinearScheme:
        """Return the scheme whose `str` is this text."""
        weight, _, inputs = text.removesuffix(_REORDERED).partition(", inputs ")
        rounded = Rounding.parse(inputs) if inputs else None
        return LinearScheme(Rounding.parse(weight), rounded, text.endswith(_REORDERED))

    def dividing(self, num_rows: int, num_columns: int) -> LinearScheme:
        """Return the scheme for a part of the weight, [num_rows, num_columns], with tiles that divide the part evenly.

        Each size of a tile becomes its greatest common divisor with the part's size. Tiles that span all rows become
        single rows; tiles that span all columns stay as they are. The columns of input tiles are reduced like those of
        the weight's tiles. num_columns 0: the columns of tiles do not change.
        """
        rows = math.gcd(self.weight.rows or 1, num_rows)
        columns = math.gcd(self.weight.columns, num_columns) if self.weight.columns else 0
        inputs = self.inputs
        if inputs is not None and inputs.columns:
            inputs = inputs._replace(columns=math.gcd(inputs.columns, num_columns))
        return LinearScheme(self.weight._replace(rows=rows, columns=columns), inputs, self.reordered)


@dataclass(frozen=True)
class Rule:
    """Assigns a quantisation scheme to the modules whose names match one of its targets."""

    # Module names, `re:` and a regular expression that matches from the start of a name, or `Linear` for all linears.
    targets: tuple[str, ...]
    scheme: str  # for LinearScheme.parse


@dataclass(frozen=True)
class StoredWeight:
    """How a checkpoint stores a parameter that it has under other names than the model, or in several tensors."""

    name: str  # the parameter's, in the model
    scheme: str  # for LinearScheme.parse; "" for a parameter that is not quantised
    reason: str  # why it is not quantised; "" for others


@dataclass(frozen=True)
class Quantisation:
    """A model's quantised linears and their schemes.

    Raises ValueError for a target with an invalid regular expression.
    """

    method: str  # the checkpoint's quant_method, or "online" for quantisation at load time
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...]  # targets that are not quantised, despite rules
    scale_name: str = "weight_scale"  # the checkpoint's name for the scale of a module's weight
    # How the checkpoint packs integers, see models/checkpoint/packed_weights.py; "" for none.
    layout: str = ""
    stored: tuple[StoredWeight, ...] = ()  # parameters to which the rules do not apply by their own names

    def __post_init__(self) -> None:
        where = "quantization_ignore" if self.is_online else "quantization_config"
        for target in (*self.ignore, *(target for rule in self.rules for target in rule.targets)):
            try:
                matches(target, "")
            except re.error as error:
                raise ValueError(
                    f"{where} has {target!r}: {error}; allowed: names, or re: and a regular expression"
                ) from None

    @property
    def is_online(self) -> bool:
        return self.method == "online"

    def scheme_of(self, module: str) -> LinearScheme | None:
        """Return the scheme of the linear with the name `module`, or None if it is not quantised; see `why_not`.

        Targets that are the exact name come first, then regular expressions, then "Linear".
        """
        if self._ignoring(module) is not None:
            return None
        targets = [(target, rule.scheme) for rule in self.rules for target in rule.targets]
        for is_kind in (_is_exact, _is_expression, _is_class):
            for target, scheme in targets:
                if is_kind(target) and matches(target, module):
                    return LinearScheme.parse(scheme)
        return None

    def why_not(self, module: str) -> str:
        """Return why the linear with this name is not quantised, for an error message."""
        ignoring = self._ignoring(module)
        return "no rule names it" if ignoring is None else f"{ignoring} is to be ignored"

    def of_parameter(self, name: str, modules: Sequence[str]) -> LinearScheme | str:
        """Return the scheme of the model's parameter `name`, or why it is not quantised.

        modules: the names by which the rules know its matrices, if it is not in `stored`.
        """
        for each in self.stored:
            if each.name == name:
                return LinearScheme.parse(each.scheme) if each.scheme else each.reason
        return self.of_modules(modules)

    def of_modules(self, modules: Sequence[str]) -> LinearScheme | str:
        """Return the scheme of a parameter that consists of the matrices of `modules`, or why it is not quantised."""
        schemes = {self.scheme_of(module) for module in modules}
        if len(schemes) > 1:
            return "the rules differ among its matrices"
        return next(iter(schemes)) or self.why_not(modules[0])

    def _ignoring(self, module: str) -> str | None:
        if module in self._ignored_names:
            return module
        return next((target for target, ignores in self._other_ignored if ignores(module)), None)

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        return frozenset(filter(_is_exact, self.ignore))

    @cached_property
    def _other_ignored(self) -> Sequence[tuple[str, Callable[[str], object]]]:
        """The targets to ignore that are no names, each with a function that returns whether it matches a name.

        Expressions are compiled once: a checkpoint may have hundreds of them, and as many thousands of modules.
        """
        return [(target, _matching(target)) for target in self.ignore if not _is_exact(target)]


def online(name: str, ignore: tuple[str, ...]) -> Quantisation:
    """Return a quantisation in which every linear has the scheme `name`, a key of ONLINE, such as fp8.

    ignore: targets (see Rule) of linears that are not quantised.
    """
    return Quantisation("online", (Rule((LINEAR,), ONLINE[name]),), ignore)


def matches(target: str, module: str) -> bool:
    """Return whether a target (see Rule) matches a linear's name."""
    return bool(_matching(target)(module))


def _matching(target: str) -> Callable[[str], object]:
    """Return a function that returns whether a target matches a linear's name."""
    if _is_expression(target):
        return re.compile(target.removeprefix("re:")).match
    return lambda module: _is_class(target) or target == module


def _is_expression(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target == LINEAR


def _is_exact(target: str) -> bool:
    return not _is_expression(target) and not _is_class(target)
