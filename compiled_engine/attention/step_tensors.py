"""The tensors that a forward reads of a step, declared once.

The fixed buffers, the sizes that a trace leaves open, examples and dummy batches, the signature of the compiled forward
and the addresses that recorded calls depend on all follow from these declarations. A pass may ask for more, see
`GraphPass.step_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs

# A forward's arguments in their order; behind them comes each step tensor that a pass asks for.
FORWARD_ARGUMENTS = ("input_ids_T", "positions_T", "attention_inputs", "kv_caches")
ForwardArguments = tuple[Any, ...]

# The sizes that differ from step to step, with the least and the most that each can be. The compile range bounds the
# tokens. The number of requests is not in the cache key, so it may not shape the trace: this is more than any step has.
_MOST = 1 << 31
SIZES = {
    "tokens": (1, _MOST),
    "requests": (1, 1 << 20),
    "blocks_per_request": (1, _MOST),
    "work": (1, _MOST),
    "request_borders": (2, (1 << 20) + 1),
    "blocks": (1, _MOST),
}

# (step, states) -> values. step: the step tensors of a batch, padded, by name, and rows_R, int32 [R]: the row of each
# request in the states, -1 for padding. states: the runner's RequestStates.
Fill = Callable[[Mapping[str, torch.Tensor], Any], torch.Tensor]


@dataclass(frozen=True)
class StepTensor:
    """An argument of a forward. `name` is its path: input_ids_T, attention_inputs.seq_lens_R, kv_caches.3.

    dims: numbers, and names of SIZES where a size differs from step to step. padding: the value for padding tokens and
    padding rows. on_host: it is a tensor on the CPU.

    fill: for a tensor that a pass asks for, whose first dimension is tokens or requests: computes the values of a
    padded batch on the device. What it returns for padding is replaced by `padding`. It may be captured in a CUDA
    graph, so its launches follow from shapes alone, and it reads fixed memory.
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype
    padding: float = 0
    fill: Fill | None = None
    on_host: bool = False

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """sizes: of each dimension that has a name."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


# See AttentionInputs, which has what begins with its name.
STEP_TENSORS = (
    StepTensor("input_ids_T", ("tokens",), torch.int64),
    StepTensor("positions_T", ("tokens",), torch.int64),
    StepTensor("attention_inputs.slot_mapping_T", ("tokens",), torch.int64, padding=-1),
    StepTensor("attention_inputs.seq_lens_R", ("requests",), torch.int32),
    StepTensor("attention_inputs.block_table_RB", ("requests", "blocks_per_request"), torch.int32),
    StepTensor("attention_inputs.work_W", ("work",), torch.int32),
    StepTensor("attention_inputs.query_start_loc_R1", ("request_borders",), torch.int32),
    StepTensor("attention_inputs.host_3", (3,), torch.int32, on_host=True),
)

_NAMES = frozenset(t.name for t in STEP_TENSORS)
_FIELDS = [(t.name.partition(".")[2], t.name) for t in STEP_TENSORS if "." in t.name]
_FIELDS_ON_DEVICE = [t.name.partition(".")[2] for t in STEP_TENSORS if "." in t.name and not t.on_host]


def kv_cache_tensors(shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> tuple[StepTensor, ...]:
    """One for each layer. shapes: of the caches; their first dimension is that of blocks."""
    return tuple(StepTensor(f"kv_caches.{i}", ("blocks", *shape[1:]), dtype) for i, shape in enumerate(shapes))


def padding_of(
    tensors: Iterable[StepTensor], sizes: Mapping[str, int], device: torch.device
) -> dict[str, torch.Tensor]:
    """New tensors of these sizes that hold padding alone, by name."""
    return {
        t.name: torch.full(t.shape(sizes), t.padding, dtype=t.dtype, device="cpu" if t.on_host else device)
        for t in tensors
    }


def attention_inputs_of(step: Mapping[str, torch.Tensor], backend: str) -> AttentionInputs:
    """step: the step tensors of a batch, by name."""
    return AttentionInputs(**{field: step[name] for field, name in _FIELDS}, backend=backend)


def arguments_of(
    step: Mapping[str, torch.Tensor], attention_inputs: AttentionInputs, kv_caches: list[torch.Tensor]
) -> ForwardArguments:
    """A forward's arguments in their order. step: the step tensors of a batch, by name."""
    asked = [tensor for name, tensor in step.items() if name not in _NAMES]
    return step["input_ids_T"], step["positions_T"], attention_inputs, kv_caches, *asked


def addresses(arguments: ForwardArguments) -> tuple[int, ...]:
    """Where a forward's arguments are on the device. Caches are replaced together: the first and the last stand for
    all."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, AttentionInputs):
            found += [getattr(argument, field) for field in _FIELDS_ON_DEVICE]
        else:
            found += [argument] if isinstance(argument, torch.Tensor) else [argument[0], argument[-1]]
    return tuple([tensor.data_ptr() for tensor in found])


def step_of(
    ids_T: Sequence[int],
    spans: Sequence[range],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The step tensors of requests, decodes first, that compute the positions in `spans` and own these blocks."""
    slots_T = [
        owned[position // block_size] * block_size + position % block_size
        for span, owned in zip(spans, blocks, strict=True)
        for position in span
    ]
    lens_R, seq_lens_R = [len(span) for span in spans], [span.stop for span in spans]
    values: dict[str, Sequence[Any]] = {
        "input_ids_T": ids_T,
        "positions_T": [position for span in spans for position in span],
        "attention_inputs.slot_mapping_T": slots_T,
        "attention_inputs.seq_lens_R": seq_lens_R,
        "attention_inputs.block_table_RB": [list(owned) for owned in blocks],
        "attention_inputs.work_W": [],
        "attention_inputs.query_start_loc_R1": list(accumulate(lens_R, initial=0)),
        "attention_inputs.host_3": [lens_R.count(1), max(lens_R), max(seq_lens_R)],
    }
    return {
        t.name: torch.tensor(values[t.name], dtype=t.dtype, device="cpu" if t.on_host else device) for t in STEP_TENSORS
    }
