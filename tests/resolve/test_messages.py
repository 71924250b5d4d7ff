"""Messages cross process borders: each is encoded and decoded by msgspec, without pickle, and is then the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from compiled_engine.engine.messages import (
    EngineOutput,
    EngineRequest,
    LateInputs,
    NewRequest,
    RunnerOutput,
    SchedulerOutput,
    StepOutputs,
)
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs

PARAMS = SamplingParams(
    temperature=0.5,
    seed=2**63 + 5,
    stop=["a", "b"],
    stop_token_ids=[3],
    max_tokens=9,
    logprobs=2,
    logit_bias={7: -1.5},
    bad_words_token_ids=((1, 2), (3,)),
    extra_args={"schema": {"type": "object", "depth": [1, 2.5, None, True]}},
)
LOGPROBS = LogprobRows.of([TokenLogprobs((5, 7), (-0.25, -1.5), 1)])
NEW = NewRequest("r", (1, 2, 3), 2, PARAMS, frozenset({0, 2}), ((4, 5),), True, {"f": 2})
STEP = SchedulerOutput(
    7,
    ("gone",),
    (NEW,),
    ["r", "s"],
    [3, 0],
    [1, 5],
    [True, False],
    {"s": ((6,),)},
    True,
    extras={"f": {0: "x"}, "g": {"r": 3}},
)
MESSAGES = (
    EngineRequest("r", (1, 2, 3), PARAMS, frozenset({0, 2}), 5, b"root" * 8, (4,), {"f": "a text", "g": [1, "x"]}),
    LateInputs({"f": [["r"], b"\x05\x00\x00\x00"]}),
    EngineOutput("r", (5,), LOGPROBS, "stop", 5, 2, 1.5, {"f": [1, 2]}),
    StepOutputs(["r"], [5], [EngineOutput("s", (), finish_reason="error", stop_reason="a mask failed")], LOGPROBS),
    NEW,
    STEP,
    EngineOutput("r", (5, 6)),
    StepOutputs(["r", "s"], [5, 6, 7], [], lengths=[1, 2], columns={"f": [[0, 0], [3, 1]]}),
    RunnerOutput([5], LOGPROBS, {"r": LOGPROBS}),
    RunnerOutput([5, 6], lengths=[2, 0]),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_crossing(message: Any) -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match=r"extra_args\['parser'\] must be a JSON value .*, got <object"):
        SamplingParams(extra_args={"parser": object()})


def test_parts_of_a_step_keep_the_tokens_of_each_request() -> None:
    rows = LogprobRows.of([TokenLogprobs((token,), (-1.0,), 1) for token in range(6)])
    outputs = StepOutputs(["a", "b", "c", "d"], range(6), (), rows, [2, 0, 1, 3], {"f": [1, 0, 4, 5]})
    tokens = {"a": (0, 1), "b": (), "c": (2,), "d": (3, 4, 5)}
    for columns in ([0, 1, 2, 3], [3, 1], [2], [], range(1, 4)):
        part = outputs.part(columns, ())
        found = {output.request_id: output.new_token_ids for output in part}
        assert found == {"abcd"[index]: tokens["abcd"[index]] for index in columns}
        extras = {output.request_id: output.extras for output in part}
        assert extras == {"abcd"[index]: {"f": [1, 0, 4, 5][index]} for index in columns}
        for output in part:
            assert [entry.token_ids for entry in output.logprobs or ()] == [(t,) for t in output.new_token_ids]
