"""Records the kernel calls of a forward on a CPU, with the memory of their results, and replays them without Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_engine.kernels import cpp_library
from compiled_engine.kernels.cpp_library import CppFunction, load_library, recorder

# Memory for results of recorded calls: it is kept, and tensors that are not needed at the same time share it.

# Alignment of tensors in bytes.
ALIGNMENT = 64


class Arena:
    """Allocates the tensors of recorded calls in memory blocks that are never freed.

    A block holds one tensor at a time. When no Python object refers to that tensor's storage any more, the block can
    hold another tensor.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[torch.Tensor, StorageWeakRef | None]] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor with the shape and dtype of `tensor`, in an unused block."""
        size = tensor.numel() * tensor.element_size()
        free = [
            (block.numel(), index)
            for index, (block, user) in enumerate(self._blocks)
            if block.numel() >= size and (user is None or user.expired())
        ]
        if free:
            _, index = min(free)
        else:
            index = len(self._blocks)
            self._blocks.append((torch.empty(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8), None))
        block, _ = self._blocks[index]
        given = _alias(block, tensor)
        self._blocks[index] = block, StorageWeakRef(given.untyped_storage())
        return given

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the memory of `tensor`. Unlike `tensor`, it does not keep its block of the arena in use.

        If `tensor` is not in a block of the arena, return `tensor` itself.
        """
        of_tensor = (block for block, _ in self._blocks if block.data_ptr() == tensor.data_ptr())
        return next((_alias(block, tensor) for block in of_tensor), tensor)


def _alias(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the block's first bytes, with the shape and dtype of `tensor` and its own storage object."""
    size = tensor.numel() * tensor.element_size()
    return torch.from_numpy(block[:size].numpy()).view(tensor.dtype).view(tensor.shape)


SOURCE = Path(cpp_library.__file__).with_name("cpp_replay.cpp")


class CallList:
    """A list of recorded calls. A replay repeats them in order, on the memory that they used when they were recorded.

    Consecutive calls of C++ kernels are replayed by one call into C++.
    """

    def __init__(self) -> None:
        self._runs: list[Callable[[], Any]] = []
        self.num_kernels = 0

    def add_kernel(self, function: CppFunction, arguments: tuple[Any, ...]) -> None:
        last = self._runs[-1] if self._runs else None
        if not isinstance(last, _KernelCalls):
            last = _KernelCalls()
            self._runs.append(last)
        last.add(function.packed_entry, function.pack(arguments))
        self.num_kernels += 1

    def add(self, call: Callable[[], Any]) -> None:
        self._runs.append(call)

    def replay(self) -> None:
        for run in self._runs:
            run()


class _KernelCalls:
    """Consecutive calls of C++ kernels, in the format of cpp_replay.cpp. Calling this object repeats all of them."""

    def __init__(self) -> None:
        self._arguments: list[ctypes.Array[ctypes.c_char]] = []  # the entries point to them
        self._entries: list[int] = []
        self._table: ctypes.Array[ctypes.c_uint64] = (ctypes.c_uint64 * 0)()

    def add(self, entry: int, packed: bytes) -> None:
        self._arguments.append(ctypes.create_string_buffer(packed, len(packed)))
        self._entries += entry, ctypes.addressof(self._arguments[-1])
        self._table = (ctypes.c_uint64 * len(self._entries))(*self._entries)

    def __call__(self) -> None:
        _replay()(self._table, len(self._arguments))


@cache
def _replay() -> Any:
    function = load_library(SOURCE).replay
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return function


aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
READS = (aten.item.default, aten._local_scalar_dense.default)


class CannotRecord(RuntimeError):
    """Raised if a forward does something that replaying a list of calls cannot repeat."""


class Recorder(TorchDispatchMode):
    """A torch dispatch mode that records calls of C++ kernels and of torch's ops into `calls`.

    A replay calls a C++ kernel with the recorded arguments. A replay of a torch op writes its results to the tensors
    that the op returned during the recording. Views and allocations need no replay and are not recorded.

    arena: provides the memory of tensors that are allocated during the recording. constants: tensors that have the same
    values in every replay. Raises CannotRecord if the host reads the value of any other tensor (`item`).
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
    """Record all calls that are made within a `with` block. Yields the CallList to which they are added.

    arena: provides the memory of tensors that the block allocates. constants: see Recorder. A call that cannot be
    recorded raises CannotRecord within the block.
    """
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
