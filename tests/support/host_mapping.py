"""Functions of the CUDA driver's virtual memory management over the host's memory.

Reserved addresses that are not mapped cannot be read or written: the process would end. Memory that is mapped is full
of bytes that are NaN in every float.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from enum import IntEnum
from typing import Any

import torch

from compiled_engine.features.sleep.mapped_memory import DeviceMapping, MappedMemory

GRANULARITY = 1 << 16
READ_WRITE, NONE = mmap.PROT_READ | mmap.PROT_WRITE, 0
FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Fields:
    """A structure of the CUDA driver with any fields."""

    location: Any = None


class HostDriver:
    """Has the functions and names of cuda.bindings.driver that DeviceMapping uses.

    most_bytes: physical memory that may exist at a time.
    """

    CUresult = Result
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = Fields

    class CUmemLocationType(IntEnum):
        CU_MEM_LOCATION_TYPE_DEVICE = 1

    class CUmemAllocationType(IntEnum):
        CU_MEM_ALLOCATION_TYPE_PINNED = 1

    class CUmemAccess_flags(IntEnum):  # noqa: N801, a name of the driver
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3

    class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801, a name of the driver
        CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.most_bytes = most_bytes
        self.reserved: dict[int, int] = {}  # bytes of each reservation, by address
        self.mapped: dict[int, int] = {}  # bytes of each mapping, by address
        self.created: dict[int, int] = {}  # bytes of memory with a handle, by handle
        self.counts: dict[str, int] = {}
        self._handles = itertools.count(1)

    @property
    def physical_bytes(self) -> int:
        return sum(self.mapped.values()) + sum(self.created.values())

    def cuGetErrorName(self, error: Result) -> tuple[Result, bytes]:  # noqa: N802
        return Result.CUDA_SUCCESS, error.name.encode()

    def cuMemGetAllocationGranularity(self, properties: Fields, option: int) -> tuple[Result, int]:  # noqa: N802
        assert (properties.location.id, option) == (0, 0)
        return Result.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> tuple[Result, int]:  # noqa: N802
        assert size % GRANULARITY == alignment == hint == flags == 0
        address = _libc.mmap(None, size, NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[address] = size
        return Result.CUDA_SUCCESS, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Result]:  # noqa: N802
        if self.reserved.pop(address, None) != size or self._mapped_in(address, size):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        _libc.munmap(address, size)
        return (Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, properties: Fields, flags: int) -> tuple[Result, int | None]:  # noqa: N802
        assert size % GRANULARITY == 0
        if self.physical_bytes + size > self.most_bytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.created[handle := next(self._handles)] = size
        return Result.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle: int) -> tuple[Result]:  # noqa: N802
        self.created.pop(handle, None)
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Result]:  # noqa: N802
        inside = any(begin <= address and address + size <= begin + length for begin, length in self.reserved.items())
        if not inside or self._mapped_in(address, size) or self.created.pop(handle) != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        assert _libc.mmap(address, size, READ_WRITE, flags, -1, 0) == address
        ctypes.memset(address, 0xFF, size)
        _libc.mprotect(address, size, NONE)
        self.mapped[address] = size
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Fields], count: int) -> tuple[Result]:  # noqa: N802
        if self._mapped_in(address, size) != size or count != len(access) or access[0].location.id != 0:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        _libc.mprotect(address, size, READ_WRITE)
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Result]:  # noqa: N802
        if self.mapped.pop(address, None) != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        assert _libc.mmap(address, size, NONE, flags, -1, 0) == address
        return (Result.CUDA_SUCCESS,)

    def _mapped_in(self, address: int, size: int) -> int:
        """Return the mapped bytes within a range."""
        return sum(length for begin, length in self.mapped.items() if address <= begin < address + size)


def host_memory(driver: HostDriver, most_bytes: int) -> MappedMemory:
    """Return mapped memory of the host."""
    return MappedMemory(most_bytes, DeviceMapping(0, driver), lambda: None, _tensor_at)


def _tensor_at(address: int, num_bytes: int, kept: object) -> torch.Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    span: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    span.kept = kept
    return torch.frombuffer(span, dtype=torch.uint8)
