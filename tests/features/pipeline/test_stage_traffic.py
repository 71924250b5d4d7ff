"""When the first stage of a pipeline waits for tokens of the last one: for a step that needs them, and for no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.features.pipeline.stage_traffic import StageTraffic
from compiled_engine.parallel.rank_share import LayerShare

CPU = torch.device("cpu")


class Link:
    """The link of the first of two stages, with tokens that count up. received: number of steps received."""

    stage = LayerShare(range(1), 0, 2)

    def __init__(self) -> None:
        self.received = 0

    def send(self, values: torch.Tensor) -> None:
        pass

    def receive_tokens(self, into: torch.Tensor) -> None:
        self.received += 1
        into.fill_(self.received)

    def drain(self) -> None:
        pass


def step_of(request_ids: list[str]) -> SchedulerOutput:
    count = len(request_ids)
    return SchedulerOutput(1, (), (), request_ids, [0] * count, [1] * count, [True] * count, {})


def test_a_later_chunk_of_a_prompt_waits_for_nobody() -> None:
    link: Any = Link()
    no_model: Any = None
    states = RequestStates(4, 16, 4, CPU, 3)
    traffic = StageTraffic(link, states, no_model, CPU)

    def stage(samples: dict[str, bool]) -> None:
        traffic.begin(step_of(list(samples)))
        rows = np.array(["abcd".index(name) for name in samples], np.int32)
        starts, given = np.arange(len(samples) + 1, dtype=np.int32), np.array(list(samples.values()))
        batch = InputBatch(
            list(samples),
            rows,
            starts,
            [0] * len(samples),
            given,
            len(samples),
            None,
            False,
            len(samples),
            1,
            (1, 1, 1),
        )
        traffic.send(torch.zeros(1), batch)

    stage({"a": True, "b": False})
    stage({"b": True, "c": False})  # the rest of b's prompt, while a's token is on its way
    assert link.received == 0
    stage({"a": True, "c": True})
    assert link.received == 1
    assert states.last_token_S.tolist() == [1, 0, 0, 0]
    stage({"b": True})
    assert states.last_token_S.tolist() == [1, 2, 0, 0]
    traffic.close()
    assert states.last_token_S.tolist() == [3, 4, 3, 0]
