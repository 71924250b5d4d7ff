from __future__ import annotations

import gc
import random
import signal
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_core import ScriptedCore, logprobs_of
from tiny_tokenizers import byte_level

from compiled_engine.engine.messages import EngineOutput, EngineRequest, RequestLimits, StepOutputs
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.frontend.engine_loop import EngineLoop
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.output_processor import OutputProcessor, RunningRequest
from compiled_engine.frontend.outputs import Logprob, RequestOutput
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows
from compiled_engine.sampling.token_mask import TokenMask

EOS = 1
TOKENIZER = byte_level()
SAID = "hello world, the quick brown fox jumps over the lazy dog" * 3


class Frontend:
    """The frontend on a scripted core, every request saying `text`."""

    def __init__(self, text: str = SAID, tokenizer: Tokenizer | None = TOKENIZER, **core: Any) -> None:
        tokens = [*TOKENIZER.encode(text), EOS]
        self.core = ScriptedCore(lambda request: tokens, **core)
        self.inputs = InputProcessor(tokenizer, RequestLimits(len(TOKENIZER.hf), 400, 400), frozenset({EOS}))
        self.loop = EngineLoop(self.core, OutputProcessor(tokenizer))

    def prepare(self, prompts: Any = "hello", **params: Any) -> list[PreparedRequest]:
        return self.inputs.process(parse_prompts(prompts), SamplingParams(**params))

    def run(self, prompts: Any = "hello", **params: Any) -> list[RequestOutput]:
        return list(self.loop.run(self.prepare(prompts, **params)))

    def stream(self, prompts: Any = "hello", **params: Any) -> list[RequestOutput]:
        return list(self.loop.run(self.prepare(prompts, **params), partial=True))


def test_a_completion_that_ends_by_length() -> None:
    (output,) = Frontend().run(max_tokens=3)
    (completion,) = output.outputs
    assert (output.prompt, output.prompt_token_ids) == ("hello", TOKENIZER.encode("hello"))
    assert (output.finished, output.num_cached_tokens) == (True, 2)
    assert completion.token_ids == TOKENIZER.encode(SAID)[:3]
    assert completion.text == TOKENIZER.decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello</s>")])
def test_an_end_of_sequence_token_is_in_the_tokens_but_not_in_the_text(include: bool, text: str) -> None:
    (output,) = Frontend("hello").run(max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=include)
    (completion,) = output.outputs
    assert completion.token_ids == [*TOKENIZER.encode("hello"), EOS]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", None)


def test_a_stop_token_is_the_stop_reason() -> None:
    stop = TOKENIZER.encode(SAID)[2]
    (completion,) = Frontend().run(max_tokens=50, stop_token_ids=[stop])[0].outputs
    assert completion.token_ids == TOKENIZER.encode(SAID)[:3]
    assert completion.text == TOKENIZER.decode(completion.token_ids[:2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("tokens_a_step", [1, 4])
@pytest.mark.parametrize(("include", "text"), [(False, "hello world, the qui"), (True, "hello world, the quick br")])
def test_a_stop_string_ends_the_completion_and_the_request(tokens_a_step: int, include: bool, text: str) -> None:
    frontend = Frontend(tokens_a_step=tokens_a_step)
    (output,) = frontend.run(max_tokens=100, stop=["fox", "ck br"], include_stop_str_in_output=include, logprobs=0)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "ck br")
    # Tokens up to the one that completed the stop string.
    assert "ck br" in TOKENIZER.decode(completion.token_ids)
    assert "ck br" not in TOKENIZER.decode(completion.token_ids[:-1])
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob == -3.0 * len(completion.token_ids)
    assert frontend.core.aborted == frontend.core.stopped == [output.request_id]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    stop=st.lists(st.integers(0, 50).flatmap(lambda i: st.integers(1, 8).map(lambda n: SAID[i : i + n])), max_size=2),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 5]),
    max_tokens=st.integers(5, 60),
    stop_token=st.sampled_from([None, None, *TOKENIZER.encode(SAID)[4:8]]),
    logprobs=st.sampled_from([None, 0, 2]),
    partial=st.booleans(),
)
def test_several_tokens_a_step_give_what_single_ones_give(
    seed: int,
    stop: list[str],
    include: bool,
    min_tokens: int,
    max_tokens: int,
    stop_token: int | None,
    logprobs: int | None,
    partial: bool,
) -> None:
    """Stop strings, stop tokens and lengths end a request between any two tokens of a step; deltas add up."""
    params: dict[str, Any] = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "stop_token_ids": [] if stop_token is None else [stop_token],
        "logprobs": logprobs,
        "n": 2,
    }
    rng = random.Random(seed)
    single, several = Frontend(), Frontend(tokens_a_step=lambda: rng.randrange(5))
    expected = single.run(["hello", "world"], **params)
    assert [output.outputs for output in several.run(["hello", "world"], **params)] == [o.outputs for o in expected]
    assert not several.core.live
    processor = OutputProcessor(TOKENIZER)
    running = [processor.add(request, partial=partial) for request in several.prepare(["hello", "world"], **params)]
    for state in running:
        for request in state.request.engine_requests:
            several.core.add(request)
    deltas: dict[tuple[int, int], tuple[str, list[int]]] = {}
    while several.core.live:
        changed, aborts = processor.process(several.core.step())
        for request_id in aborts:
            several.core.abort(request_id)
        for state in changed:
            for completion in state.delta().outputs:
                key = running.index(state), completion.index
                text, token_ids = deltas.get(key, ("", []))
                deltas[key] = text + completion.text, [*token_ids, *completion.token_ids]
    for number, output in enumerate(expected):
        for completion in output.outputs:
            assert deltas[number, completion.index] == (completion.text, completion.token_ids)


@pytest.mark.parametrize("tokens_a_step", [1, 4])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("hello<|user|>world", "<|user|>", "hello"),
        ("hello<|user|>world", ["no", "<|user|>"], "hello"),
        ("<|user|>world", "<|user|>", ""),
        ("hello<s><|user|>world", ["hello world", "<|user|>"], "hello"),  # what may begin another one is released
    ],
)
def test_a_special_tokens_text_stops_though_it_is_left_out(
    tokens_a_step: int, said: str, stop: str | list[str], text: str
) -> None:
    frontend = Frontend(said, tokens_a_step=tokens_a_step)
    (output,) = frontend.run(max_tokens=50, stop=stop, logprobs=0)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "<|user|>")
    assert TOKENIZER.decode(completion.token_ids) == said.removesuffix("world")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert frontend.core.aborted == ([output.request_id] if tokens_a_step == 1 else frontend.core.stopped)
    parts = [each for output in Frontend(said).stream(max_tokens=50, stop=stop) for each in output.outputs]
    assert (parts[-1].text, parts[-1].stop_reason) == (text, "<|user|>")


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_is_found_in_the_text_as_it_is_given_out(skip: bool) -> None:
    """One that holds more than a special token is not in a text that leaves special tokens out."""
    stops = ["o<|user|>", "<|user|>w"]
    for stop in stops:
        asked = {"max_tokens": 50, "stop": stop, "skip_special_tokens": skip, "spaces_between_special_tokens": False}
        (completion,) = Frontend("hello<|user|>world").run(**asked)[0].outputs
        assert (completion.stop_reason, completion.text) == (
            (None, "helloworld") if skip else (stop, "hello<|user|>world".partition(stop)[0])
        )
    (completion,) = Frontend("hello<|user|>world").run(max_tokens=50, stop="ow")[0].outputs
    assert completion.stop_reason == "ow"


def test_a_special_token_stops_once_min_tokens_have_come_before_it() -> None:
    before = len(TOKENIZER.encode("hello"))
    for min_tokens, reason in ((before, "<|user|>"), (before + 1, None)):
        frontend = Frontend("hello<|user|>world")
        (completion,) = frontend.run(max_tokens=50, min_tokens=min_tokens, stop="<|user|>")[0].outputs
        assert completion.stop_reason == reason
        assert completion.text == ("hello" if reason else "helloworld")


def test_an_end_of_sequence_token_whose_text_is_a_stop_string_has_no_stop_reason() -> None:
    (completion,) = Frontend("hello").run(max_tokens=50, stop="</s>")[0].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hello", "stop", None)


def test_a_stop_string_in_the_last_token_is_not_aborted_again() -> None:
    tokens = TOKENIZER.encode("hello")
    frontend = Frontend("hello")
    (completion,) = frontend.run(max_tokens=len(tokens), stop="hello")[0].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "hello")
    assert frontend.core.aborted == []


def test_what_may_begin_a_stop_string_is_released_at_the_end() -> None:
    (completion,) = Frontend("hello").run(max_tokens=50, stop="hello world")[0].outputs
    assert (completion.text, completion.finish_reason) == ("hello", "stop")


def test_a_stop_string_that_the_token_after_min_tokens_completes_counts() -> None:
    tokens = TOKENIZER.encode(SAID)
    last = next(count for count in range(len(tokens)) if "ck br" in TOKENIZER.decode(tokens[:count]))
    for min_tokens, stops in ((last - 1, True), (last, False)):
        (completion,) = Frontend().run(max_tokens=last + 1, stop="ck br", min_tokens=min_tokens)[0].outputs
        assert completion.stop_reason == ("ck br" if stops else None)
        assert len(completion.token_ids) == (last if stops else last + 1)


def test_a_character_that_is_not_complete_at_the_end_is_replaced() -> None:
    tokens = TOKENIZER.encode("a€")
    (completion,) = Frontend("a€").run(max_tokens=len(tokens) - 1)[0].outputs
    assert completion.text == "a\N{REPLACEMENT CHARACTER}"


def test_logprobs_have_the_chosen_token_first() -> None:
    tokens = TOKENIZER.encode("hello")
    (completion,) = Frontend("hello").run(max_tokens=len(tokens), logprobs=2)[0].outputs
    assert completion.logprobs == [
        {
            token_id: Logprob(-3.0, 3, TOKENIZER.decode([token_id])),
            5: Logprob(-0.5, 1, TOKENIZER.decode([5])),
            6: Logprob(-1.0, 2, TOKENIZER.decode([6])),
        }
        for token_id in tokens
    ]
    assert [next(iter(entry)) for entry in completion.logprobs] == tokens
    assert completion.cumulative_logprob == -3.0 * len(tokens)


def test_a_chosen_token_among_the_most_likely_is_listed_once() -> None:
    loop = EngineLoop(ScriptedCore(lambda request: [6]), OutputProcessor(TOKENIZER))
    (output,) = loop.run(Frontend().prepare(max_tokens=1, logprobs=2))
    assert output.outputs[0].logprobs is not None
    assert list(output.outputs[0].logprobs[0]) == [6, 5]


def test_completions_of_one_prompt_end_on_their_own() -> None:
    said = TOKENIZER.encode(SAID)
    core = ScriptedCore(lambda request: [*said[: 2 + int(request.request_id[-1])], EOS])
    frontend = Frontend()
    loop = EngineLoop(core, OutputProcessor(TOKENIZER))
    outputs = list(loop.run(frontend.prepare(n=3, max_tokens=50), partial=True))
    assert [completion.index for completion in outputs[-1].outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in outputs[-1].outputs] == [[*said[:count], EOS] for count in (2, 3, 4)]
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert [output.metrics.num_generation_tokens for output in outputs if output.metrics] == [1, 2, 3, 4, 5]


def test_without_detokenising_there_is_no_text() -> None:
    (completion,) = Frontend().run(max_tokens=3, detokenize=False)[0].outputs
    assert (completion.text, len(completion.token_ids)) == ("", 3)


def test_without_a_tokenizer_there_are_tokens() -> None:
    (output,) = Frontend(tokenizer=None).run([3, 4], max_tokens=3, logprobs=0)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    assert output.outputs[0].logprobs is not None
    assert {entry.decoded_token for entry in output.outputs[0].logprobs[0].values()} == {None}


def test_a_stream_grows_and_never_takes_text_back() -> None:
    texts = [output.outputs[0].text for output in Frontend("naïve 😀 café").stream(max_tokens=100, stop="caffé")]
    assert texts[-1] == "naïve 😀 café"
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}])
def test_metrics_of_a_request(extra: dict[str, Any]) -> None:
    first, *_, output = Frontend().stream(max_tokens=5, **extra)
    metrics = output.metrics
    assert first.metrics is not None
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.first_token_time == first.metrics.first_token_time
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.ttft_s == metrics.first_token_time - metrics.arrival_time
    assert metrics.tpot_s == (metrics.finished_time - metrics.first_token_time) / 4


def test_accepted_drafts_are_those_in_the_output() -> None:
    """A step verifies drafts and yields no token of the output where an error ends it, or one where all are wrong."""
    outputs = OutputProcessor(TOKENIZER)
    (request,) = Frontend().prepare(max_tokens=9)
    state = outputs.add(request)
    for tokens, right, finish in (((5, 6, 7), 2, None), ((8,), 0, None), ((), 3, "error")):
        extras = {VERIFIED_DRAFTS: (4, right)}
        output = EngineOutput(request.request_id, tokens, finish_reason=finish, extras=extras)
        outputs.process(StepOutputs(others=(output,)))
    metrics = state.snapshot().metrics
    assert metrics is not None
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 12, 2)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("several", [1, 3])
def test_drafts_are_counted_in_columns_too(partial: bool, several: int) -> None:
    """Drafts of all completions count, with and without partial outputs."""
    outputs = OutputProcessor(TOKENIZER)
    (request,) = Frontend().prepare(max_tokens=9, n=2)
    state = outputs.add(request, partial=partial)
    ids = [each.request_id for each in request.engine_requests]
    tokens = list(range(5, 6 + several))
    drafts = {VERIFIED_DRAFTS: [(4, several - 1), (2, 0), (4, 0)]}
    changed, _ = outputs.process(StepOutputs([*ids, "gone"], [*tokens, 9], (), None, [several, 1, 0], drafts))
    assert changed == [state] * partial
    assert [completion.token_ids for completion in state.snapshot().outputs] == [tokens[:-1], tokens[-1:]]
    metrics = state.snapshot().metrics
    assert metrics is not None
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (2, 6, several - 1)


@pytest.mark.parametrize("stop", [None, "fox"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_drafts_behind_a_stop_string_are_not_accepted(stop: str | None, logprobs: int | None) -> None:
    """They are no part of the output; those up to its end are, also the one that completes the string."""
    frontend = Frontend()
    (request,) = frontend.prepare(max_tokens=100, stop=stop, logprobs=logprobs)
    processor = OutputProcessor(TOKENIZER)
    state = processor.add(request)
    tokens = TOKENIZER.encode(SAID)
    rows = None if logprobs is None else LogprobRows.of(map(logprobs_of, tokens))
    drafts = {VERIFIED_DRAFTS: (200, len(tokens) - 1)}
    processor.process(StepOutputs(others=[EngineOutput(request.request_id, tuple(tokens), rows, extras=drafts)]))
    output = state.snapshot()
    metrics, kept = output.metrics, len(output.outputs[0].token_ids)
    assert metrics is not None
    assert (kept < len(tokens)) == (stop is not None)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (
        1,
        200,
        min(kept, len(tokens) - 1),
    )


def test_many_prompts_each_get_their_output() -> None:
    outputs = Frontend().run([[3 + index] for index in range(20)], max_tokens=2)
    assert sorted(output.prompt_token_ids for output in outputs) == [[3 + index] for index in range(20)]


def raise_at(step: int, error: BaseException) -> Callable[[int], None]:
    def before_step(number: int) -> None:
        if number == step:
            raise error

    return before_step


@pytest.mark.parametrize("error", [RuntimeError("lost device"), KeyboardInterrupt()])
def test_an_error_in_a_step_leaves_nothing_behind(error: BaseException) -> None:
    frontend = Frontend(before_step=raise_at(3, error))
    with pytest.raises(type(error)):
        frontend.run(["hello", "world"], n=2, max_tokens=50)
    assert (len(frontend.core.aborted), frontend.core.live) == (4, {})
    assert frontend.run(max_tokens=3)[0].finished


@pytest.fixture
def _python_handles_sigint() -> Iterator[None]:
    """Set Python's own handler: a background job of a shell starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_sigint")
def test_ctrl_c_waits_for_the_end_of_the_step() -> None:
    step_ended = []

    def interrupt(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            step_ended.append(number)

    frontend = Frontend(before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        frontend.run(max_tokens=50)
    assert step_ended == [2]
    assert frontend.core.live == {}
    assert frontend.run(max_tokens=3)[0].finished


@pytest.mark.usefixtures("_python_handles_sigint")
def test_a_second_ctrl_c_does_not_wait() -> None:
    step_ended = []

    def interrupt(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            step_ended.append(number)

    frontend = Frontend(before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        frontend.run(max_tokens=50)
    assert step_ended == []
    assert frontend.run(max_tokens=3)[0].finished


def test_an_iterator_that_is_closed_aborts_its_request() -> None:
    frontend = Frontend()
    stream = frontend.loop.run(frontend.prepare(max_tokens=50), partial=True)
    assert not next(stream).finished
    stream.close()
    assert (len(frontend.core.aborted), frontend.core.stopped, frontend.core.live) == (1, [], {})
    assert frontend.run(max_tokens=3)[0].finished


def test_an_iterator_that_is_closed_while_another_moves_aborts_its_request_with_that_move() -> None:
    def close_the_other(number: int) -> None:
        if number == 2:
            other.close()

    frontend = Frontend(before_step=close_the_other)
    other = frontend.loop.run(frontend.prepare(max_tokens=50), partial=True)
    next(other)
    stream = frontend.loop.run(frontend.prepare(max_tokens=50), partial=True)
    next(stream)
    assert (len(frontend.core.live), len(frontend.core.aborted), frontend.core.stopped) == (1, 1, [])


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    class Watched(OutputProcessor):
        def add(self, request: PreparedRequest, *, partial: bool = True) -> RunningRequest:
            state = super().add(request, partial=partial)
            states.append(weakref.ref(state))
            return state

    states: list[weakref.ref[RunningRequest]] = []
    frontend = Frontend()
    loop = EngineLoop(frontend.core, Watched(TOKENIZER))
    list(loop.run(frontend.prepare(["hello", "world"], n=2, max_tokens=3)))
    list(loop.run(frontend.prepare(max_tokens=50, stop="world")))
    left, other = (loop.run(frontend.prepare(max_tokens=50), partial=True) for _ in range(2))
    next(left)
    next(other)  # it has made a step for both
    left.close()
    other.close()
    gc.collect()
    assert [state() for state in states] == [None] * 5


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}])
def test_what_the_core_still_says_of_a_request_that_has_ended_is_dropped(extra: dict[str, Any]) -> None:
    """A step that was launched ahead yields one more token after a stop string."""
    frontend, outputs = Frontend(), OutputProcessor(TOKENIZER)
    (request,) = frontend.prepare(max_tokens=50, stop="world", **extra)
    state = outputs.add(request)
    frontend.core.add(request.engine_requests[0])
    while not state.finished:
        changed, aborts = outputs.process(frontend.core.step())
        assert changed == [state]
    assert aborts == [request.request_id]
    ended = state.snapshot()
    assert ended.metrics is not None
    assert ended.metrics.finished_time is not None
    assert outputs.process(frontend.core.step()) == ([], [])
    assert state.snapshot() == ended


def test_a_request_that_the_core_refuses_takes_back_those_before_it() -> None:
    refused = Frontend().prepare(["hello", "hello", "hello"], max_tokens=3)

    class Refusing(ScriptedCore):
        def add(self, request: EngineRequest, token_mask: TokenMask | None = None) -> None:
            if request.request_id == refused[1].request_id:
                raise ValueError("too long")
            super().add(request)

    core = Refusing(lambda request: TOKENIZER.encode(SAID))
    loop = EngineLoop(core, OutputProcessor(TOKENIZER))
    with pytest.raises(ValueError, match="too long"):
        list(loop.run(refused))
    assert (core.aborted, core.live) == ([refused[0].request_id], {})


def test_two_runs_at_a_time_each_get_their_own() -> None:
    frontend = Frontend()
    stream = frontend.loop.run(frontend.prepare("hello", max_tokens=4), partial=True)
    first = next(stream)
    (other,) = frontend.run("world", max_tokens=6)
    assert len(other.outputs[0].token_ids) == 6
    rest = list(stream)
    # The other run's steps finished the first run's request, which it is told of at once.
    assert [len(output.outputs[0].token_ids) for output in [first, *rest]] == [1, 4]
    assert rest[-1].finished
    assert frontend.core.steps == 7


def test_a_request_that_the_core_lost_is_an_error() -> None:
    class Forgetful(ScriptedCore):
        def has_unfinished(self) -> bool:
            return False

    loop = EngineLoop(Forgetful(lambda request: [3]), OutputProcessor(TOKENIZER))
    with pytest.raises(RuntimeError, match="a step failed and ended this request"):
        list(loop.run(Frontend().prepare(max_tokens=3)))


def test_who_finds_a_request_ended_by_anothers_step_is_told_why() -> None:
    class Failing(ScriptedCore):
        def step(self) -> StepOutputs:
            if self.steps == 2:
                self.live.clear()
                raise error
            return super().step()

        def abort(self, request_id: str, *, stopped: bool = False) -> None: ...

    error = MemoryError("lost device")
    frontend = Frontend()
    loop = EngineLoop(Failing(lambda request: TOKENIZER.encode(SAID)), OutputProcessor(TOKENIZER))
    stream = loop.run(frontend.prepare(max_tokens=50), partial=True)
    next(stream)
    with pytest.raises(MemoryError, match="lost device"):
        list(loop.run(frontend.prepare(max_tokens=50)))
    next(stream)  # what the step before has given
    with pytest.raises(RuntimeError, match="a step failed and ended this request with it: MemoryError: lost device"):
        next(stream)
