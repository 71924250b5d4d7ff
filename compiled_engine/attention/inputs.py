"""Declares the step tensors: the tensors of a step that a forward reads.

The fixed buffers, the dynamic sizes of a trace, example and dummy batches, the signature of the compiled forward and
the addresses in recorded CPU calls are all derived from these declarations. A pass may declare more, see
`GraphPass.step_tensors`.

Shape suffixes used in tensor names throughout the project: T tokens in the step, R requests (rows) in the step,
B blocks a request may own, H query heads, K key/value heads, d head size, D hidden size, V vocabulary size,
N blocks in the pool, P slots in a block (the block size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch

# A forward's arguments in order, followed by the step tensors that passes declare.
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
    "embeddings": (1, _MOST),
    "windows": (1, _MOST),
    "window_borders": (2, _MOST),
}
# (step, states) -> values. step: the step tensors of a batch, padded, by name, and rows_R, int32 [R]: the row of each
# request in the states, -1 for padding. states: the runner's RequestStates.
Fill = Callable[[Mapping[str, torch.Tensor], Any], torch.Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of attention in a batch, whose decodes come first.

    A row is a run of consecutive tokens of a request, usually its only one; see host_3 for several rows.

    query_start_loc_R1: int32 [R+1], start of each row's tokens. Tokens from the last entry on, if any, are padding.
    seq_lens_R: int32 [R], tokens in the KV cache once this step's are written; 0 for a padding row, which reads nothing
        and whose output is zeros.
    block_table_RB: int32 [R, B], block ids of each row, in order; entries past the end are 0.
    slot_mapping_T: int64 [T], block * block_size + offset for each token's K and V; -1 writes nothing.
    host_3: int32 [3] on the CPU: (num_decodes, max_query_len, max_seq_len), where the first num_decodes rows have
        exactly one query token, and max_seq_len is an upper bound of seq_lens_R. If all rows are decodes, each request
        has max_query_len consecutive rows: one for its newest token and one for each draft. Each row's context is one
        token longer than that of the row before; the last rows of a request may be padding. A backend may ignore this
        grouping. All values that a captured kernel uses are part of its GraphKey.
    backend: name of the attention backend.
    work_W: int32 [W], the backend's plan for this batch. Empty if nothing was planned: a backend that needs a plan then
        makes one at each call.
    keys_ahead_T: int32 [T], number of later keys that a token sees too; they must be in the cache before attention
        runs. None: no token sees any. A token that is alone in its row must have 0.
    """

    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RB: torch.Tensor
    slot_mapping_T: torch.Tensor
    host_3: torch.Tensor
    backend: str
    work_W: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32, device="cpu"))
    keys_ahead_T: torch.Tensor | None = None

    def flat(self) -> tuple[Any, ...]:
        """Return the fields in their order: the last arguments of the attention ops."""
        return tuple([getattr(self, name) for name in FIELDS])

    @property
    def sizes(self) -> tuple[int, ...]:
        """(num_tokens, num_requests, num_decodes, max_query_len, max_seq_len): the host's facts about the batch."""
        return self.slot_mapping_T.numel(), self.seq_lens_R.numel(), *self.host_3.tolist()


FIELDS = tuple(field.name for field in fields(AttentionInputs))


class Scoring(NamedTuple):
    """The parameters with which a layer computes attention weights from queries and keys."""

    scale: float  # factor of the products of queries and keys
    sliding_window: int = 0  # number of keys visible to a query, itself included; 0: all
    soft_cap: float = 0.0  # scores are soft_cap * tanh(score / soft_cap) (Gemma 2); 0: no cap
    sinks_H: torch.Tensor | None = None  # score of an additional key without a value, any float dtype (GPT-OSS)
    # Scales of the quantised keys and values in an FP8 cache, fp32, at least LEAST_SCALE; None: 1.
    kv_scales_2K: torch.Tensor | None = None


class Rotation(NamedTuple):
    """The norm and rotary embedding of q and k, if a backend applies them before attention."""

    q_norm_weight_d: torch.Tensor | None  # None: no norm
    k_norm_weight_d: torch.Tensor | None
    eps: float
    cos_T1d: torch.Tensor  # of each token's position
    sin_T1d: torch.Tensor
    norm_offset: float = 0.0  # added to the weights of norms
    norm_wide: bool = False  # the norm is only rounded after its weight
    rotary_dim: int = 0  # variants of the rotation, see RopeForm
    interleaved: bool = False
    wide: bool = False
    norm_last: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether whole heads are rotated after their norm, in pairs half a head apart, in their own dtype."""
        return not (self.rotary_dim or self.interleaved or self.wide or self.norm_last)


def inputs_of(arguments: tuple[Any, ...]) -> AttentionInputs:
    """Return the AttentionInputs whose fields are the last arguments of an attention op."""
    return AttentionInputs(*arguments[-len(FIELDS) :])


def without_inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an attention op without the last ones, the fields of AttentionInputs."""
    return arguments[: -len(FIELDS)]


@dataclass(frozen=True)
class StepTensor:
    """A tensor argument of a forward."""

    name: str  # its path: input_ids_T, attention_inputs.seq_lens_R, kv_caches.3
    dims: tuple[int | str, ...]  # numbers, or names in SIZES of sizes that differ from step to step
    dtype: torch.dtype
    padding: float = 0  # value for padding tokens and padding rows
    # For a pass's tensor, whose first dimension is tokens or requests: computes the values of a padded batch on the
    # device. Values for padding are replaced by `padding`. It may be captured in a CUDA graph, so its launches must
    # depend only on shapes, and it must read fixed memory.
    fill: Fill | None = None
    on_host: bool = False  # the tensor is on the CPU
    variants: tuple[str, ...] = ()  # only these variants of the forward read it; (): all do
    by_logits: bool = False  # the callable of these variants' logits reads it too

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the tensor's shape. sizes: values of the named dimensions."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


# AttentionInputs describes the tensors whose names begin with attention_inputs.
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

# The inputs of attention alone.
ATTENTION_TENSORS = tuple(tensor for tensor in STEP_TENSORS if tensor.name.startswith("attention_inputs."))

# Each request's row in the states, -1 for padding. Only some models read it.
ROWS = StepTensor("rows_R", ("requests",), torch.int32, padding=-1)


def request_of_tokens(step: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the index in the batch of each token's request, int64 [T], for StepTensor.fill; arbitrary for padding."""
    ends_R = step["attention_inputs.query_start_loc_R1"][1:].contiguous()
    tokens_T = torch.arange(step["positions_T"].shape[0], dtype=torch.int32, device=ends_R.device)
    return torch.searchsorted(ends_R, tokens_T, right=True).clamp(max=ends_R.shape[0] - 1)


def _token_types(step: Mapping[str, torch.Tensor], states: Any) -> torch.Tensor:
    rows_R = step["rows_R"].clamp(min=0).long()
    return (step["positions_T"] >= states.fields[SECOND_TEXT][rows_R][request_of_tokens(step)]).long()


# The row field with the number of tokens before the second of two texts, and the types of tokens that follow from it.
SECOND_TEXT, NO_SECOND_TEXT = "second_text", (1 << 31) - 1
TOKEN_TYPES = StepTensor("token_types_T", ("tokens",), torch.int64, fill=_token_types)


def _angle_lengths(step: Mapping[str, torch.Tensor], states: Any) -> torch.Tensor:
    lengths_T = step["positions_T"] + 1
    first_S = states.fields.if_declared(FIRST_LENGTH)
    if first_S is None:  # the states are those of a model that a draft model drafts for
        return lengths_T
    rows_R = step["rows_R"].clamp(min=0).long()
    return torch.maximum(lengths_T, first_S[rows_R][request_of_tokens(step)].long())


# The row field with the number of tokens that a request is computed with at first, and the length that each token's
# rotary angles assume: that number, or for later tokens the number of tokens up to this one.
FIRST_LENGTH = "first_length"
ANGLE_LENGTHS = StepTensor("angle_lengths_T", ("tokens",), torch.int64, fill=_angle_lengths)
_NAMES = frozenset(t.name for t in STEP_TENSORS)
_FIELDS = [(t.name.partition(".")[2], t.name) for t in STEP_TENSORS if "." in t.name]
_FIELDS_ON_DEVICE = [t.name.partition(".")[2] for t in STEP_TENSORS if "." in t.name and not t.on_host]


def tensors_of_model(token_types: int, *, length_angles: bool = False) -> tuple[StepTensor, ...]:
    """Return the additional step tensors that a model needs: TOKEN_TYPES, ANGLE_LENGTHS, both or none.

    token_types: the number of the model's token types, 0 without any. length_angles: the model's rotary angles depend
    on a request's length.
    """
    return (*((TOKEN_TYPES,) if token_types else ()), *((ANGLE_LENGTHS,) if length_angles else ()))


def kv_cache_tensors(shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> tuple[StepTensor, ...]:
    """Return the declaration of each layer's KV cache. shapes: the caches' shapes; the first dimension is dynamic."""
    return tuple(StepTensor(f"kv_caches.{i}", ("blocks", *shape[1:]), dtype) for i, shape in enumerate(shapes))


def padding_of(
    tensors: Iterable[StepTensor], sizes: Mapping[str, int], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return new tensors that hold only padding, by name. sizes: values of the named dimensions."""
    return {
        t.name: torch.full(t.shape(sizes), t.padding, dtype=t.dtype, device="cpu" if t.on_host else device)
        for t in tensors
    }


def attention_inputs_of(step: Mapping[str, torch.Tensor], backend: str) -> AttentionInputs:
    """Return the attention inputs of a batch. step: the batch's step tensors, by name."""
    return AttentionInputs(**{field: step[name] for field, name in _FIELDS}, backend=backend)


def packed_inputs(num_tokens: int, lens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of attention without a cache, on the CPU, by name.

    lens: the number of tokens of each text, image or clip, which takes the place of a request.
    """
    sizes = {"tokens": num_tokens, "requests": len(lens), "request_borders": len(lens) + 1}
    found = padding_of(ATTENTION_TENSORS, sizes | {"blocks_per_request": 1, "work": 1}, torch.device("cpu"))
    return found | {
        "attention_inputs.query_start_loc_R1": torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32),
        "attention_inputs.seq_lens_R": torch.tensor(lens, dtype=torch.int32),
        "attention_inputs.host_3": torch.tensor([0, max(lens), max(lens)], dtype=torch.int32),
    }


def arguments_of(
    step: Mapping[str, torch.Tensor], attention_inputs: AttentionInputs, kv_caches: list[torch.Tensor]
) -> ForwardArguments:
    """Return a forward's arguments in the order of its parameters. step: a batch's step tensors, by name."""
    asked = [tensor for name, tensor in step.items() if name not in _NAMES]
    return step["input_ids_T"], step["positions_T"], attention_inputs, kv_caches, *asked


def addresses(arguments: ForwardArguments) -> tuple[int, ...]:
    """Return the device addresses of a forward's arguments. Of KV caches, only the first and the last are included.

    KV caches are only replaced all together, so these two show whether any was replaced.
    """
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, AttentionInputs):
            found += [getattr(argument, field) for field in _FIELDS_ON_DEVICE]
        else:
            found += [argument] if isinstance(argument, torch.Tensor) else [*argument[:1], *argument[-1:]]
    return tuple([tensor.data_ptr() for tensor in found])


def step_of(
    ids_T: Sequence[int],
    spans: Sequence[range],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    others: Iterable[StepTensor] = (),
) -> dict[str, torch.Tensor]:
    """Return the step tensors, by name, of a batch of requests, decodes first.

    ids_T: the token ids of all requests, one after the other. spans: the positions that each request computes. blocks:
    the block ids that each request owns, the same number for each. others: additional step tensors, which are filled
    with padding.
    """
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
    step = {
        t.name: torch.tensor(values[t.name], dtype=t.dtype, device="cpu" if t.on_host else device) for t in STEP_TENSORS
    }
    return step | padding_of(others, {"tokens": len(ids_T), "requests": len(spans)}, device)
