"""Quantisation of linears as plain data: schemes, and rules that assign them to modules.

A scheme describes how a linear's weight and its inputs are rounded: the format of elements, and how many of them share
a scale. models/checkpoint reads a checkpoint's description into these values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Element(NamedTuple):
    """A kind of stored number: its dtype in torch, and the largest value."""

    dtype: torch.dtype
    largest: float


ELEMENTS = {"e4m3": Element(torch.float8_e4m3fn, 448.0)}
# The name of all linears in targets and ignore lists.
LINEAR = "Linear"
# Schemes that weights can be brought into while they are loaded.
ONLINE = {
    "fp8": "e4m3 1x*, inputs e4m3 1x*",
    "fp8_block": "e4m3 128x128, inputs e4m3 1x128",
}


# A tuple: each launch looks up its kernel by its scheme, and a dataclass's hash takes the host longer.
class Rounding(NamedTuple):
    """Values are `element` codes, and tiles of rows x columns of them share a scale; 0 rows or columns are all.

    static: the one scale is in the checkpoint; of inputs alone.
    """

    element: str
    rows: int
    columns: int
    static: bool = False

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
    def dtype(self) -> torch.dtype:
        return ELEMENTS[self.element].dtype

    @property
    def largest(self) -> float:
        return ELEMENTS[self.element].largest

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the shape of the scales of this many rows and columns."""
        return -(-num_rows // (self.rows or num_rows)), -(-num_columns // (self.columns or num_columns))


class LinearScheme(NamedTuple):
    """The rounding of a linear's weight [N, K] and its inputs [T, K]; inputs None: they are not rounded."""

    weight: Rounding
    inputs: Rounding | None

    def __str__(self) -> str:
        return str(self.weight) if self.inputs is None else f"{self.weight}, inputs {self.inputs}"

    @staticmethod
    def parse(text: str) -> LinearScheme:
        """Read what `str` gives."""
        weight, _, inputs = text.partition(", inputs ")
        return LinearScheme(Rounding.parse(weight), Rounding.parse(inputs) if inputs else None)

    def dividing(self, num_rows: int, num_columns: int) -> LinearScheme:
        """Return the scheme with tiles that are parts of these and end where this many rows or columns end; 0 columns:
        anywhere. One scale for all rows becomes one a row. Inputs are rounded in tiles as wide as the weight's."""
        rows = math.gcd(self.weight.rows or 1, num_rows)
        columns = math.gcd(self.weight.columns, num_columns) if self.weight.columns else 0
        inputs = self.inputs
        if inputs is not None and inputs.columns:
            inputs = inputs._replace(columns=math.gcd(inputs.columns, num_columns))
        return LinearScheme(self.weight._replace(rows=rows, columns=columns), inputs)


@dataclass(frozen=True)
class Rule:
    """targets: names of modules, `re:` and a regular expression that matches from a name's beginning, or `Linear` for
    every linear. scheme: what LinearScheme.parse reads."""

    targets: tuple[str, ...]
    scheme: str


@dataclass(frozen=True)
class Quantisation:
    """The quantised linears of a model, with their schemes.

    method: quant_method of the checkpoint, or "online" for weights that are quantised while they are loaded. ignore:
    targets that stay as they are, despite rules. scale_name: the checkpoint's name for the scale of a module's weight.
    Raises ValueError for a target with an invalid regular expression.
    """

    method: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...]
    scale_name: str = "weight_scale"

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
        """Return the scheme of a linear; None if it is not quantised, see `why_not`."""
        if self._ignoring(module) is not None:
            return None
        targets = [(target, rule.scheme) for rule in self.rules for target in rule.targets]
        for is_kind in (_is_exact, _is_expression, _is_class):
            for target, scheme in targets:
                if is_kind(target) and matches(target, module):
                    return LinearScheme.parse(scheme)
        return None

    def why_not(self, module: str) -> str:
        """Why a linear is not quantised."""
        ignoring = self._ignoring(module)
        return "no rule names it" if ignoring is None else f"{ignoring} is to be ignored"

    def _ignoring(self, module: str) -> str | None:
        return next((target for target in self.ignore if matches(target, module)), None)


def online(name: str, ignore: tuple[str, ...]) -> Quantisation:
    """Return the rules that quantise every linear in one of the schemes of ONLINE, except those in `ignore`."""
    return Quantisation("online", (Rule((LINEAR,), ONLINE[name]),), ignore)


def matches(target: str, module: str) -> bool:
    """Return whether a target (see Rule) names a module, which is a linear."""
    if _is_expression(target):
        return re.match(target.removeprefix("re:"), module) is not None
    return _is_class(target) or target == module


def _is_expression(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target == LINEAR


def _is_exact(target: str) -> bool:
    return not _is_expression(target) and not _is_class(target)
