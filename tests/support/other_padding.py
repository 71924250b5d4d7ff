"""Replays of padded batches, repeated with other padding, to show that padding does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_engine.engine import input_batch
from compiled_engine.engine.input_batch import InputBatch, InputBuffers
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.runner import Runner
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind


def prepare_with(padding_1: torch.Tensor) -> Callable[[InputBatch, RequestStates, InputBuffers], None]:
    """Return an input preparation that gives padding tokens the id and the position in padding_1 when it runs.

    It must replace `padded_step.prepare` before an engine captures.
    """

    def prepare(batch: InputBatch, states: RequestStates, buffers: InputBuffers) -> None:
        input_batch.prepare(batch, states, buffers)
        tokens = slice(0, batch.padded_tokens)
        for made_T in (buffers.input_ids_T, buffers.positions_T):
            made_T[tokens] = torch.where(buffers.slot_mapping_T[tokens] < 0, padding_1, made_T[tokens])

    return prepare


def replay_with_other_padding(runner: Runner, padding_1: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let each replay assert that real rows do not depend on padding.

    Returns how many replays had padding, by the graph's name. padding_1: the argument of `prepare_with`, zero.
    """
    graphs = runner.step_graphs.graphs
    assert graphs is not None
    replay, checked = graphs.replay, Counter[str]()

    def replay_twice(key: GraphKey, inputs: Any) -> torch.Tensor:
        if key.is_decode:  # a replay is a step
            return replay(key, inputs)
        buffers = runner.buffers
        result = replay(key, inputs)
        real = int((buffers.slot_mapping_T[: key.num_tokens] >= 0).sum())
        expected = result[:real].clone()
        padding_1.fill_(5)
        if key.kind is not GraphKind.FULL:  # its inputs are made before the replay
            buffers.input_ids_T[real : key.num_tokens] = 5
            buffers.positions_T[real : key.num_tokens] = 5
        assert torch.equal(replay(key, inputs)[:real], expected), key.name
        padding_1.zero_()
        result[real:] = torch.nan
        checked[key.name] += key.num_tokens > real
        return result

    monkeypatch.setattr(graphs, "replay", replay_twice)
    return checked
