"""Gives the memory of weights and KV cache on a rank's device back to the system, and takes it again.

On a CPU the pages of tensors go back to the system, which provides new ones at their next use. On a GPU weights and KV
cache are in mapped memory (`rank_memory`), which is unmapped and mapped again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.rank_memory import RankMemory
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.sleep.mapped_memory import HostCopy, MappedMemory
from compiled_engine.features.sleep.plan import KV_CACHE, NAME, WEIGHTS

# A function that returns the tensors of a model that the checkpoint fills, and records that their values are lost.
LoseWeights = Callable[[], Iterable[torch.Tensor]]


def rank_memory(config: EngineConfig) -> RankMemory:
    """Return the memory of a rank that may sleep: mapped memory on a GPU, PyTorch's own on a CPU."""
    if not config.sleeps or config.device.type == "cpu":
        return RankMemory()
    return RankMemory(MappedMemory.of(config.device), MappedMemory.of(config.device))


def step_sleep(parts: RunnerParts, others: Sequence[LoseWeights] = ()) -> StepFeature:
    """Return the sleep feature of a rank.

    others: for each model besides the text model, the function that marks its weights as lost and returns them.
    """
    weights, kv_cache = parts.memory.weights, parts.memory.kv_cache
    lose_weights = (parts.weights.stored.filled, *others)
    if isinstance(weights, MappedMemory) and isinstance(kv_cache, MappedMemory):
        return MappedSleep(weights, kv_cache, others)
    return PagedSleep(lambda: parts.model.kv_caches, lose_weights)


class PagedSleep(StepFeature):
    """Gives back the KV cache and the weights of a rank on a CPU.

    Tensors stay at their addresses; the pages given back read as zeros. Buffers, and parameters that a weight update
    does not fill, are kept.
    """

    name = NAME
    calls = ("give_back", "take_again")

    def __init__(self, kv_caches: Callable[[], Iterable[torch.Tensor]], lose_weights: Sequence[LoseWeights]) -> None:
        self._kv_caches, self._lose_weights = kv_caches, tuple(lose_weights)

    def give_back(self, tags: Sequence[str], keeps_weights: bool) -> None:
        """Give back the memory of the parts `tags`, see TAGS. keeps_weights: the weights are left unchanged.

        Raises OSError if the system refuses.
        """
        if KV_CACHE in tags:
            give_back(self._kv_caches())
        if WEIGHTS in tags and not keeps_weights:
            for lose_weights in self._lose_weights:
                give_back(lose_weights())

    def take_again(self, tags: Sequence[str]) -> None:
        """Do nothing: the system provides pages at their next use."""

    def close(self) -> None:
        del self._kv_caches, self._lose_weights


class MappedSleep(StepFeature):
    """Gives back the KV cache and the weights of a rank on a GPU.

    Tensors stay at their addresses, so compiled code and captured graphs stay valid.
    """

    name = NAME
    calls = ("give_back", "take_again")

    def __init__(self, weights: MappedMemory, kv_cache: MappedMemory, lose_weights: Sequence[LoseWeights] = ()) -> None:
        """Take over the memory of weights and KV cache.

        lose_weights: for each model besides the text model whose weights are in `weights`, the function that marks them
        as lost and returns them.
        """
        self._memory = {WEIGHTS: weights, KV_CACHE: kv_cache}
        self._lose_weights = tuple(lose_weights)
        self._copy = HostCopy()
        self._is_saved = False

    def give_back(self, tags: Sequence[str], keeps_weights: bool) -> None:
        """Give back the memory of the parts `tags`, see TAGS. Parts that are given back already stay so.

        keeps_weights: weights are copied to pinned host memory first, and `take_again` restores them. Raises
        ControlError if the host lacks memory for the copy, MappingError if the driver refuses.
        """
        weights = self._memory[WEIGHTS]
        if WEIGHTS in tags:
            if weights.is_mapped and keeps_weights:
                try:
                    self._copy.save(weights.contents())
                except RuntimeError as error:
                    needed = weights.mapped_bytes / 2**30
                    raise ControlError(f"level 1 needs {needed:.1f} GiB of pinned host memory: {error}") from error
                self._is_saved = True
            elif not keeps_weights:
                self._is_saved = False
                for lose_weights in self._lose_weights:
                    lose_weights()
        for tag in tags:
            self._memory[tag].unmap()

    def take_again(self, tags: Sequence[str]) -> None:
        """Take the memory of the parts `tags` again.

        Set the KV cache to zero, and restore the weights if they were saved.

        Raises MappingError if the device lacks memory, for example because a trainer uses it; a later call may succeed.
        """
        for tag in tags:
            memory = self._memory[tag]
            if memory.is_mapped:
                continue
            memory.map()
            if tag == KV_CACHE:
                memory.contents().zero_()
            elif self._is_saved:
                self._copy.restore(memory.contents())
                self._is_saved = False

    def close(self) -> None:
        self._copy.close()
        del self._memory, self._lose_weights, self._copy


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Give the whole pages of tensors in anonymous memory back to the system. Raises OSError if the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise refuses to free the pages of a tensor")
