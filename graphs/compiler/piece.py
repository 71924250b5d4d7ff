"""Converts a piece to JSON and back: its ops with their arguments, its constants, and the types of its inputs.

The JSON is digested for the piece's key, read by compile workers, and shown by the inspector. Symbolic sizes are
numbered by first appearance, so equal layers have equal JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_PLAIN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")),
        (torch, ("sym_max", "sym_min", "sym_not", "sym_int", "sym_float")),
        (math, ("ceil", "floor", "trunc")),
    )
    for name in names
}
# Functions besides arithmetic in sizes and strides; strides are Max(1, ...).
_OF_SIZES: dict[str, Any] = {"__builtins__": {}, "Max": torch.sym_max}
_PLAIN_NAMES = {function: name for name, function in _PLAIN_FUNCTIONS.items()}


class UnknownTarget(LookupError):
    """Raised for a call or constant without a JSON form, and for an op that is not registered in this process.

    An example is an op that a user's script defines, in a worker process.
    """


def piece_to_json(piece: fx.GraphModule) -> str:
    """Return a piece's graph as JSON, with one node per line.

    Raises UnknownTarget for a call or constant that has no JSON form.
    """
    symbols = _Symbols()
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for node in piece.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            nodes.append(["input", symbols.describe(node.meta["val"])])
        elif node.op == "output":
            nodes.append(["output", _encode(node.args[0], numbers)])
        elif node.op == "call_function":
            nodes.append([_target_name(node.target), _encode(node.args, numbers), _encode(dict(node.kwargs), numbers)])
        else:
            raise UnknownTarget(f"node {node.name} is a {node.op}; pieces have inputs, calls and an output")
    lines = ",\n  ".join(json.dumps(node) for node in nodes)
    return f'{{"symbols": {json.dumps(symbols.ranges)},\n "nodes": [\n  {lines}\n]}}\n'


def piece_key(text: str) -> str:
    """Return the key of a piece, a digest of its JSON `text`. Pieces of equal layers have the same key."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def piece_from_json(text: str) -> tuple[fx.GraphModule, list[Any], ShapeEnv]:
    """Return (piece, fake inputs, shape environment) for a piece's JSON.

    The fake inputs are tensors and sizes, with symbols of the shape environment, which is new. Raises UnknownTarget for
    an op that is not registered in this process.
    """
    data = json.loads(text)
    shape_env = ShapeEnv()
    sizes: dict[str, torch.SymInt] = {}
    fake_mode = FakeTensorMode(shape_env=shape_env)
    for name, (low, high) in data["symbols"].items():
        with shape_env.ignore_fresh_unbacked_symbols():  # inputs define them, not ops
            sizes[name] = shape_env.create_unbacked_symint()
        shape_env.constrain_symbol_range(sizes[name].node.expr, low, high)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    fakes: list[Any] = []
    values: dict[fx.Node, Any] = {}
    with fake_mode:
        for kind, *rest in data["nodes"]:
            if kind == "input":
                node = graph.placeholder(f"input_{len(fakes)}")
                fakes.append(_rebuild(rest[0], sizes))
                values[node] = fakes[-1]
            elif kind == "output":
                node = graph.output(tuple(_decode(rest[0], nodes)))
            else:
                target = _find_target(kind)
                args, kwargs = _decode(rest[0], nodes), _decode(rest[1], nodes)
                node = graph.call_function(target, tuple(args), kwargs)
                concrete = fx.map_arg((tuple(args), kwargs), lambda argument: values[argument])
                values[node] = target(*concrete[0], **concrete[1])
            if node in values:
                node.meta = {"val": values[node], "example_value": values[node]}
            nodes.append(node)
    return fx.GraphModule({}, graph), fakes, shape_env


class _Symbols:
    """Describes values, such as tensors and sizes, for a piece's JSON.

    Symbolic sizes are named n0, n1, ... by first appearance, and their ranges are recorded.
    """

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[int, int]] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}

    def describe(self, value: Any) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            return {
                "dtype": str(value.dtype),
                "shape": [self._size(size) for size in value.shape],
                "stride": [self._size(stride) for stride in value.stride()],
                "device": str(value.device),
            }
        return {"size": self._size(value)}

    def _size(self, value: int | torch.SymInt) -> int | str:
        if isinstance(value, int):
            return value
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._names:
                name = f"n{len(self._names)}"
                self._names[symbol] = sympy.Symbol(name, integer=True)
                known = value.node.shape_env.var_to_range[symbol]
                self.ranges[name] = (int(known.lower), int(known.upper))
        return str(expression.xreplace(self._names))


def _rebuild(description: dict[str, Any], sizes: dict[str, torch.SymInt]) -> Any:
    def size(value: int | str) -> Any:
        return value if isinstance(value, int) else eval(value, _OF_SIZES, sizes)  # an expression of n0, n1, ...

    if "size" in description:
        return size(description["size"])
    return torch.empty_strided(
        [size(value) for value in description["shape"]],
        [size(value) for value in description["stride"]],
        dtype=_torch_value(description["dtype"]),
        device=description["device"],
    )


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.name() if "." in target.name().split("::")[1] else f"{target.name()}.default"
    if target in _PLAIN_NAMES:
        return _PLAIN_NAMES[target]
    raise UnknownTarget(f"{target} is neither an op nor one of {', '.join(sorted(_PLAIN_FUNCTIONS))}")


def _find_target(name: str) -> Callable[..., Any]:
    if name in _PLAIN_FUNCTIONS:
        return _PLAIN_FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise UnknownTarget(f"op {name} is not registered in this process") from error


def _encode(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, numbers) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_encode(item, numbers) for item in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnknownTarget(f"a constant of type {type(value).__name__} ({value!r}) has no JSON form")


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind == "dict":
        return {key: _decode(item, nodes) for key, item in inner.items()}
    return torch.device(inner) if kind == "device" else _torch_value(inner)


def _torch_value(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))
