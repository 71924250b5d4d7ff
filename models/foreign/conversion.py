"""Express transformers' checkpoint conversions (renaming, stacking, joining and splitting tensors) as placements.

The operations of a weight converter of transformers are carried out on shapes only. An intermediate tensor is
described by a list of pieces, each of which is a part of a checkpoint's tensor with its place in the intermediate
tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from compiled_engine.models.foreign.compat import Conversions, ignored_tensors, in_natural_order, operations_of
from compiled_engine.models.foreign.placement import Placement, Span, WeightPlan, whole
from compiled_engine.quantisation_names import MXFP4

Shape = tuple[int, ...]
_BLOCKS = "_blocks"  # ending of the names of packed MXFP4 values


@dataclass(frozen=True)
class _Piece:
    """Part `taken` of a checkpoint's tensor `source`, which becomes part `placed` of an intermediate tensor.

    transposed: whether its last two dimensions are swapped.
    """

    source: str
    taken: tuple[Span, ...]
    placed: tuple[Span, ...]
    transposed: bool = False


@dataclass(frozen=True)
class _Value:
    """An intermediate tensor of a checkpoint's conversion, described by its shape and pieces."""

    shape: Shape
    pieces: tuple[_Piece, ...]

    def moved(self, dim: int, by: int, size: int) -> _Value:
        """Return this value as a part of a larger tensor, which has the size `size` in dimension `dim`.

        The part begins at index `by` of that dimension.
        """
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return _Value(shape, tuple(replace(p, placed=_shifted(p.placed, dim, by)) for p in self.pieces))


class UnsupportedConversionError(ValueError):
    """Raised for a conversion that copying parts of tensors cannot express."""


def plan_weights(model: Any, shapes: Mapping[str, Shape]) -> WeightPlan:
    """Return the placements of a checkpoint's tensors in a model of transformers.

    shapes: name -> shape of each tensor of the checkpoint. Raises UnsupportedConversionError, with the operation's
    name, if placements cannot express a conversion, and ValueError if a conversion's result has a wrong shape.
    """
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    stored = model.state_dict().keys()
    parameters |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in stored}
    conversions, ignored = Conversions(model, parameters), ignored_tensors(model)
    placements: list[Placement] = []
    unexpected: list[str] = []
    groups: dict[tuple[str, int], tuple[Any, dict[str, list[str]]]] = {}
    packed = {name: other for name in shapes if (other := _scales_of(name)) in shapes}
    for name in in_natural_order(shapes.keys() - set(packed.values())):
        if name in packed:
            target, _, _ = conversions.target(name.removesuffix(_BLOCKS))
            placements.append(_decoded(name, packed[name], target, shapes[name]))
            continue
        target, converter, pattern = conversions.target(name)
        if converter is not None:
            _, sources = groups.setdefault((target, id(converter)), (converter, defaultdict(list)))
            sources[pattern].append(name)
        elif target in parameters:
            placements.append(whole(name, target, shapes[name]))
        elif not ignored.search(target):
            unexpected.append(name)
    for (target, _), (converter, sources) in groups.items():
        made = _converted(converter, sources, shapes, target, parameters)
        for name, value in made.items():
            if name not in parameters:
                unexpected += [source for names in sources.values() for source in names]
                continue
            if value.shape != parameters[name]:
                raise ValueError(f"{name} would be of shape {list(value.shape)} instead of {list(parameters[name])}")
            placements += [Placement(p.source, p.taken, name, p.placed, p.transposed) for p in value.pieces]
    return WeightPlan(tuple(placements), tuple(unexpected))


def parameters_of(model: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters to which each tensor of a checkpoint contributes, by the tensor's name.

    The names follow from conversions alone, so some may be no parameter of the model. names: the tensors'.
    """
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    conversions = Conversions(model, known)
    found = {}
    for name in names:
        target, converter, _ = conversions.target(name)
        patterns = [] if converter is None else list(converter.target_patterns)
        found[name] = tuple(_full(target, patterns, pattern) for pattern in patterns) or (target,)
    return found


def plan_of_encoder(model: Any, shapes: Mapping[str, Shape]) -> WeightPlan:
    """Return the placements of a checkpoint's tensors in an Encoder. model: the attribute `model` of the Encoder.

    shapes: name -> shape of each tensor of the checkpoint. Tensors of heads that the model lacks are skipped. Raises
    the errors of `plan_weights`.
    """
    plan = plan_weights(model, shapes)
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in shapes)
    bare = model.base_model is model
    unexpected = tuple(
        name
        for name in plan.unexpected
        if name.removeprefix(prefix).partition(".")[0] != "pooler"
        and not (bare and has_prefix != name.startswith(prefix))
    )
    placements = tuple(replace(each, target=f"model.{each.target}") for each in plan.placements)
    return WeightPlan(placements, unexpected)


def _scales_of(name: str) -> str:
    """Return the name of the scales that belong to packed MXFP4 values `name`; "" for the name of any other tensor."""
    return name.removesuffix(_BLOCKS) + "_scales" if name.endswith(_BLOCKS) else ""


def _decoded(source: str, scales: str, target: str, shape: Shape) -> Placement:
    """Return the placement of packed MXFP4 values [E, R, G, 16], 32 values in 16 bytes, in a parameter [E, 32 G, R].

    source, scales: names of the values and of their scales. target: the parameter's name. shape: of the packed values.
    """
    experts, rows, groups, num_bytes = (*shape, 0, 0, 0, 0)[:4]
    columns = 2 * groups * num_bytes
    placed, taken = (tuple((0, size) for size in s) for s in ((experts, columns, rows), (experts, rows, columns)))
    return Placement(source, taken, target, placed, transposed=True, decode=MXFP4, beside=(scales,))


def _converted(
    converter: Any,
    sources: Mapping[str, list[str]],
    shapes: Mapping[str, Shape],
    target: str,
    parameters: Mapping[str, Shape],
) -> dict[str, _Value]:
    """Carry out a weight converter of transformers on shapes. Returns its results by full name.

    sources: source pattern -> names of the tensors that match it. shapes: of the checkpoint's tensors. target: the full
    name of the converter's first result. parameters: shapes of the model's parameters. Raises
    UnsupportedConversionError for operations that placements cannot express.
    """
    values: dict[str, list[_Value]] = {
        pattern: [_whole(name, shapes[name]) for name in names] for pattern, names in sources.items()
    }
    targets: list[str] = list(converter.target_patterns)
    for operation in operations_of(converter):
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            values = {pattern: [_stacked(items, operation.dim)] for pattern, items in values.items()}
        elif kind == "Concatenate":
            order = [item for pattern in converter.source_patterns for item in values.get(pattern, [])]
            values = {targets[0]: [_joined(order, operation.dim)]}
        elif kind in ("Chunk", "Split") and not getattr(operation, "num_shards_attribute", None):
            value = _only(values)
            wanted = [parameters.get(_full(target, targets, name), (0,) * 9)[operation.dim] for name in targets]
            sizes = wanted if kind == "Split" else [value.shape[operation.dim] // len(targets)] * len(targets)
            values = {name: [part] for name, part in zip(targets, _parts(value, operation.dim, sizes), strict=True)}
        elif kind == "Transpose":
            value, name = _only(values), targets[0] if len(targets) == 1 else next(iter(values))
            same = operation.check_dims and value.shape == parameters.get(target)
            values = {name: [value if same else _transposed(value, operation.dim0, operation.dim1)]}
        else:
            raise UnsupportedConversionError(
                f"{target} would need the conversion {operation!r}, which is not supported"
            )
    if len(values) == 1 and len(targets) == 1:
        return {_full(target, targets, targets[0]): _only(values)}
    return {_full(target, targets, name): items[0] for name, items in values.items()}


def _full(target: str, targets: list[str], name: str) -> str:
    """Return the full name of the result for the target pattern `name` of a converter.

    target: the full name of the converter's first result. targets: all target patterns of the converter.
    """
    concrete = target.replace("*.", "0.")
    return concrete.replace(targets[0], name, 1) if targets[0] in concrete else concrete


def _whole(name: str, shape: Shape) -> _Value:
    spans = tuple((0, size) for size in shape)
    return _Value(tuple(shape), (_Piece(name, spans, spans),))


def _only(values: Mapping[str, list[_Value]]) -> _Value:
    items = [item for several in values.values() for item in several]
    if len(items) != 1:
        raise UnsupportedConversionError(f"an operation on {len(items)} tensors at once is not supported")
    return items[0]


def _stacked(items: list[_Value], dim: int) -> _Value:
    pieces = []
    for number, item in enumerate(items):
        for piece in item.pieces:
            placed = (*piece.placed[:dim], (number, number + 1), *piece.placed[dim:])
            pieces.append(replace(piece, placed=placed))
    shape = items[0].shape
    if any(item.shape != shape for item in items):
        raise UnsupportedConversionError("tensors of different shapes cannot be stacked")
    return _Value((*shape[:dim], len(items), *shape[dim:]), tuple(pieces))


def _joined(items: list[_Value], dim: int) -> _Value:
    size = sum(item.shape[dim] for item in items)
    pieces: list[_Piece] = []
    start = 0
    for item in items:
        pieces += item.moved(dim, start, size).pieces
        start += item.shape[dim]
    shape = items[0].shape
    return _Value((*shape[:dim], size, *shape[dim + 1 :]), tuple(pieces))


def _parts(value: _Value, dim: int, sizes: list[int]) -> list[_Value]:
    if len(value.pieces) != 1 or value.pieces[0].transposed or value.pieces[0].placed != value.pieces[0].taken:
        raise UnsupportedConversionError("only an unchanged tensor of the checkpoint can be split")
    (piece,) = value.pieces
    parts, start = [], 0
    for size in sizes:
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        taken = (*piece.taken[:dim], (start, start + size), *piece.taken[dim + 1 :])
        parts.append(_Value(shape, (_Piece(piece.source, taken, tuple((0, s) for s in shape)),)))
        start += size
    return parts


def _transposed(value: _Value, first: int, second: int) -> _Value:
    rank = len(value.shape)
    if {first % rank, second % rank} != {rank - 1, rank - 2}:
        raise UnsupportedConversionError("only the last two dimensions can be swapped")

    def exchanged(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*items[:-2], items[-1], items[-2])

    pieces = tuple(replace(p, placed=exchanged(p.placed), transposed=not p.transposed) for p in value.pieces)
    return _Value(exchanged(value.shape), pieces)


def _shifted(spans: tuple[Span, ...], dim: int, by: int) -> tuple[Span, ...]:
    start, end = spans[dim]
    return (*spans[:dim], (start + by, end + by), *spans[dim + 1 :])
