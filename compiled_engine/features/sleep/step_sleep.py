"""The part of sleep on a rank's device: gives the pages of tensors back to the system."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch

from compiled_engine.engine.forward import ModelForward
from compiled_engine.engine.load_model import RankWeights
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.sleep.plan import KV_CACHE, NAME, WEIGHTS

# Return a model's tensors that the checkpoint fills, and note that their values are lost.
LoseWeights = Callable[[], Iterable[torch.Tensor]]


class StepSleep(StepFeature):
    """Gives back the KV cache and the weights of a rank on a CPU.

    Tensors stay at their addresses; the pages given back read as zeros. Buffers, and parameters that a weight update
    does not fill, are kept.
    """

    name = NAME
    calls = ("give_back",)

    def __init__(self, weights: RankWeights, model: ModelForward, others: Sequence[LoseWeights] = ()) -> None:
        """Make the feature of a rank. others: of models beside the text model."""
        self._weights, self._model, self._others = weights, model, tuple(others)

    def give_back(self, tags: Sequence[str]) -> None:
        """Give back the memory of the parts `tags`, see TAGS."""
        if KV_CACHE in tags:
            give_back(self._model.kv_caches)
        if WEIGHTS in tags:
            give_back(self._weights.stored.filled())
            for lose_weights in self._others:
                give_back(lose_weights())

    def close(self) -> None:
        del self._weights, self._model, self._others


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Give the whole pages of tensors in anonymous memory back to the system. Raises OSError if the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise refuses to free the pages of a tensor")
