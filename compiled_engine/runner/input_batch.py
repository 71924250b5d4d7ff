"""One step's batch: which rows it has, what they compute, and the tensors that the model is handed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add

import numpy as np
import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.step_tensors import attention_inputs_of
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.messages import SchedulerOutput, TokenMasks
from compiled_engine.runner.input_buffers import InputBuffers, StagedDecodes
from compiled_engine.runner.prepare_inputs import prepare_inputs
from compiled_engine.runner.request_states import RequestStates


@dataclass(frozen=True)
class InputBatch:
    """Host arrays are per request, in batch order, real requests only; rows are those of RequestStates.

    `key`: the graph that the batch is padded for, or None. `decodes_only`: attention and the kernels may rely on one
    token a row. `num_rows` and `padded_tokens` count the padding; `host` is AttentionInputs.host_3.
    `step_starts` is SchedulerOutput's, in its order. `order`: int [R], where the batch has each
    request of the step; None if it has them in the step's order.
    """

    request_ids: list[str]
    rows: np.ndarray
    query_starts: np.ndarray
    step_starts: list[int]
    samples: np.ndarray
    num_tokens: int
    key: GraphKey | None
    decodes_only: bool
    num_rows: int
    padded_tokens: int
    host: tuple[int, int, int]
    order: np.ndarray | None = None

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    @cached_property
    def num_computed(self) -> np.ndarray:
        """int32 [R]: tokens of each request whose keys and values are in the cache before the step."""
        num_computed_R = np.array(self.step_starts, np.int32)
        return num_computed_R if self.order is None else _reordered(num_computed_R, self.order)


def make_batch(step: SchedulerOutput, states: RequestStates, buffers: InputBuffers, key: GraphKey | None) -> InputBatch:
    """The batch of a step, padded to `key`; what the device has to know of it is staged.

    Padding tokens have no slot and belong to rows with an empty context: they write nothing and read nothing. Where
    attention is not captured it gets the requests as they are, with the padding tokens behind theirs. Decodes come with
    the longest context first: its attention takes the longest, so it should not be the last to start.
    """
    count, lens = len(step.request_ids), step.counts
    request_ids, order = step.request_ids, None
    samples_R = np.ones(count, bool) if all(step.samples) else np.array(step.samples)
    num_tokens = sum(lens)
    decodes_only = num_tokens == count and (key is None or key.is_decode)
    padded_tokens = key.num_tokens if key else num_tokens
    if decodes_only:
        num_rows = padded_tokens
        decodes = buffers.decodes
        if decodes is None or not decodes.is_of(request_ids, states.generation, num_rows):
            decodes = _longest_first(step, states, num_rows)
            buffers.stage_decodes(decodes)
        request_ids, rows_R, order = decodes.request_ids, decodes.rows, decodes.order
        if order is not None:
            samples_R = _reordered(samples_R, order)
        starts_R1 = np.arange(count + 1, dtype=np.int32)
        host = (num_rows, 1, key.max_seq_len if key else max(step.starts) + 1)
    else:
        rows_R = states.rows(request_ids)
        lens_R = np.array(lens, np.int32)
        starts_R1 = np.concatenate(([0], np.cumsum(lens_R))).astype(np.int32)
        if key is not None and key.kind is GraphKind.FULL:  # attention finds the first padding row to have the padding
            num_rows, host = key.num_requests, (key.num_decodes, key.max_query_len, key.max_seq_len)
            padding = np.full(num_rows - count, -1, np.int32)
            ends = np.full(num_rows - count, padded_tokens, np.int32)
            buffers.stage_batch(np.concatenate((rows_R, padding)), np.concatenate((starts_R1, ends)))
        else:
            num_rows = count
            host = (lens.count(1), max(lens), max(map(add, step.starts, lens)))
            buffers.stage_batch(rows_R, starts_R1)
    return InputBatch(
        request_ids,
        rows_R,
        starts_R1,
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


def _longest_first(step: SchedulerOutput, states: RequestStates, num_rows: int) -> StagedDecodes:
    """A step's decodes in the order of their contexts; all of these grow alike, so it holds for the next steps too."""
    lens_R = np.array(step.starts, np.int32)
    request_ids, order = step.request_ids, None
    if (lens_R[:-1] < lens_R[1:]).any():
        longest_first_R = np.argsort(-lens_R, kind="stable")
        request_ids = [request_ids[i] for i in longest_first_R.tolist()]
        order = np.argsort(longest_first_R)
    return StagedDecodes(step.request_ids, states.generation, num_rows, request_ids, states.rows(request_ids), order)


def _reordered(values_R: np.ndarray, order: np.ndarray) -> np.ndarray:
    """A step's values, as the batch has them."""
    reordered_R = np.empty_like(values_R)
    reordered_R[order] = values_R
    return reordered_R


def masks_of_batch(masks: TokenMasks, request_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The masks, int32 [M, W] with M at least 1, and which of them each request has: int32 [R], -1 for none."""
    place = {request_id: index for index, request_id in enumerate(masks.request_ids)}
    index_R = np.fromiter((place.get(request_id, -1) for request_id in request_ids), np.int32, len(request_ids))
    return np.frombuffer(masks.words, np.int32).reshape(len(place), -1), index_R


def padding_starts(num_tokens: int, num_rows: int) -> np.ndarray:
    """Where rows of padding begin among num_tokens tokens, int32 [rows + 1]: decodes, or rows of as many tokens each,
    two at least. Where that is too much the last rows have none; tokens that are left over are nobody's.

    They must be alike: for a request without keys flash-attn 2 takes each to have the most tokens of any, and two at
    least, and writes beyond its memory if that is more than there are.
    """
    each = 1 if num_tokens == num_rows else max(2, num_tokens // num_rows)
    return np.minimum(np.arange(num_rows + 1) * each, num_tokens // each * each).astype(np.int32)


def empty_batch(
    buffers: InputBuffers, num_tokens: int, num_rows: int, host: tuple[int, int, int], key: GraphKey | None = None
) -> InputBatch:
    """A batch of padding alone: it leaves no trace when it runs."""
    starts_R1 = padding_starts(num_tokens, num_rows)
    nobody = np.full(num_rows, -1, np.int32)
    decodes_only = num_tokens == num_rows and (key is None or key.is_decode)
    if decodes_only:
        buffers.stage_decodes(StagedDecodes.padding(num_rows))
    else:
        buffers.stage_batch(nobody, starts_R1)
    return InputBatch(
        [], nobody[:0], starts_R1[:1], [], nobody[:0] > 0, 0, key, decodes_only, num_rows, num_tokens, host
    )


def step_of_batch(batch: InputBatch, buffers: InputBuffers) -> dict[str, torch.Tensor]:
    """The step tensors of a batch with its padding, by name: views of the buffers."""
    sizes: dict[int | str, int] = {"tokens": batch.padded_tokens, "requests": batch.num_rows}
    starts_R1 = buffers.starts_of_decodes_R1 if batch.decodes_only else buffers.query_start_loc_R1
    step = {
        "attention_inputs.query_start_loc_R1": starts_R1[: batch.num_rows + 1],
        "attention_inputs.host_3": torch.tensor(batch.host, dtype=torch.int32, device="cpu"),
    }
    for name, first_dim, tensor in buffers.step:
        step[name] = tensor[: sizes[first_dim]] if first_dim in sizes else tensor
    return step


def attention_inputs(batch: InputBatch, buffers: InputBuffers, backend: str) -> AttentionInputs:
    """The attention's view of the buffers."""
    return attention_inputs_of(step_of_batch(batch, buffers), backend)


def prepare(batch: InputBatch, states: RequestStates, buffers: InputBuffers) -> None:
    """Make the batch's inputs on the device from what was staged and applied."""
    prepare_inputs(states, buffers, batch.num_rows, batch.padded_tokens, batch.decodes_only)
    if buffers.asked:
        _fill(batch, states, buffers)


def _fill(batch: InputBatch, states: RequestStates, buffers: InputBuffers) -> None:
    """Make the step tensors that passes have asked for. Raises ValueError for values of another shape."""
    step = step_of_batch(batch, buffers)
    step["rows_R"] = buffers.rows_R[: batch.num_rows]
    real = {"tokens": step["attention_inputs.slot_mapping_T"] >= 0, "requests": step["rows_R"] >= 0}
    for tensor in buffers.asked:
        assert tensor.fill is not None
        values, into = tensor.fill(step, states), step[tensor.name]
        if values.shape != into.shape:
            shapes = f"{list(values.shape)} instead of {list(into.shape)}"
            raise ValueError(f"step tensor {tensor.name}: its fill has returned values of shape {shapes}")
        real_rows = real[str(tensor.dims[0])].view(-1, *[1] * (into.dim() - 1))
        into.copy_(torch.where(real_rows, values, tensor.padding))
