"""Kernels compiled for a described card, and how much of the card each takes."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from typing import Any

import triton
from card_starts import Launch
from cards import WARP, Card, CardDriver
from hopper_compilation import resource_usage

from compiled_engine.kernels.kernel_digest import digest_helpers_first

# Of a multiprocessor of every card.
REGISTERS = 1 << 16
# Columns of tensor memory, which cards of compute capability 10 have.
TENSOR_MEMORY = 512


@dataclass(frozen=True)
class Program:
    """A compiled kernel, with the registers and memory that it takes."""

    kernel: str
    constants: dict[str, Any]  # values of the constexprs, by name
    num_warps: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a block
    tensor_columns: int  # of tensor memory
    is_gluon: bool

    def fits(self, card: Card) -> bool:
        """Return whether a multiprocessor of the card can run a block of the kernel."""
        registers = self.registers * self.num_warps * WARP
        return (
            self.shared_bytes <= card.shared_memory
            and registers <= REGISTERS
            and self.tensor_columns <= TENSOR_MEMORY * (card.capability[0] == 10)
        )


def compile_launch(launch: Launch, card: Card) -> Program:
    """Compile a kernel for a card with Triton and its assembler. Raises what these raise."""
    triton.runtime.driver.set_active(CardDriver(card))
    kernel = getattr(importlib.import_module(launch.module), launch.name)
    function = getattr(kernel, "jit_function", kernel)
    digest_helpers_first(kernel)
    program = function.preload(launch.specialization)
    given = json.loads(launch.specialization)
    names = [parameter.name for parameter in function.params]
    places = [place for (place,) in given["constant_keys"]]
    usage = resource_usage(program)
    return Program(
        launch.name,
        {names[place]: value for place, value in zip(places, given["constant_vals"], strict=True)},
        program.metadata.num_warps,
        int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        program.metadata.shared,
        getattr(program.metadata, "tmem_size", None) or 0,
        function.is_gluon(),
    )
