"""List the names of a model's linears, and check that quantisation targets match one of the names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.passes.linear.experts_codes import modules_of, projections_of
from compiled_engine.quantisation import matches
from compiled_engine.schema import nearest

_WEIGHT = ".weight"


def linear_names(model: nn.Module) -> list[str]:
    """Return the names that quantisation rules are matched against: those of linears and of the matrices of experts.

    model: a textbook model, or a module that only holds parameters. In a module that only holds parameters, an
    embedding cannot be told from a linear; its name is included.
    """
    return list(dict.fromkeys(_names(model)))


def require_linears(option: str, targets: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError if one of the targets (see quantisation.Rule) matches none of the names.

    option: the user's option that has the targets, for the error. names: those of the model's linears.
    """
    unused = next((target for target in targets if not any(matches(target, name) for name in names)), None)
    if unused is None:
        return
    near = nearest(unused, names)
    if near is None and any(name.endswith(f".{unused}") for name in names):
        near = rf"re:.*\.{unused}$"
    known = f"it has {name_some([*names])}" if near is None else f"did you mean {near!r}?"
    raise ValueError(f"{option} has {unused!r}, which matches no linear of the model; {known}")


def _names(model: nn.Module) -> Iterator[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        module = modules[owner]
        if parameter.dim() == 3 and projections_of(name):
            yield from modules_of(name, parameter.shape[0])
        elif parameter.dim() == 3 or (
            parameter.dim() == 2 and own == "weight" and not isinstance(module, nn.Embedding)
        ):
            yield name.removesuffix(_WEIGHT)
