"""Records the kernel calls of a compiled forward on a CPU, once for each batch kind, and replays them.

A batch kind is a combination of batch size, number of threads and input addresses. In a step of a few tokens, calling
the kernels from Python takes as long as running them; a replay calls them from C++.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs, ForwardArguments, addresses
from compiled_engine.graphs.compiled_model import BoundRange, CompiledModel
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.graphs.cpu_graphs.recorder import Arena, CallList, CannotRecord, recording

log = logging.getLogger("compiled_engine")

# Kind of batch: its size, the number of threads, and the addresses of its inputs.
Kind = tuple[int, ...]
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass
class RecordingCounts:
    recordings: int = 0
    kernels: int = 0  # most C++ kernel calls in one recording
    replays: int = 0


class RecordedForward:
    """Wraps a forward so that batches of only decodes replay recorded kernel calls. Other batches call the forward.

    There is one recording for each combination of batch size, number of threads and input addresses. The recording is
    made when its combination occurs for the second time. If the forward cannot be recorded, all batches call the
    forward. The result of a call is valid until the next call of any forward that allocates from the same Arena.
    """

    def __init__(self, forward: Forward, arena: Arena) -> None:
        self._forward, self._arena = forward, arena
        self._recorded: dict[Kind, tuple[CallList, Result] | None] = {}
        self._unrecordable = False
        self.counts = RecordingCounts()

    def __call__(self, *arguments: Any) -> Result:
        """Return the forward's result for a batch, by a replay if possible. arguments: see ForwardArguments."""
        inputs = _attention_inputs(arguments)
        # Attention over prompts reads values on the host, so it cannot be recorded.
        if self._unrecordable or int(inputs.host_3[0]) < inputs.seq_lens_R.shape[0]:
            return self._forward(*arguments)
        kind = arguments[0].shape[0], torch.get_num_threads(), *addresses(arguments)
        if kind not in self._recorded:
            self._recorded[kind] = None
            return self._forward(*arguments)
        recorded = self._recorded[kind]
        if recorded is None:
            return self._record(kind, arguments)
        calls, result = recorded
        calls.replay()
        self.counts.replays += 1
        return result

    def _record(self, kind: Kind, arguments: ForwardArguments) -> Result:
        try:
            num_decodes = _attention_inputs(arguments).host_3[0]
            with recording(self._arena, [num_decodes]) as calls:
                result = self._forward(*arguments)
        except CannotRecord as error:
            log.warning("decodes run without recorded calls: %s", error)
            self._unrecordable = True
            return self._forward(*arguments)  # repeats the writes of the first attempt
        if isinstance(result, tuple):
            self._recorded[kind] = calls, tuple(map(self._arena.alias, result))
        else:
            self._recorded[kind] = calls, self._arena.alias(result)
        self.counts.recordings += 1
        self.counts.kernels = max(self.counts.kernels, calls.num_kernels)
        return result


def recorded(compiled: CompiledModel, forwards: Sequence[BoundRange]) -> tuple[BoundRange, ...]:
    """Return the given forwards, with each forward for a small compile range wrapped in `RecordedForward`.

    If Inductor compiled pieces of a forward, that forward stays unwrapped, since the pieces' kernel calls cannot be
    recorded; a warning is logged. All wrapped forwards share one Arena.
    """
    arena = Arena()
    return tuple(_recorded(compiled, each, arena) if each.compile_range.small else each for each in forwards)


def _recorded(compiled: CompiledModel, bound: BoundRange, arena: Arena) -> BoundRange:
    if compiled.is_direct(bound.compile_range):
        return replace(bound, call=RecordedForward(bound.call, arena))
    log.warning("batches of %s tokens are not recorded: Inductor compiled pieces", bound.compile_range.name)
    return bound


def _attention_inputs(arguments: ForwardArguments) -> AttentionInputs:
    return next(argument for argument in arguments if isinstance(argument, AttentionInputs))
