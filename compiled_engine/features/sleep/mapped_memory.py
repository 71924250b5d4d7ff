"""Provides device memory that can be given back and taken again at the same addresses.

A range of addresses is reserved once. Physical memory is mapped into it as tensors are allocated, unmapped while the
engine sleeps, and mapped again when it wakes. Tensors and captured CUDA graphs refer to addresses alone, so they stay
valid. The functions are those of CUDA's virtual memory management (cuMemAddressReserve, cuMemCreate, cuMemMap).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from compiled_engine.process.pinned_memory import PinnedMemory

ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns tensors
# Python package of the driver's functions. PyTorch's CUDA builds for Linux require it.
PACKAGE, MODULE = "cuda-bindings", "cuda.bindings.driver"


class MappingError(RuntimeError):
    """The driver has refused to reserve, map or unmap memory."""


def has_driver_functions() -> bool:
    """Return whether the Python package of the driver's functions is installed."""
    try:
        return find_spec(MODULE) is not None
    except ModuleNotFoundError:
        return False


@dataclass
class _Range:
    """A reserved range of addresses. Mapped chunks fill its beginning without gaps."""

    address: int
    num_bytes: int
    chunk_bytes: list[int] = field(default_factory=list)  # size of each chunk, in the order of addresses
    num_mapped: int = 0  # the first chunks that are mapped now: all or none, except while `map` or `_unmap` runs

    @property
    def end(self) -> int:
        return self.address + sum(self.chunk_bytes)

    def chunks(self) -> list[tuple[int, int]]:
        """Return the address and the bytes of each chunk."""
        found, address = [], self.address
        for num_bytes in self.chunk_bytes:
            found.append((address, num_bytes))
            address += num_bytes
        return found


class DeviceMapping:
    """Reserves, maps and unmaps addresses of one device through the driver. Every error is a MappingError.

    functions: the module cuda.bindings.driver, or an object with the same functions.
    """

    def __init__(self, device_index: int, functions: Any) -> None:
        self._functions = functions
        # Access flags and the properties of physical memory.
        location = functions.CUmemLocation()
        location.type, location.id = functions.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device_index
        self._properties, self._access = functions.CUmemAllocationProp(), functions.CUmemAccessDesc()
        self._properties.type = functions.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = self._access.location = location
        self._access.flags = functions.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = functions.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (granularity,) = self._call("cuMemGetAllocationGranularity", self._properties, minimum)
        self.granularity = int(granularity)  # bytes; every mapping is a multiple

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses, and return the first one. They take no memory."""
        (address,) = self._call("cuMemAddressReserve", num_bytes, 0, 0, 0)
        return int(address)

    def free(self, address: int, num_bytes: int) -> None:
        """Free a whole reservation, in which nothing is mapped."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        """Map new physical memory at `address`, without access (see `allow`). The mapping keeps the memory alive."""
        (handle,) = self._call("cuMemCreate", num_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the device read and write mapped addresses."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap the range that one call of `map` has mapped, and free its physical memory."""
        self._call("cuMemUnmap", address, num_bytes)

    def _call(self, name: str, *arguments: Any) -> Sequence[Any]:
        error, *results = getattr(self._functions, name)(*arguments)
        if error != self._functions.CUresult.CUDA_SUCCESS:
            _, text = self._functions.cuGetErrorName(error)
            reason = text.decode() if isinstance(text, bytes) else str(error)
            raise MappingError(f"{name} of the CUDA driver failed: {reason}")
        return results


class MappedMemory:
    """A reserved range of a GPU's addresses, with tensors in its mapped beginning.

    While it is unmapped, nothing may read or write its tensors. The range is freed when this object and all its tensors
    are.
    """

    def __init__(
        self,
        most_bytes: int,
        mapping: DeviceMapping,
        settle: Callable[[], None],
        tensor_at: Callable[[int, int, object], torch.Tensor],
    ) -> None:
        """Reserve addresses for `most_bytes`.

        settle: waits until the device has no more work, and frees memory that PyTorch caches. tensor_at(address,
        num_bytes, kept): returns the memory at an address as a tensor, uint8 [num_bytes], which keeps the object `kept`
        alive.
        """
        self._mapping, self._settle, self._tensor_at = mapping, settle, tensor_at
        num_bytes = _rounded(most_bytes, mapping.granularity)
        settle()  # also makes the device's context current in this thread
        self._range = _Range(mapping.reserve(num_bytes), num_bytes)
        self._used = 0
        weakref.finalize(self, _release, self._range, mapping, settle).atexit = False

    @classmethod
    def of(cls, device: torch.device) -> MappedMemory:
        """Return a MappedMemory for a GPU, whose address range is as large as the GPU's memory."""
        from cuda.bindings import driver  # exists only beside PyTorch's CUDA builds

        index = torch.cuda.current_device() if device.index is None else device.index
        _, total = torch.cuda.mem_get_info(index)
        return cls(total, DeviceMapping(index, driver), partial(_settle, index), partial(_tensor_at, index))

    @property
    def mapped_bytes(self) -> int:
        """The bytes of physical memory that the range holds now."""
        return sum(self._range.chunk_bytes[: self._range.num_mapped])

    @property
    def is_mapped(self) -> bool:
        """Whether tensors may be read and written."""
        return self._range.num_mapped == len(self._range.chunk_bytes)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [num_bytes], aligned to ALIGNMENT bytes.

        Raises MappingError if the device lacks memory or the range is full.
        """
        assert self.is_mapped
        reserved, begin = self._range, _rounded(self._used, ALIGNMENT)
        missing = reserved.address + begin + num_bytes - reserved.end
        if missing > 0:
            self._grow(_rounded(missing, self._mapping.granularity))
        self._used = begin + num_bytes
        return self._tensor_at(reserved.address + begin, num_bytes, self)

    def contents(self) -> torch.Tensor:
        """Return the mapped memory up to the last tensor, uint8 [n]."""
        return self._tensor_at(self._range.address, self._used, self)

    def unmap(self) -> None:
        """Give the physical memory back; contents are lost. Waits for the device. Does nothing if nothing is mapped."""
        self._settle()
        _unmap(self._range, self._mapping)

    def map(self) -> None:
        """Take physical memory again; contents are undefined. Does nothing if it is mapped.

        Raises MappingError if the device lacks memory; then nothing stays mapped.
        """
        if self.is_mapped:
            return
        self._settle()
        reserved = self._range
        try:
            for address, num_bytes in reserved.chunks():
                self._mapping.map(address, num_bytes)
                reserved.num_mapped += 1
            self._mapping.allow(reserved.address, reserved.end - reserved.address)
        except MappingError as error:
            _unmap(reserved, self._mapping)
            needed = sum(reserved.chunk_bytes) / 2**30
            raise MappingError(f"{needed:.2f} GiB cannot be mapped again: {error}") from error

    def _grow(self, num_bytes: int) -> None:
        reserved = self._range
        if reserved.end + num_bytes > reserved.address + reserved.num_bytes:
            raise MappingError(f"{num_bytes} bytes more do not fit into a range of {reserved.num_bytes} bytes")
        self._settle()
        end = reserved.end
        self._mapping.map(end, num_bytes)
        try:
            self._mapping.allow(end, num_bytes)
        except MappingError:
            self._mapping.unmap(end, num_bytes)
            raise
        reserved.chunk_bytes.append(num_bytes)
        reserved.num_mapped += 1


class HostCopy:
    """A copy of device memory in pinned host memory, which is allocated at the first `save` and kept."""

    def __init__(self) -> None:
        self._memory: PinnedMemory | None = None

    def save(self, contents: torch.Tensor) -> None:
        """Copy `contents`, uint8 [n], and wait for the copy. Raises RuntimeError if the host lacks memory."""
        if self._memory is None or self._memory.bytes.numel() != contents.numel():
            self.close()
            self._memory = PinnedMemory(contents.numel(), pinned=contents.is_cuda)
        self._memory.bytes.copy_(contents)

    def restore(self, contents: torch.Tensor) -> None:
        """Copy the saved bytes to `contents`, which must have the same size, and wait for the copy."""
        assert self._memory is not None
        contents.copy_(self._memory.bytes)
        if contents.is_cuda:
            torch.cuda.synchronize(contents.device)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None


class _Span:
    """Describes device memory to PyTorch, which makes a tensor of it. The tensor keeps this object and `kept` alive."""

    def __init__(self, address: int, num_bytes: int, kept: object) -> None:
        self.kept = kept
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(device_index: int, address: int, num_bytes: int, kept: object) -> torch.Tensor:
    device = torch.device("cuda", device_index)
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    tensor = torch.as_tensor(_Span(address, num_bytes, kept), device=device)
    if tensor.data_ptr() != address:
        raise MappingError(f"PyTorch has copied memory at {address:#x} instead of using it")
    return tensor


def _settle(device_index: int) -> None:
    torch.cuda.synchronize(device_index)
    torch.cuda.empty_cache()


def _release(reserved: _Range, mapping: DeviceMapping, settle: Callable[[], None]) -> None:
    settle()
    _unmap(reserved, mapping)
    mapping.free(reserved.address, reserved.num_bytes)


def _unmap(reserved: _Range, mapping: DeviceMapping) -> None:
    for address, num_bytes in reversed(reserved.chunks()[: reserved.num_mapped]):
        mapping.unmap(address, num_bytes)
        reserved.num_mapped -= 1


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
