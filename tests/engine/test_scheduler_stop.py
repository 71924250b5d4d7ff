"""When generation ends."""

from __future__ import annotations

import pytest

from compiled_engine.engine.request import Finish, StopRule, check_stop
from compiled_engine.sampling.params import SamplingParams

EOS = frozenset({7, 8})


@pytest.mark.parametrize(
    ("params", "token_id", "num_output_tokens", "finish"),
    [
        (SamplingParams(), 1, 1, None),
        (SamplingParams(), 8, 1, Finish("stop", None)),
        (SamplingParams(ignore_eos=True), 8, 1, None),
        (SamplingParams(stop_token_ids=[3]), 3, 1, Finish("stop", 3)),
        (SamplingParams(stop_token_ids=[3]), 7, 1, Finish("stop", None)),
        (SamplingParams(stop_token_ids=[7]), 7, 1, Finish("stop", None)),
        (SamplingParams(stop_token_ids=[7], ignore_eos=True), 7, 1, Finish("stop", 7)),
        (SamplingParams(min_tokens=3), 7, 2, None),
        (SamplingParams(min_tokens=3), 7, 3, Finish("stop", None)),
        (SamplingParams(min_tokens=3, stop_token_ids=[3]), 3, 2, None),
        (SamplingParams(max_tokens=4), 1, 3, None),
        (SamplingParams(max_tokens=4), 1, 4, Finish("length", None)),
        (SamplingParams(max_tokens=4), 7, 4, Finish("stop", None)),
        (SamplingParams(max_tokens=None), 1, 19, None),
        (SamplingParams(max_tokens=None), 1, 20, Finish("length", None)),
        (SamplingParams(max_tokens=500), 1, 20, Finish("length", None)),
        (SamplingParams(max_tokens=500, min_tokens=30), 7, 20, Finish("length", None)),
    ],
)
def test_check_stop(params: SamplingParams, token_id: int, num_output_tokens: int, finish: Finish | None) -> None:
    assert check_stop(StopRule.of(params, EOS, room=20), token_id, num_output_tokens) == finish
