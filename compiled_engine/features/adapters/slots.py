"""A rank's adapters: copies in host memory, and the slots on the device that the forward reads.

A copy is sharded when it is read: rows of B like the linear's outputs, columns of A like its inputs. A thread can read
it in the background. Copying it into a slot is launched in the steps' stream, so a step in flight reads the previous
contents of the slot, and nothing waits for the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_engine.config import AdapterConfig
from compiled_engine.engine.step_hooks import RunnerParts
from compiled_engine.features.adapters.eager_adapters import adapted_parameters
from compiled_engine.models.checkpoint.adapter_files import LONGEST_HEADER
from compiled_engine.models.checkpoint.adapter_folder import (
    Adapter,
    LowRank,
    is_finite,
    match_modules,
    read_adapter,
)
from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.framework.parameter import WEIGHT, Parameter
from compiled_engine.passes.linear.adapters import MATRIX_A, MATRIX_B, RANKS, site_of

# Bytes of host memory that are pinned at a time. Pinning memory for each matrix would take most of the time of reading
# an adapter, and while memory is pinned the driver launches nothing.
PINNED_BYTES = 4 << 20
# Bytes of a weight that are copied to the device and compared at a time.
COMPARED_BYTES = 64 << 20


@dataclass(frozen=True)
class _Site:
    """A linear that may be adapted, and its part of the slots.

    Dimensions: N outputs and K inputs of the linear, S slots, R is max_lora_rank.
    """

    shape: tuple[int, ...]  # of the whole weight, [N, K]
    shard: Shard | None  # the rank's part of the weight
    weight: torch.Tensor | None  # this part; None if it is quantised
    a_SRK: torch.Tensor
    b_SNR: torch.Tensor
    ranks_S: torch.Tensor


@dataclass(frozen=True)
class _Copy:
    """An adapter's matrices for a linear in host memory, sharded and scaled. R is the adapter's rank."""

    site: _Site
    a_RK: torch.Tensor
    b_NR: torch.Tensor


class AdapterSlots:
    """Loads adapters and places them in slots. Adapters are named by the digest of their files. Not thread-safe."""

    def __init__(
        self,
        config: AdapterConfig,
        parameters: Iterable[Parameter],
        tensors: Mapping[str, torch.Tensor],
        rank: int = 0,
        num_ranks: int = 1,
    ):
        """Find the linears that may be adapted, and their slots. No adapter is loaded.

        parameters: the model's parameters, slots included. tensors: their tensors by name. rank, num_ranks: for tensor
        parallelism.
        """
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._sites = _sites(config, {parameter.name: parameter for parameter in parameters}, tensors)
        self._most_bytes = _most_bytes(config, [site.shape for site in self._sites.values()])
        self._copies: dict[str, list[_Copy]] = {}
        self._reading: dict[str, Future[list[_Copy]]] = {}

    @classmethod
    def of(cls, parts: RunnerParts) -> AdapterSlots:
        """Return the slots of a rank's model, which is compiled with the pass `adapters` or runs eagerly."""
        config, compiled = parts.config, parts.compiled
        assert config.adapters is not None
        parameters = adapted_parameters(config, parts.module) if compiled is None else compiled.parameters
        return cls(config.adapters, parameters, parts.tensors, parts.group.rank, config.parallel.tensor_parallel_size)

    def begin_load(self, path: str, digest: str) -> None:
        """Start to read an adapter in a thread, unless it is loaded or being read. `load` takes the result."""
        if digest not in self._copies and digest not in self._reading:
            self._forget_unclaimed()
            reading = self._reading[digest] = Future()
            threading.Thread(target=self._read_for, args=(reading, path, digest), daemon=True).start()

    def has_read(self, digest: str) -> bool:
        """Return False while the thread that `begin_load` has started still reads the adapter; otherwise True."""
        return digest not in self._reading or self._reading[digest].done()

    def load(self, path: str, digest: str) -> None:
        """Read an adapter into host memory, or take it from `begin_load`'s thread, unless it is loaded.

        Raises ValueError, in one line, if it does not fit the model or the slots, or if its files have another digest.
        """
        if digest in self._copies:
            return
        reading = self._reading.pop(digest, None)
        self._copies[digest] = self._read(path, digest) if reading is None else reading.result()

    def drop(self, digest: str) -> None:
        """Drop the copy in host memory. Slots keep their contents."""
        self._copies.pop(digest, None)

    def place(self, slot: int, digest: str) -> None:
        """Copy a loaded adapter into a slot, for the steps that are launched from now on."""
        copies = self._copies[digest]
        adapted = {id(copy.site) for copy in copies}
        for site in self._sites.values():
            if id(site) not in adapted:
                site.ranks_S[slot] = 0
        for copy in copies:
            rank = copy.a_RK.shape[0]
            copy.site.a_SRK[slot, :rank].copy_(copy.a_RK, non_blocking=True)
            copy.site.b_SNR[slot, :, :rank].copy_(copy.b_NR, non_blocking=True)
            copy.site.ranks_S[slot] = rank

    def _forget_unclaimed(self) -> None:
        """Drop the oldest results of `begin_load` that `load` has not taken; keep the newest max_cpu_loras.

        The requests for which the dropped adapters were read may have ended.
        """
        read = [digest for digest, reading in self._reading.items() if reading.done()]
        for digest in read[: max(0, len(read) - self._config.max_cpu_loras)]:
            del self._reading[digest]

    def _read_for(self, reading: Future[list[_Copy]], path: str, digest: str) -> None:
        try:
            reading.set_result(self._read(path, digest))
        except BaseException as error:
            reading.set_exception(error)

    def _read(self, path: str, digest: str) -> list[_Copy]:
        return self._copies_of(read_adapter(Path(path), digest=digest, most_bytes=self._most_bytes))

    def _copies_of(self, adapter: Adapter) -> list[_Copy]:
        if (reason := adapter.merged_only()) is not None:
            raise ValueError(f"{adapter.path}: {reason}; allowed: merge_adapter, which merges it into the base model")
        most = self._config.max_lora_rank
        if adapter.rank > most:
            raise ValueError(f"{adapter.path} has rank {adapter.rank}; allowed: up to max_lora_rank, {most}")
        names = match_modules(adapter, self._sites.keys())
        for module, low_rank in adapter.linears.items():
            shape, expected = (low_rank.b_NR.shape[0], low_rank.a_RK.shape[1]), self._sites[names[module]].shape
            if shape != expected:
                raise ValueError(
                    f"{adapter.path}: {module} would change {list(shape)}, but the base model's is {list(expected)}"
                )
        for module, base in adapter.bases.items():
            self._check_base(f"{adapter.path}: {module}", base, self._sites[names[module]])
        memory = _HostMemory(any(site.a_SRK.is_cuda for site in self._sites.values()))
        return [
            self._copy_of(f"{adapter.path}: {module}", self._sites[names[module]], each, memory)
            for module, each in adapter.linears.items()
        ]

    def _check_base(self, place: str, base: torch.Tensor, site: _Site) -> None:
        """Raise ValueError if the base weight saved with an adapter differs from the model's by more than rounding.

        Also raised if the model's weight is quantised, since the two cannot be compared.
        """
        if site.weight is None:
            raise ValueError(
                f"{place} has the weight that it was trained on, and the base model's is quantised, so they cannot be "
                "compared; allowed: an adapter saved with save_embedding_layers=False"
            )
        part = base if site.shard is None else site.shard.of(base, self._rank, self._num_ranks)
        if not _are_close(part, site.weight):
            raise ValueError(f"{place} was trained on another weight than the base model's; allowed: merge_adapter")

    def _copy_of(self, place: str, site: _Site, low_rank: LowRank, memory: _HostMemory) -> _Copy:
        a_RK, b_NR = low_rank.a_RK, low_rank.b_NR.float() * low_rank.scale
        dtype = site.a_SRK.dtype
        if not (is_finite(a_RK, dtype) and is_finite(b_NR, dtype)):
            raise ValueError(f"{place} has values that are not finite in {dtype}, the dtype of the model")
        if site.shard is not None and site.shard.dim is not None:
            if site.shard.dim == 0:
                b_NR = site.shard.of(b_NR, self._rank, self._num_ranks)
            else:
                a_RK = site.shard.of(a_RK, self._rank, self._num_ranks)
        held = [memory.allocate(matrix.shape, dtype).copy_(matrix) for matrix in (a_RK, b_NR)]
        return _Copy(site, *held)


def _most_bytes(config: AdapterConfig, shapes: Sequence[Sequence[int]]) -> int:
    """Return the size in bytes of the largest valid adapter file for linears of these shapes.

    The file has fp32 matrices of rank max_lora_rank for each linear. It also has room for the largest weight, since
    PEFT may save the weight of the output projection too.
    """
    matrices = sum(sum(shape) for shape in shapes) * config.max_lora_rank
    return LONGEST_HEADER + 4 * (matrices + max((math.prod(shape) for shape in shapes), default=0))


def _are_close(stored: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether two weights differ by no more than rounding to 16 bits. `stored` is on the host, of any dtype."""
    rows = max(1, COMPARED_BYTES // (stored.shape[1] * stored.dtype.itemsize))
    same = torch.ones((), dtype=torch.bool, device=weight.device)
    for part, own in zip(stored.split(rows), weight.split(rows), strict=True):
        moved = part.to(weight.device).float()
        same &= torch.isclose(moved, own.float(), rtol=2**-7, atol=1e-6).all()
    return bool(same)


class _HostMemory:
    """Allocates host tensors from blocks of at least PINNED_BYTES, which are pinned if `pinned`."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._part = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape.numel() * dtype.itemsize
        if num_bytes > len(self._part):
            size = max(num_bytes, PINNED_BYTES)
            self._part = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        taken, self._part = self._part[:num_bytes], self._part[-(-num_bytes // 16) * 16 :]
        return taken.view(dtype).view(shape)


def _sites(
    config: AdapterConfig, described: Mapping[str, Parameter], tensors: Mapping[str, torch.Tensor]
) -> dict[str, _Site]:
    """Return the linears that may be adapted, by module name.

    described, tensors: the model's parameters, slots included, and their tensors, both by name.
    """
    found: dict[str, _Site] = {}
    for parameter in described.values():
        if (weights := site_of(parameter, described)) is None:
            continue
        name = parameter.name.removesuffix(MATRIX_A)
        a_SRK, b_SNR, ranks_SM = (tensors[name + suffix] for suffix in (MATRIX_A, MATRIX_B, RANKS))
        start = 0
        for member, weight in enumerate(weights):
            module, end = weight.name.partition(".weight")[0], start + weight.shape[0]
            rows = slice(member * config.max_lora_rank, (member + 1) * config.max_lora_rank)
            shard = weight.weight_shard
            shape = weight.weight_shape if shard is None else shard.whole
            own = tensors.get(weight.name) if weight.role == WEIGHT else None
            found[module] = _Site(shape, shard, own, a_SRK[:, rows], b_SNR[:, start:end], ranks_SM[:, member])
            start = end
    return found
