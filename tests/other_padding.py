"""Replays of padded batches, repeated with other padding behind the runner's back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from compiled_engine.graphs.cuda_graphs.key import GraphKey
from compiled_engine.runner.model_runner import Runner


def replay_with_other_padding(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on each replay asserts that real rows are bit for bit the same; counts those that had padding."""
    graphs = runner.graphs
    assert graphs is not None
    replay, checked = graphs.replay, Counter[str]()

    def replay_twice(key: GraphKey, inputs: Any) -> torch.Tensor:
        if key.is_decode:  # padding is made in the graph
            return replay(key, inputs)
        buffers = runner.buffers
        real = int((buffers.slot_mapping_T[: key.num_tokens] >= 0).sum())
        result = replay(key, inputs)
        expected = result[:real].clone()
        buffers.input_ids_T[real : key.num_tokens] = 77
        buffers.positions_T[real : key.num_tokens] = 5
        assert torch.equal(replay(key, inputs)[:real], expected), key.name
        result[real:] = torch.nan
        checked[key.name] += key.num_tokens > real
        return result

    monkeypatch.setattr(graphs, "replay", replay_twice)
    return checked
