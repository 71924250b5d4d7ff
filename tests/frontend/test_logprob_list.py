"""Log-probabilities as users get them: in all but their type the lists that would be made at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from scripted_core import ScriptedCore, logprobs_of
from tiny_tokenizers import byte_level

from compiled_engine.engine.messages import RequestLimits
from compiled_engine.frontend.engine_loop import EngineLoop
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.logprob_list import GrowingLogprobs, LogprobList, TokenTexts
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.outputs import Logprob, RequestOutput
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs

TOKENIZER = byte_level()
SAID = TOKENIZER.encode("naïve 😁 words")


def run(*, partial: bool = False, prompt: str = "hello", **params: Any) -> list[RequestOutput]:
    core = ScriptedCore(lambda request: [*SAID, 1])
    inputs = InputProcessor(TOKENIZER, RequestLimits(len(TOKENIZER.hf), 400, 400), frozenset({1}))
    requests = inputs.process(parse_prompts(prompt), SamplingParams(max_tokens=len(SAID), **params))
    return list(EngineLoop(core, OutputProcessor(TOKENIZER)).run(requests, partial=partial))


def made_at_once(count: int, num_top: int) -> list[dict[int, Logprob]]:
    """Build the entries that the scripted core's first tokens have."""
    texts, entries = TokenTexts(TOKENIZER, TOKENIZER.encode("hello")), []
    for token_id in SAID[:count]:
        token_ids = (token_id, 5, 6)[: 1 + num_top]
        values = zip(token_ids, (-3.0, -0.5, -1.0), (3, 1, 2), texts.push(token_ids), strict=False)
        entries.append({each: Logprob(logprob, rank, text) for each, logprob, rank, text in values})
    return entries


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_it_is_the_list_that_would_be_made_at_once(num_top: int) -> None:
    found = run(logprobs=num_top)[0].outputs[0].logprobs
    expected = made_at_once(len(SAID), num_top)
    assert isinstance(found, LogprobList)
    assert len(found) == len(expected)
    assert found == expected
    assert expected == found
    assert [*found] == expected
    assert [found[i] for i in range(-len(found), len(found))] == expected * 2
    for part in (slice(2), slice(-3, None), slice(None, None, -1), slice(5, 2), slice(1, 9, 3)):
        assert found[part] == expected[part]
    assert repr(found) == repr(expected)
    ids, values = found.arrays()
    assert ids.shape == (len(expected), 1 + num_top)
    pairs = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    assert pairs == [{token: entry.logprob for token, entry in each.items()} for each in expected]
    assert found + expected == expected + found == found + found == expected * 2
    with pytest.raises(TypeError):
        found + tuple(expected)
    assert found != expected[1:]
    assert found != tuple(expected)
    assert expected[3] in found
    assert found.index(expected[3]) == 3
    with pytest.raises(IndexError):
        found[len(found)]
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)


def test_those_of_a_prompt_begin_with_an_entry_that_has_no_row() -> None:
    prompt = [7, 8, 9, 5]
    core = ScriptedCore(lambda request: [*SAID, 1])
    inputs = InputProcessor(TOKENIZER, RequestLimits(len(TOKENIZER.hf), 400, 400), frozenset({1}))
    requests = inputs.process(parse_prompts(prompt), SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=0))
    (output,) = EngineLoop(core, OutputProcessor(TOKENIZER)).run(requests)
    found = output.prompt_logprobs
    assert isinstance(found, LogprobList)
    assert [entry and [*entry] for entry in found] == [None, [7 + 1, 5], [9, 5], [5]]
    assert [found[i] for i in range(-4, 4)] == [*found] * 2
    assert found[1:3] == [found[1], found[2]]
    ids, values = found.arrays()
    assert ids.tolist() == [[8, 5], [9, 5], [5, 5]]
    assert values[:, 1].tolist() == [-0.5] * 3
    texts = [entry[token].decoded_token for entry, token in zip(found[1:], prompt[1:], strict=True) if entry]
    assert "".join(filter(None, texts)) == TOKENIZER.decode(prompt).removeprefix(TOKENIZER.decode(prompt[:1]))


@pytest.mark.parametrize("first", [[], [None]])
def test_entries_since_one_are_those_that_came_after_it(first: list[Any]) -> None:
    growing = GrowingLogprobs(2, None, (), SamplingParams(), first)
    seen: list[Any] = []
    for tokens in ((7,), (), (8, 9), (5,)):
        growing.add(LogprobRows.of(map(logprobs_of, tokens)))
        seen += growing.since(len(seen))
        assert len(seen) == len(growing)
    assert seen == [*growing.snapshot()]
    assert [entry and next(iter(entry)) for entry in seen] == [*first, 7, 8, 9, 5]
    for start in range(len(seen)):
        for stop in range(len(seen) + 1):
            assert [*growing.entries(start, stop)] == seen[start:stop]
    assert growing.sum_of_chosen() == -3.0 * 3 + next(iter(seen[-1].values())).logprob


def test_without_a_number_rows_are_kept_as_wide_as_they_come() -> None:
    """-1 asks for the whole vocabulary."""
    growing = GrowingLogprobs(-1, None, (), SamplingParams())
    assert (len(growing), [*growing.snapshot()], growing.sum_of_chosen()) == (0, [], 0.0)
    growing.add(LogprobRows.of(map(logprobs_of, (7, 8))))
    assert [[*entry] for entry in growing.snapshot()] == [[7, 5, 6], [8, 5, 6]]
    assert growing.sum_of_chosen() == -6.0


def test_a_copy_is_a_list() -> None:
    (output,) = run(logprobs=2, prompt_logprobs=1)
    for again in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert again == output
        assert type(again.outputs[0].logprobs) is list
        assert type(again.prompt_logprobs) is list


def test_each_output_of_a_stream_keeps_the_length_that_it_had() -> None:
    """Whether it is looked at when it comes, or at the end."""
    expected = made_at_once(len(SAID), 2)
    outputs = run(partial=True, logprobs=2)
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [*range(1, len(SAID) + 1)]
    for order in (outputs, outputs[::-1]):
        for output in order:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            assert logprobs == expected[: len(logprobs)]


def test_rows_with_more_tokens_than_asked_for_are_cut() -> None:
    wide = [logprobs_of(token_id) for token_id in (7, 8, 9)]
    growing = GrowingLogprobs(1, None, (), SamplingParams())
    growing.add(LogprobRows.of(wide[:2]))
    growing.add(LogprobRows.of(TokenLogprobs(each.token_ids[:2], each.logprobs[:2], each.rank) for each in wide[2:]))
    assert [[*entry] for entry in growing.snapshot()] == [[7, 5], [8, 5], [9, 5]]
    assert growing.sum_of_chosen() == -9.0


def test_rows_are_what_they_were_made_of() -> None:
    entries = [TokenLogprobs((7, 5, 6), (-3.0, -0.5, float("-inf")), 2**30), logprobs_of(8)]
    rows = LogprobRows.of(entries)
    assert (len(rows), [*rows]) == (2, entries)
    assert [*rows.select(slice(1, None))] == entries[1:]
    assert [*rows.select([True, False])] == entries[:1]
    assert [*LogprobRows.of([])] == [*rows.select(slice(2, None))] == []
