"""Records what a forward calls while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_engine.graphs.cpu_graphs.arena import Arena
from compiled_engine.graphs.cpu_graphs.call_list import CallList
from compiled_engine.kernels.cpp_library import CppFunction, recorder

aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
READS = (aten.item.default, aten._local_scalar_dense.default)


class CannotRecord(RuntimeError):
    """The forward did something that a list of calls could not repeat."""


class Recorder(TorchDispatchMode):
    """C++ kernels are recorded as called; a computing op of torch is recorded with its present result as output; views
    and allocations need no replay.

    constants: elements with the same values in each replay; Python must not read others.
    """

    def __init__(self, arena: Arena, constants: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.calls = CallList()
        self._arena = arena
        self._constants = {tensor.data_ptr() for tensor in constants}

    def add_call(self, function: CppFunction, arguments: tuple[Any, ...]) -> None:
        self.calls.add_kernel(function, arguments)

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = partial(function, *args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        if function in READS and not {tensor.data_ptr() for tensor in given} <= self._constants:
            raise CannotRecord(f"the host reads a tensor of shape {tuple(given[0].shape)}")
        result = call()
        results = _tensors(result)
        if function in ALLOCATIONS and result.is_contiguous():
            return self._arena.empty_like(result)
        if function._schema.is_mutable:
            self.calls.add(call)
        elif not {_memory(tensor) for tensor in results} <= {_memory(tensor) for tensor in given}:
            self.calls.add(partial(_again, call, results))
        return result


@contextmanager
def recording(arena: Arena, constants: Iterable[torch.Tensor]) -> Iterator[CallList]:
    """Raises CannotRecord from inside."""
    with Recorder(arena, constants) as mode:
        token = recorder.set(mode)
        try:
            yield mode.calls
        finally:
            recorder.reset(token)


def _again(call: Callable[[], Any], results: list[torch.Tensor]) -> None:
    for result, value in zip(results, tree_leaves(call()), strict=True):
        result.copy_(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
