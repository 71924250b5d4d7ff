"""Derived values of messages: the rows of outputs, the limits of requests, and the roots of prefixes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.engine.messages import (
    NO_CACHE,
    ROOT,
    EngineOutput,
    EngineRequest,
    NewRequest,
    RequestLimits,
    RunnerOutput,
    SchedulerOutput,
    StepOutputs,
    prefix_root,
)
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs


def rows_of(token_ids: list[int]) -> LogprobRows:
    return LogprobRows.of([TokenLogprobs((token, 1), (-0.5, -float(token)), 1) for token in token_ids])


COLUMNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6)


@given(columns=COLUMNS, several=st.booleans(), has_extras=st.booleans(), with_logprobs=st.booleans(), data=st.data())
def test_outputs_in_columns(
    columns: list[tuple[int, int]], several: bool, has_extras: bool, with_logprobs: bool, data: st.DataObject
) -> None:
    """They are those of each request, one after the other; so is a part of them."""
    counts = [count if several else 1 for count, _ in columns]
    token_ids = list(range(50, 50 + sum(counts)))
    expected = []
    for index, (count, (_, number)) in enumerate(zip(counts, columns, strict=True)):
        first = sum(counts[:index])
        tokens = token_ids[first : first + count]
        rows = rows_of(token_ids).select(slice(first, first + count)) if with_logprobs else None
        extras = {"f": (number, count)} if has_extras else {}
        expected.append(EngineOutput(f"r{index}", tuple(tokens), rows, extras=extras))
    other = EngineOutput("other", (), finish_reason="length")
    outputs = StepOutputs(
        [output.request_id for output in expected],
        token_ids,
        [other],
        rows_of(token_ids) if with_logprobs else None,
        counts if several else None,
        {"f": [(number, count) for count, (_, number) in zip(counts, columns, strict=True)]} if has_extras else {},
    )
    assert list(outputs) == [*expected, other]
    assert list(outputs.in_columns()) == expected
    assert len(outputs) == len(expected) + 1
    chosen = [index for index in range(len(expected)) if data.draw(st.booleans())]
    part = outputs.part(chosen, [])
    assert [(each.request_id, each.new_token_ids, each.extras) for each in part] == [
        (expected[index].request_id, expected[index].new_token_ids, expected[index].extras) for index in chosen
    ]
    if with_logprobs and part.token_ids:
        assert [each.logprobs for each in part] == [expected[index].logprobs for index in chosen]
    else:
        assert part.logprobs is None
    assert part.lengths == ([counts[index] for index in chosen] if several else None)


def test_what_a_message_does_not_say_is_not_asked_for() -> None:
    params = SamplingParams()
    request = EngineRequest("r", (1,), params)
    assert request == EngineRequest("r", (1,), params, frozenset(), 0, bytes(32), (), {})
    new = NewRequest("r", (1,), 1, params, frozenset(), ())
    assert new == NewRequest("r", (1,), 1, params, frozenset(), (), False, {})
    assert EngineOutput("r", ()) == EngineOutput("r", (), None, None, None, None, None, {})
    assert StepOutputs() == StepOutputs((), (), (), None, None, {})
    step = SchedulerOutput(1, (), (), [], [], [], [], {})
    assert step == SchedulerOutput(1, (), (), [], [], [], [], {}, False, False, {})
    assert RunnerOutput() == RunnerOutput((), None, {}, None, {}, {})
    assert RequestLimits(9, 20, 100) == RequestLimits(9, 20, 100, False, True, None)


def test_what_is_empty_is_not_sent() -> None:
    """A plain request carries no field of features, and of an output no more than an empty dictionary."""
    params = SamplingParams()
    for plain in (EngineRequest("r", (1,), params), NewRequest("r", (1,), 1, params, frozenset(), ())):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
        assert not sent.keys() & {"extras", "output_token_ids", "samples_late", "priority"}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=type(plain)) == plain
    assert msgspec.msgpack.encode(EngineOutput("r", (1,))) == b"\x98\xa1r\x91\x01\xc0\xc0\xc0\xc0\xc0\x80"


def test_the_tokens_of_a_step() -> None:
    assert SchedulerOutput(1, (), (), ["a", "b"], [0, 5], [4, 3], [True, True], {}).num_tokens == 7


@pytest.mark.parametrize(
    ("limits", "longest", "most", "total"),
    [
        (RequestLimits(9, 20, 100), 19, 19, 20),
        (RequestLimits(9, 20, 12), 19, 12, 13),
        (RequestLimits(9, 20, 19), 19, 19, 20),
        (RequestLimits(9, 20, NO_CACHE, yields_tokens=False), 20, 20, 21),
        (RequestLimits(9, 20, 12, yields_tokens=False), 20, 12, 13),
        (RequestLimits(9, 20, NO_CACHE, yields_tokens=False, max_whole_prompt=8), 8, 8, 21),
        (RequestLimits(9, 20, NO_CACHE, yields_tokens=False, max_whole_prompt=30), 20, 20, 21),
    ],
)
def test_the_longest_prompts(limits: RequestLimits, longest: int, most: int, total: int) -> None:
    assert (limits.longest_prompt, limits.most_prompt_tokens, limits.max_total_tokens) == (longest, most, total)
    limits.check_length("it", most)
    limits.check_length("it", most, min_tokens=total - most)
    for num_tokens, min_tokens in ((0, 0), (most + 1, 0), (most, total - most + 1), (1, total)):
        with pytest.raises(ValueError, match="it"):
            limits.check_length("it", num_tokens, min_tokens)


GENERATES, POOLS = RequestLimits(9, 20, 100), RequestLimits(9, 20, NO_CACHE, yields_tokens=False)


@pytest.mark.parametrize(
    ("limits", "arguments", "message"),
    [
        (GENERATES, (0,), "it must have at least one token"),
        (
            GENERATES,
            (25,),
            "it must have at most 19 tokens (max_model_len 20, less one to generate), got 25;"
            " SamplingParams(truncate_prompt_tokens=...) keeps the last ones",
        ),
        (
            POOLS,
            (25,),
            "it must have at most 20 tokens (max_model_len 20), got 25;"
            " PoolingParams(truncate_prompt_tokens=...) keeps the first ones",
        ),
        (
            RequestLimits(9, 20, NO_CACHE, yields_tokens=False, max_whole_prompt=8),
            (9,),
            "it must have at most 8 tokens (max_num_batched_tokens 8: an encoder computes a text in one step), got 9;"
            " a larger max_num_batched_tokens holds more",
        ),
        (
            RequestLimits(9, 20, 12),
            (13,),
            "it must have at most the 12 tokens that the KV cache holds, got 13; a larger num_blocks holds more",
        ),
        (GENERATES, (5, 16), "it: min_tokens must be at most 15 after 5 prompt tokens (max_model_len 20), got 16"),
        (
            RequestLimits(9, 20, 12),
            (5, 16),
            "it: min_tokens must be at most 8 after 5 prompt tokens (tokens in the KV cache, and one more 13), got 16",
        ),
    ],
)
def test_what_is_said_of_a_prompt_that_is_too_long(limits: RequestLimits, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match="it") as error:
        limits.check_length("it", *arguments)
    assert str(error.value) == message


def test_a_prompt_may_be_known_in_part() -> None:
    with pytest.raises(ValueError, match="got at least 25"):
        GENERATES.check_length("it", 25, at_least=True)


def test_roots_of_prefixes_differ_in_all_that_prefixes_depend_on() -> None:
    """A part is no other part, whatever its text."""
    salts = [None, "", "x", "y", "xadapter 1 y", "x 1"]
    roots = {(salt, digest): prefix_root(salt=salt, adapter=digest) for salt in salts for digest in (None, "x", "y")}
    assert roots.pop((None, None)) == ROOT
    assert all(one != other for one, other in combinations([ROOT, *roots.values()], 2))
    assert all(len(root) == len(ROOT) for root in roots.values())
    assert prefix_root(adapter="x") == roots[None, "x"]


def test_rows_of_log_probabilities() -> None:
    entries = [TokenLogprobs((5, 7, 9), (-0.25, -1.5, -2.0), 1), TokenLogprobs((8, 7, 9), (-3.5, -0.5, -1.0), 4)]
    rows = LogprobRows.of(entries)
    assert list(rows) == entries
    assert (len(rows), rows.row_bytes, rows.array().shape) == (2, 28, (2, 7))
    assert rows.columns() == ([1, 4], [[5, 7, 9], [8, 7, 9]], [[-0.25, -1.5, -2.0], [-3.5, -0.5, -1.0]])
    assert (
        list(rows.select(slice(1, None))) == list(rows.select([False, True])) == list(rows.select([1])) == entries[1:]
    )
    assert list(LogprobRows.of([])) == []
    assert LogprobRows.of([]).array().shape == (0, 3)
    alone = [TokenLogprobs((5,), (-0.25,), 2)]
    assert (list(LogprobRows.of(alone)), LogprobRows.of(alone).row_bytes) == (alone, 12)
    with pytest.raises(ValueError, match="same shape"):
        LogprobRows.of([*alone, *entries])
