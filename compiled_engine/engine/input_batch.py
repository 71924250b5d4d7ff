"""Makes the inputs of a step: the batch (`InputBatch`), and its tensors in fixed device buffers (`InputBuffers`).

`make_batch` orders and pads the step's rows, and stages them for the device. `prepare` then fills the buffers from the
request states, with numpy on a CPU and with a kernel on a GPU. Captured graphs read only the buffers.

A batch row is a run of consecutive tokens of one request. It usually begins with the request's first token that is not
computed. In some batches a request has several rows, which begin at different *offsets* from this token: the row at
offset k begins with the k-th guess of the tokens ahead (see RequestStates), the row at offset -1 with the token before.
Either all rows of a batch have an offset, or none has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any, Protocol

import numpy as np
import torch

from compiled_engine.attention.inputs import ROWS, STEP_TENSORS, StepTensor, padding_of
from compiled_engine.engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.rows.staged_writes import StagedWrites
from compiled_engine.sampling.logprobs import BatchLogprobs

# Number of entries of the ring buffer in which a step's tokens reach the host: more than twice the steps in flight, as
# resampling writes a second entry.
RING = 64
# Step numbers wrap around after this one, to fit into int32; the ring buffer stays in order.
LAST_NUMBER = (1 << 30) - 1
NO_GENERATION = -1


@dataclass(frozen=True)
class InputBatch:
    """The rows of a step's batch, padded. Arrays and lists have an entry for each row but padding, in batch order.

    If `combine` is None, each request has one row, and `step_starts` is in the order of SchedulerOutput instead.
    Example: a step decodes the requests a, b and c from tokens 5, 9 and 7 on. Then request_of_row is [b, c, a], order
    [2, 0, 1] (a has batch row 2), step_starts [5, 9, 7], and num_computed [9, 7, 5].
    """

    request_of_row: list[str]  # ids; an id occurs several times if `combine` is set
    rows: np.ndarray  # rows of the states, int32
    query_starts: np.ndarray  # query_start_loc_R1
    step_starts: list[int]  # SchedulerOutput.starts, in the step's order; with `combine` per row, in batch order
    samples: np.ndarray  # whether the row samples, bool
    num_tokens: int
    key: GraphKey | None  # the graph that the batch is padded for, or None
    decodes_only: bool  # attention and kernels may rely on one token per row
    num_rows: int  # padding included, like padded_tokens
    padded_tokens: int
    host: tuple[int, int, int]  # AttentionInputs.host_3
    order: np.ndarray | None = None  # int [R], the batch row of each request of the step; None: in the step's order
    combine: CombineRows | None = None  # set if requests may have several rows
    variant: str = ""  # the forward's variant, see StepFeature
    has_offsets: bool = False  # see the module's docstring

    @property
    def num_real_rows(self) -> int:
        return len(self.request_of_row)

    @property
    def has_decode_graph(self) -> bool:
        """Whether the batch's graph holds the whole step, sampling included."""
        return self.decodes_only and self.key is not None

    @cached_property
    def num_computed(self) -> np.ndarray:
        """The number of tokens before each row, int32 [R]. Their K and V are in the cache before the step."""
        num_computed_R = np.array(self.step_starts, np.int32)
        return num_computed_R if self.order is None else _reordered(num_computed_R, self.order)


class CombineRows(Protocol):
    """A function that combines the results of a batch's rows into those of its requests, which may have several."""

    def __call__(
        self,
        request_of_row: Sequence[str],
        tokens_R: np.ndarray,
        logprobs: BatchLogprobs | None,
        extras: dict[str, dict[str, Any]],
    ) -> RunnerOutput:
        """Return the step's output, with the results of each request.

        request_of_row, tokens_R: the request id and the sampled token of each row, in batch order. logprobs: the
        log-probabilities of each row, in the same order; None if no request asks for them. extras: see
        RunnerOutput.
        """
        ...


def make_batch(step: SchedulerOutput, states: RequestStates, buffers: InputBuffers, key: GraphKey | None) -> InputBatch:
    """Return the batch of a step, padded to the size of the graph `key` (None: not padded), and stage its rows.

    Staged values reach the device when StagedWrites.apply is called.

    Padding tokens have no slot and belong to rows with an empty context, so they write and read nothing. If no CUDA
    graph holds the attention, it gets no padding rows, and padding tokens follow the last row. In a batch of decodes,
    rows are ordered by descending context, so that the longest attention does not start last.
    """
    count, lens = len(step.request_ids), step.counts
    request_of_row, order = step.request_ids, None
    samples_R = np.ones(count, bool) if all(step.samples) else np.array(step.samples)
    num_tokens = sum(lens)
    decodes_only = num_tokens == count and (key is None or key.is_decode)
    padded_tokens = key.num_tokens if key else num_tokens
    if decodes_only:
        num_rows = padded_tokens
        decodes = buffers.decodes
        if decodes is None or not decodes.is_of(request_of_row, states.generation, num_rows):
            decodes = _longest_first(step, states, num_rows)
            buffers.stage_decodes(decodes)
        request_of_row, rows_R, order = decodes.request_of_row, decodes.rows, decodes.order
        if order is not None:
            samples_R = _reordered(samples_R, order)
        query_starts_R1 = np.arange(count + 1, dtype=np.int32)
        host = (num_rows, 1, key.max_seq_len if key else max(step.starts) + 1)
    else:
        rows_R = states.rows(request_of_row)
        lens_R = np.array(lens, np.int32)
        query_starts_R1 = np.concatenate(([0], np.cumsum(lens_R))).astype(np.int32)
        if key is not None and key.kind is GraphKind.FULL:  # the first padding row gets the padding tokens
            num_rows = key.num_rows
            padding = np.full(num_rows - count, -1, np.int32)
            ends = np.full(num_rows - count, padded_tokens, np.int32)
            # Full graphs also serve batches with offsets, so the offsets must be set.
            offsets_R = None if buffers.offsets_R is None else np.zeros(num_rows, np.int32)
            buffers.stage_batch(np.concatenate((rows_R, padding)), np.concatenate((query_starts_R1, ends)), offsets_R)
        else:
            num_rows = count
            buffers.stage_batch(rows_R, query_starts_R1)
        host = host_of(key, lens.count(1), max(lens), max(map(add, step.starts, lens)))
    return InputBatch(
        request_of_row,
        rows_R,
        query_starts_R1,
        step.starts,
        samples_R,
        num_tokens,
        key,
        decodes_only,
        num_rows,
        padded_tokens,
        host,
        order,
    )


def host_of(key: GraphKey | None, num_decodes: int, longest_query: int, longest_context: int) -> tuple[int, int, int]:
    """Return a batch's AttentionInputs.host_3: the given values, or `key`'s if a CUDA graph holds the attention."""
    if key is not None and key.kind is GraphKind.FULL:
        return key.num_decodes, key.max_query_len, key.max_seq_len
    return num_decodes, longest_query, longest_context


def _longest_first(step: SchedulerOutput, states: RequestStates, num_rows: int) -> StagedDecodes:
    """Return a step's decodes in the order of descending contexts, padded to `num_rows`.

    All contexts grow by one token per step, so the order stays valid in later steps.
    """
    contexts_R = np.array(step.starts, np.int32)
    request_of_row, order = step.request_ids, None
    if (contexts_R[:-1] < contexts_R[1:]).any():
        longest_first_R = np.argsort(-contexts_R, kind="stable")
        request_of_row = [request_of_row[i] for i in longest_first_R.tolist()]
        order = np.argsort(longest_first_R)
    return StagedDecodes(
        step.request_ids, states.generation, num_rows, request_of_row, states.rows(request_of_row), order
    )


def _reordered(values_R: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return values of the step's requests in the order of batch rows. order: the batch row of each request."""
    reordered_R = np.empty_like(values_R)
    reordered_R[order] = values_R
    return reordered_R


def empty_batch(
    buffers: InputBuffers,
    num_tokens: int,
    num_rows: int,
    host: tuple[int, int, int],
    key: GraphKey | None = None,
    *,
    variant: str = "",
) -> InputBatch:
    """Return a batch that consists of padding, so that running it has no side effects. `stage_empty` stages it.

    num_rows, num_tokens: size of the padding. host: AttentionInputs.host_3. variant: the forward's variant, unless
    `key` names one.
    """
    nothing = np.empty(0, np.int32)
    decodes_only = num_tokens == num_rows and (key is None or key.is_decode)
    starts_1 = np.zeros(1, np.int32)
    batch = InputBatch([], nothing, starts_1, [], nothing > 0, 0, key, decodes_only, num_rows, num_tokens, host)
    variant = (key and key.variant) or variant
    has_offsets = buffers.offsets_R is not None and (key is None or not key.without_offsets)
    return replace(batch, variant=variant, has_offsets=has_offsets) if variant or has_offsets else batch


def stage_empty(batch: InputBatch, buffers: InputBuffers) -> None:
    """Stage the rows of a batch from `empty_batch`."""
    if batch.decodes_only:
        buffers.stage_decodes(StagedDecodes.padding(batch.num_rows))
    else:
        starts_R1 = padding_starts(batch.padded_tokens, batch.num_rows)
        buffers.stage_batch(np.full(batch.num_rows, -1, np.int32), starts_R1)


def padding_starts(num_tokens: int, num_rows: int) -> np.ndarray:
    """Return query_start_loc_R1 for a batch of padding: the offsets of `num_rows` rows, int32 [num_rows + 1].

    If there are as many tokens as rows, each row has one. Otherwise the rows that are not empty have an equal number of
    tokens, at least two. With too few tokens for that, the last rows are empty; tokens that are left over belong to no
    row. Unequal lengths would make flash-attn 2 write out of bounds: for requests without keys it computes the number
    of tokens from the largest length.
    """
    each = 1 if num_tokens == num_rows else max(2, num_tokens // num_rows)
    return np.minimum(np.arange(num_rows + 1) * each, num_tokens // each * each).astype(np.int32)


@dataclass(frozen=True)
class StagedDecodes:
    """The rows of a batch of decodes that were staged. Later steps with the same requests and rows reuse them."""

    step_ids: list[str]  # the requests, in the step's order
    generation: int  # RequestStates.generation when the batch was made
    num_rows: int  # padding included
    request_of_row: list[str]  # see InputBatch
    rows: np.ndarray  # rows of the states, int32 [R], in batch order
    order: np.ndarray | None  # see InputBatch

    @classmethod
    def padding(cls, num_rows: int) -> StagedDecodes:
        """Return a batch of padding only."""
        return cls([], NO_GENERATION, num_rows, [], np.empty(0, np.int32), None)

    def is_of(self, step_ids: list[str], generation: int, num_rows: int) -> bool:
        return self.num_rows == num_rows and self.generation == generation and self.step_ids == step_ids


class InputBuffers:
    """Device buffers for the inputs of a step of up to max_num_tokens tokens and max_num_rows rows, padding included.

    The host writes rows_R, query_start_loc_R1 and offsets_R, by staged writes. Kernels compute all other buffers from
    these and the request states. max_blocks: most blocks of a request. work_length: length of AttentionInputs.work_W.
    asked: further inputs of the forward, which passes declare and which change with each step. has_offsets: whether
    batches may have several rows for a request, which begin at different offsets, see the module's docstring.
    shifts_positions: whether a row's position shift (see RequestStates.shift_positions) is added to the positions.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        max_blocks: int,
        writes: StagedWrites,
        device: torch.device,
        work_length: int = 0,
        asked: Sequence[StepTensor] = (),
        *,
        has_offsets: bool = False,
        shifts_positions: bool = True,
    ):
        self.shifts_positions = shifts_positions
        self._rows = writes.field(max_num_rows)
        self._query_start_loc = writes.field(max_num_rows + 1)
        self._offsets = writes.field(max_num_rows) if has_offsets else None
        # The offset of each row, int32; None if no batch has any. Kernels may write them too.
        self.offsets_R = None if self._offsets is None else self._offsets.tensor
        self.rows_R = self._rows.tensor  # the state row of each batch row, -1 for padding, int32
        self.query_start_loc_R1 = self._query_start_loc.tensor
        self.starts_of_decodes_R1 = torch.arange(max_num_rows + 1, dtype=torch.int32, device=device)

        def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        sizes = {
            "tokens": max_num_tokens,
            "requests": max_num_rows,
            "blocks_per_request": max_blocks,
            "work": work_length,
        }
        declared = (*(tensor for tensor in STEP_TENSORS if sizes.keys() >= {*tensor.dims}), *asked)
        step = padding_of(declared, sizes, device)
        step = {name: self.rows_R if name == ROWS.name else tensor for name, tensor in step.items()}
        # By variant of the forward: the step tensors with their names and first dimensions, and those that passes
        # declare.
        self.step: dict[str, list[tuple[str, int | str, torch.Tensor]]] = {}
        self.asked: dict[str, tuple[StepTensor, ...]] = {}
        for variant in dict.fromkeys(["", *(variant for tensor in asked for variant in tensor.variants)]):
            read = [tensor for tensor in declared if not tensor.variants or variant in tensor.variants]
            self.step[variant] = [(tensor.name, tensor.dims[0], step[tensor.name]) for tensor in read]
            self.asked[variant] = tuple(tensor for tensor in asked if tensor in read)
        self._by_logits = {
            variant: tuple(step[tensor.name] for tensor in asked if tensor.by_logits and variant in tensor.variants)
            for variant in self.step
        }
        self.input_ids_T, self.positions_T = step["input_ids_T"], step["positions_T"]
        self.slot_mapping_T = step["attention_inputs.slot_mapping_T"]
        self.seq_lens_R = step["attention_inputs.seq_lens_R"]
        self.block_table_RB = step["attention_inputs.block_table_RB"]
        self.logits_index_R = made(max_num_rows, dtype=torch.int64)  # the last token of each row
        self.sample_positions_R = made(max_num_rows, dtype=torch.int64)  # positions of the tokens to sample
        self.num_steps_1 = made(1, dtype=torch.int32)
        # The ring buffer: each entry has a step's number and then its tokens, see step_sampling.TokenRing.
        self.tokens_KR1 = torch.zeros(
            RING, max_num_rows + 1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        # The batch that was staged last, if it is of decodes, or if it has offsets: rows_R, query_start_loc_R1 and
        # offsets_R. A batch equal to it is not staged again.
        self.decodes: StagedDecodes | None = None
        self.staged_offsets: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def stage_decodes(self, decodes: StagedDecodes) -> None:
        """Stage the rows of a batch of decodes, unless the buffers already have the same rows."""
        there, self.decodes, self.staged_offsets = self.decodes, decodes, None
        if there is not None and there.num_rows == decodes.num_rows and np.array_equal(there.rows, decodes.rows):
            return
        padded_rows_R = np.full(decodes.num_rows, -1, np.int32)
        padded_rows_R[: len(decodes.rows)] = decodes.rows
        self._rows.stage(0, padded_rows_R)

    def stage_batch(self, rows_R: np.ndarray, query_starts_R1: np.ndarray, offsets_R: np.ndarray | None = None) -> None:
        """Stage the rows of a batch, padding included.

        offsets_R: where each row begins, counted from its request's first token that is not computed, see the module's
        docstring; None if rows have no offsets.
        """
        self.decodes, there = None, self.staged_offsets
        self.staged_offsets = None
        if offsets_R is not None:
            assert self._offsets is not None
            self.staged_offsets = rows_R, query_starts_R1, offsets_R
            if there is not None and all(map(np.array_equal, there, self.staged_offsets)):
                return
            self._offsets.stage(0, offsets_R)
        self._rows.stage(0, rows_R)
        self._query_start_loc.stage(0, query_starts_R1)

    def logits_inputs(self, variant: str, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the computation of logits reads besides hidden states, for `num_tokens` tokens.

        variant: the variant of the forward that returned the hidden states.
        """
        return tuple(tensor_T[:num_tokens] for tensor_T in self._by_logits[variant])

    def forget_staged(self) -> None:
        """Forget which batch was staged last, so that the next one is staged in any case.

        Call it if the staged rows did not reach the device.
        """
        self.decodes = self.staged_offsets = None


def step_of_batch(batch: InputBatch, buffers: InputBuffers) -> dict[str, torch.Tensor]:
    """Return the step tensors of a batch by name, padding included. All but host_3 are views of the buffers."""
    sizes: dict[int | str, int] = {"tokens": batch.padded_tokens, "requests": batch.num_rows}
    starts_R1 = buffers.starts_of_decodes_R1 if batch.decodes_only else buffers.query_start_loc_R1
    step = {
        "attention_inputs.query_start_loc_R1": starts_R1[: batch.num_rows + 1],
        "attention_inputs.host_3": torch.tensor(batch.host, dtype=torch.int32, device="cpu"),
    }
    for name, first_dim, tensor in buffers.step[batch.variant]:
        step[name] = tensor[: sizes[first_dim]] if first_dim in sizes else tensor
    return step


def prepare(batch: InputBatch, states: RequestStates, buffers: InputBuffers) -> None:
    """Fill the buffers with the batch's inputs, on the device. The batch's staged writes must have been applied."""
    fill = prepare_reference if buffers.rows_R.device.type == "cpu" else launch_prepare
    fill(states, buffers, batch.num_rows, batch.padded_tokens, batch.decodes_only, has_offsets=batch.has_offsets)
    if asked := buffers.asked[batch.variant]:
        _fill_asked(batch, states, buffers, asked)


def _fill_asked(batch: InputBatch, states: RequestStates, buffers: InputBuffers, asked: Sequence[StepTensor]) -> None:
    """Fill the step tensors that passes declare, by their `fill` functions.

    Raises ValueError if a function returns values of the wrong shape.
    """
    step = step_of_batch(batch, buffers)
    step["rows_R"] = buffers.rows_R[: batch.num_rows]
    real = {"tokens": step["attention_inputs.slot_mapping_T"] >= 0, "requests": step["rows_R"] >= 0}
    for tensor in asked:
        if tensor.fill is None:
            continue  # a feature writes this tensor
        values, into = tensor.fill(step, states), step[tensor.name]
        if values.shape != into.shape:
            shapes = f"{list(values.shape)} instead of {list(into.shape)}"
            raise ValueError(f"step tensor {tensor.name}: its fill has returned values of shape {shapes}")
        real_rows = real[str(tensor.dims[0])].view(-1, *[1] * (into.dim() - 1))
        into.copy_(torch.where(real_rows, values, tensor.padding))


def launch_prepare(
    states: RequestStates,
    buffers: InputBuffers,
    num_rows: int,
    num_tokens: int,
    decodes_only: bool,
    has_offsets: bool = False,
) -> None:
    """Launch the kernel that fills the buffers for the batch whose rows were staged.

    num_rows, num_tokens: how many rows and tokens to fill, padding included. A padding row (-1) gets an empty context;
    padding tokens get id 0 and slot -1. decodes_only: each row has one token; query_start_loc_R1 is not read.
    has_offsets: rows have offsets, see the module's docstring; otherwise offsets_R is not read.
    """
    from compiled_engine.engine.step_kernels import TILE, prepare_kernel  # Triton is not installed everywhere

    ahead_SK, history_SL = (states.ahead_SK, states.history_SL) if has_offsets else (None, None)
    prepare_kernel[(num_rows if decodes_only else num_rows + 1,)](
        buffers.rows_R,
        buffers.query_start_loc_R1,
        states.num_computed_S,
        states.prefill_len_S,
        states.last_token_S,
        states.token_row_S,
        states.all_token_ids_KL,
        states.block_table_SB,
        buffers.input_ids_T,
        buffers.positions_T,
        buffers.slot_mapping_T,
        buffers.seq_lens_R,
        buffers.logits_index_R,
        buffers.block_table_RB,
        buffers.sample_positions_R,
        buffers.offsets_R if has_offsets else None,
        ahead_SK,
        history_SL,
        states.position_shift_S if buffers.shifts_positions else None,
        num_rows,
        num_tokens,
        states.all_token_ids_KL.stride(0),
        0 if history_SL is None else history_SL.stride(0),
        NUM_AHEAD=0 if ahead_SK is None else ahead_SK.shape[1],
        MAX_BLOCKS=states.block_table_SB.shape[1],
        BLOCK_SIZE=states.block_size,
        DECODES_ONLY=decodes_only,
        TILE=32 if decodes_only else TILE,
        num_warps=1 if decodes_only else 4,
        **dependent_launch(buffers.rows_R.device),
    )


def prepare_reference(
    states: RequestStates,
    buffers: InputBuffers,
    num_rows: int,
    num_tokens: int,
    decodes_only: bool,
    has_offsets: bool = False,
) -> None:
    """Do the work of `launch_prepare` on a CPU, with numpy."""
    rows_R = buffers.rows_R.numpy()[:num_rows]
    starts_R1 = np.arange(num_rows + 1) if decodes_only else buffers.query_start_loc_R1.numpy()[: num_rows + 1]
    lens_R = np.diff(starts_R1)
    real_R = rows_R >= 0
    computed_R = np.where(real_R, states.num_computed_S.numpy()[rows_R], 0)
    known_R = states.prefill_len_S.numpy()[rows_R]
    newest_R = states.last_token_S.numpy()[rows_R]
    if has_offsets:
        assert states.ahead_SK is not None
        assert buffers.offsets_R is not None
        offset_R = np.where(real_R, buffers.offsets_R.numpy()[:num_rows], 0)
        supposed_R = states.ahead_SK.numpy()[rows_R, np.maximum(offset_R - 1, 0)]
        real_R &= (offset_R <= 0) | (supposed_R >= 0)
        if states.history_SL is None:  # all_token_ids_KL has the tokens before the newest one
            known_R = np.where(offset_R < 0, np.maximum(known_R, computed_R + 1), known_R)
        computed_R = np.where(real_R, computed_R + offset_R, 0)
        newest_R = np.where(offset_R > 0, supposed_R, newest_R)
        if states.history_SL is not None:
            newest_R = np.where(offset_R < 0, states.history_SL.numpy()[rows_R, np.maximum(computed_R, 0)], newest_R)

    request_T = np.repeat(np.arange(num_rows), lens_R)
    covered = min(len(request_T), num_tokens)
    request_T = request_T[:covered]
    positions_T = np.arange(covered) - starts_R1[request_T] + computed_R[request_T]
    row_T = rows_R[request_T]
    all_token_ids_KL = states.all_token_ids_KL.numpy()
    all_token_ids_T = all_token_ids_KL[
        states.token_row_S.numpy()[row_T], np.minimum(positions_T, all_token_ids_KL.shape[1] - 1)
    ]
    ids_T = np.where(positions_T < known_R[request_T], all_token_ids_T, newest_R[request_T])
    table_SB = states.block_table_SB.numpy()
    block_T, offset_T = np.divmod(positions_T, states.block_size)
    blocks_T = table_SB[row_T, np.minimum(block_T, table_SB.shape[1] - 1)].astype(np.int64)
    real_T = real_R[request_T]
    if buffers.shifts_positions and states.position_shift_S is not None:
        positions_T = positions_T + states.position_shift_S.numpy()[row_T]
    for tensor, values, padding in (
        (buffers.input_ids_T, ids_T, 0),
        (buffers.positions_T, positions_T, 0),
        (buffers.slot_mapping_T, blocks_T * states.block_size + offset_T, -1),
    ):
        array = tensor.numpy()
        array[:covered] = np.where(real_T, values, padding)
        array[covered:num_tokens] = padding

    seq_lens_R = np.where(real_R, computed_R + lens_R, 0)
    buffers.seq_lens_R.numpy()[:num_rows] = seq_lens_R
    buffers.logits_index_R.numpy()[:num_rows] = np.maximum(starts_R1[1:] - 1, 0)
    buffers.block_table_RB.numpy()[:num_rows] = np.where(real_R[:, None], table_SB[rows_R], 0)
    buffers.sample_positions_R.numpy()[:num_rows] = seq_lens_R
