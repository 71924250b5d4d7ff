"""NVIDIA cards as the driver describes them, and a process that takes a described card for its GPU.

Kernels can be chosen and compiled for a described card, but nothing can be launched: its tensors have shapes, strides
and addresses, and no values (`card_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from card_tensors import CardTensors
from triton.backends.compiler import GPUTarget

KIB, GIB = 1 << 10, 1 << 30
WARP = 32


@dataclass(frozen=True)
class Card:
    """A card's figures, from NVIDIA's tables of compute capabilities and of the named product."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes that a block of threads can use
    memory: int  # bytes

    @property
    def arch(self) -> int:
        """The compute capability as compilers write it, such as 86 for 8.6."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)


CARDS = {
    card.arch: card
    for card in (
        Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 80 * GIB),
        Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * KIB, 24 * GIB),
        Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * KIB, 24 * GIB),
        Card("NVIDIA H200", (9, 0), 132, 227 * KIB, 141 * GIB),
        Card("NVIDIA B200", (10, 0), 148, 227 * KIB, 180 * GIB),
        Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * KIB, 32 * GIB),
    )
}


class CardDriver:
    """As much of a driver as Triton needs to specialise kernels for a card; a launch fails."""

    def __init__(self, card: Card):
        self._target = card.target
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": card.shared_memory})

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton and Launcher keep kernels by device: cards do not share theirs.
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Event:
    """An event on a card that computes nothing: it has always happened."""

    def __init__(self, **options: Any):
        pass

    def record(self, *arguments: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait = synchronize

    def query(self) -> bool:
        return True


class Stream:
    """A stream on a card that computes nothing."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, *arguments: Any) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


class _Current:
    """Stands in for torch.cuda.device: the only device is current."""

    def __init__(self, device: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def _of_torch(card: Card, tensors: CardTensors) -> dict[str, Any]:
    """Return what replaces functions and classes of torch.cuda, by name."""
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.multiprocessors,
        total_memory=card.memory,
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (card.memory, card.memory),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), lambda device=None: 0),
        **dict.fromkeys(("reset_peak_memory_stats", "synchronize"), lambda device=None: None),
        **dict.fromkeys(("empty_cache", "_lazy_init"), lambda: None),
        "set_device": lambda device: tensors.enter_thread(),
        "current_stream": lambda device=None: Stream(),
        "device": _Current,
        "Event": Event,
        "Stream": Stream,
    }


# The card that this process has taken for its GPU. The engine remembers much of what a GPU has told it.
_taken: set[Card] = set()


@contextmanager
def on_card(card: Card) -> Iterator[None]:
    """Let this process take a card for its only GPU, `cuda:0`. Tensors that are created there have no values.

    Torch then believes that CUDA is initialised, so the process cannot use a GPU afterwards. Raises RuntimeError if the
    process has taken another card before.
    """
    _taken.add(card)
    if len(_taken) > 1:
        raise RuntimeError(f"this process has taken {[each.name for each in _taken]} for its GPU; allowed: one card")
    tensors = CardTensors(torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch, tensors:
        for name, value in _of_torch(card, tensors).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(triton.runtime.driver, "_active", CardDriver(card))
        yield
