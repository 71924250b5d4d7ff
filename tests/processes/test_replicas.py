"""Several cores behind one, without a model: whatever dies or is aborted, every request ends once, and rightly."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache, partial
from queue import Queue
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.messages import ASKS, ControlCall, EngineOutput, EngineRequest, StepOutputs
from compiled_engine.features.prompt_logprobs.extras import NAME, next_position, rows_in
from compiled_engine.options import EngineOptions
from compiled_engine.processes import replica, replicas
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.processes.replica import OF_EACH, Replica
from compiled_engine.processes.replicas import AHEAD, MOST_LOST, Replicas
from compiled_engine.processes.router import Router
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    Control,
    Stepped,
    Tell,
    ToApi,
    ToCore,
    decode_to_api,
    decode_to_core,
    encode,
)
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs
from compiled_engine.server.exposition import COUNTERS, GAUGES, LABELLED, LABELLED_GAUGES

MOST = 2


@cache
def config() -> EngineConfig:
    return resolve(EngineOptions(mode="eager", device="cpu", max_num_seqs=MOST, block_size=4, num_blocks=64))


def token_of(seed: int | None, position: int) -> int:
    """Return a request's token at a position: a function of its seed and the position alone, like the engine's
    noise."""
    assert seed is not None
    return (seed * 7 + position * 13) % 101


class FakeCore:
    """The other end of a replica's connection; see RunningCore."""

    def __init__(self) -> None:
        self.address = None
        self.socket, other = socket.socketpair()
        self.connection: Connection[ToCore] = Connection(other, decode_to_core)
        self.requests: dict[str, tuple[EngineRequest, list[int], int]] = {}
        self.seeds: dict[str, int | None] = {}
        self.ended = False
        self.saying = threading.Lock()  # a test's threads may overlap; a connection is for one

    def how_it_ended(self, timeout_s: float) -> str:
        return "it was killed"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        self.connection.close()

    def say(self, message: ToApi) -> None:
        with self.saying:
            self.connection.send(frame(encode(message)))

    def listen(self) -> None:
        while self.connection.wait_readable(0):
            for message in self.connection.receive():
                match message:
                    case Add(request):
                        said = list(request.output_token_ids)
                        self.seeds[request.request_id] = request.sampling_params.seed
                        self.requests[request.request_id] = (request, said, next_position(request))
                    case Abort(request_ids):
                        for request_id in request_ids:
                            self.requests.pop(request_id, None)
                    case Control(number):
                        self.say(Answered(number, {}))

    def step(self, most: int) -> None:
        """Generate one or a few tokens for each running request, in columns if possible."""
        self.listen()
        columns, others = [], []
        for request_id, (request, said, position) in list(self.requests.items())[:most]:
            params = request.sampling_params
            extras = {}
            if params.prompt_logprobs is not None and position < len(request.prompt_token_ids):
                row = TokenLogprobs((request.prompt_token_ids[position],), (-1.0,), 1)
                extras[NAME] = (position, LogprobRows.of([row]))
                self.requests[request_id] = (request, said, position + 1)
                if position + 1 < len(request.prompt_token_ids):
                    others.append(EngineOutput(request_id, (), extras=extras))
                    continue
            said.append(token_of(params.seed, len(request.prompt_token_ids) + len(said)))
            if len(said) == params.max_tokens:
                others.append(EngineOutput(request_id, (said[-1],), None, "length", extras=extras))
                del self.requests[request_id]
            elif extras or len(said) == 1:
                others.append(EngineOutput(request_id, (said[-1],), extras=extras))
            else:
                first = len(said) - 1
                while len(said) % 3 and len(said) + 1 < (params.max_tokens or 0):
                    said.append(token_of(params.seed, len(request.prompt_token_ids) + len(said)))
                columns.append((request_id, said[first:]))
        token_ids = [token_id for _, tokens in columns for token_id in tokens]
        counts = [len(tokens) for _, tokens in columns] if len(token_ids) > len(columns) else None
        self.say(Stepped(StepOutputs([each for each, _ in columns], token_ids, others, lengths=counts)))


def make(cores: list[FakeCore]) -> Replicas:
    return Replicas(
        config(),
        [
            Replica(number, f"replica {number} of {len(cores)}", core, Connection(core.socket, decode_to_api), 256)
            for number, core in enumerate(cores)
        ],
    )


class RequestsAndDeaths(RuleBasedStateMachine):
    """Adds, aborts, steps and deaths in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cores = [FakeCore() for _ in range(3)]
        self.engine = make(self.cores)
        self.wanted: dict[str, EngineRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.rows: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.aborted: set[str] = set()
        self.num_deaths = 0

    @rule(length=st.integers(1, 12), most=st.integers(1, 6), seed=st.none() | st.integers(0, 9), logprobs=st.booleans())
    def add(self, length: int, most: int, seed: int | None, logprobs: bool) -> None:
        params = SamplingParams(max_tokens=most, seed=seed, prompt_logprobs=0 if logprobs else None)
        request = EngineRequest(f"r{len(self.wanted)}", tuple(range(length)), params)
        self.wanted[request.request_id] = request
        self.got[request.request_id], self.rows[request.request_id] = [], []
        self.engine.add(request)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        self.engine.abort(request_id)
        if request_id not in self.ends:
            self.aborted.add(request_id)

    @rule(number=st.integers(0, 2), times=st.integers(1, 3))
    def step(self, number: int, times: int) -> None:
        for _ in range(times):
            if not self.cores[number].ended:
                self.cores[number].step(MOST)
        self.take()

    @precondition(lambda self: self.num_deaths < 2)
    @rule(number=st.integers(0, 2), unheard=st.booleans(), fails=st.booleans())
    def die(self, number: int, unheard: bool, fails: bool) -> None:
        core = self.cores[number]
        if core.ended:
            return
        core.ended = True
        self.num_deaths += 1
        if unheard:  # its last step has been sent, and not read yet
            core.step(MOST)
        if fails:
            core.say(Failed("KeyError", "injected", ""))
        core.connection.close()
        self.take()

    def take(self) -> None:
        while self.engine.can_step():
            for output in self.engine.step():
                if output.request_id in self.aborted:
                    continue
                assert output.request_id not in self.ends
                self.got[output.request_id] += output.new_token_ids
                if (found := rows_in(output.extras)) is not None:
                    first, rows = found
                    self.rows[output.request_id] += range(first, first + len(rows))
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output

    @invariant()
    def nobody_has_too_much(self) -> None:
        for core in self.cores:
            if not core.ended:
                core.listen()
                assert len(core.requests) <= AHEAD * MOST

    def teardown(self) -> None:
        while self.engine.has_unfinished():
            for core in self.cores:
                if not core.ended:
                    core.step(MOST)
            self.take()
        for request_id, request in self.wanted.items():
            if request_id in self.aborted:
                continue
            params, end = request.sampling_params, self.ends[request_id]
            if end.finish_reason == "error":
                assert self.num_deaths == 2
                assert "has ended: " in str(end.stop_reason)
                continue
            assert len(self.got[request_id]) == params.max_tokens
            (seed,) = {core.seeds[request_id] for core in self.cores if request_id in core.seeds}
            assert params.seed in (None, seed)
            first = len(request.prompt_token_ids)
            assert self.got[request_id] == [token_of(seed, first + index) for index in range(params.max_tokens or 0)]
            if params.prompt_logprobs is not None:
                assert self.rows[request_id] == list(range(1, len(request.prompt_token_ids)))
        for load in self.engine._router._loads.values():
            assert (load.num_requests, load.work) == (0, 0.0)
        self.engine.close()
        for core in self.cores:
            core.close(0)


TestRequestsAndDeaths = RequestsAndDeaths.TestCase
TestRequestsAndDeaths.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def step_for_ever(engine: Replicas) -> None:
    while True:
        engine.step()


def test_when_no_replica_is_left_everything_says_why() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    engine.add(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=5)))
    for core in cores:
        core.connection.close()
    with pytest.raises(EngineDeadError, match=r"replica 0 of 2 has ended: it was killed; replica 1 of 2 has ended"):
        step_for_ever(engine)
    for call in (partial(engine.call, ControlCall("metrics")), engine.step):
        with pytest.raises(EngineDeadError, match="replica 0 of 2"):
            call()
    with pytest.raises(EngineDeadError, match="replica 0 of 2"):
        engine.add(EngineRequest("b", (1,), SamplingParams()))
    engine.abort("a")
    assert not engine.has_unfinished()
    engine.close()


def test_who_comes_first_is_sent_first_once_there_is_room() -> None:
    """Also after a death: what was under way comes before what only waited."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    params = SamplingParams(max_tokens=3, seed=1)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        engine.add(EngineRequest(name, (1, 2, 3), params))
    for core in cores:
        core.listen()
    assert sorted(name for core in cores for name in core.requests) == sorted(names[: 2 * AHEAD * MOST])
    cores[1].connection.close()
    order: list[str] = []
    while engine.has_unfinished():
        cores[0].listen()
        order += [name for name in cores[0].requests if name not in order]
        cores[0].step(AHEAD * MOST)
        while engine.can_step():
            engine.step()
    rest = order[AHEAD * MOST :]
    assert rest == sorted(rest, key=names.index)
    assert set(order) == set(names)
    engine.close()


def test_a_late_answer_is_not_one_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cache would be said to be reset before it is."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    asked: Queue[int] = Queue()
    reset = threading.Event()

    def answer(core: FakeCore, questions: Iterable[int]) -> None:
        for number in questions:
            assert core.connection.wait_readable(20)
            core.connection.receive()
            if core is cores[0] or number == 1:
                core.say(Answered(number, {"running": 0}))
            elif number == 2:
                asked.put(number)
            else:
                core.say(Answered(asked.get(), {"running": 0}))
                time.sleep(0.2)
                reset.set()
                core.say(Answered(number, {"running": 0}))

    threads = [threading.Thread(target=answer, args=(core, (1, 2, 3)), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    check = ControlCall("check_integrity")
    engine.call(check)
    monkeypatch.setattr(replicas, "_ANSWER_S", 0.5)
    with pytest.raises(ControlError, match=r"^replica 1 of 2 has not answered within 0.5 s$"):
        engine.call(check)
    monkeypatch.setattr(replicas, "_ANSWER_S", 20.0)
    engine.call(ControlCall("reset_prefix_cache"))
    assert reset.is_set()
    engine.close()


def test_an_order_without_an_answer_is_served_before_later_requests() -> None:
    """No replica answers here, nor has one ever answered."""
    cores = [FakeCore(), FakeCore()]
    engine, order = make(cores), ControlCall("set_vocabulary", {"vocab_size": 9})
    engine.tell(order)
    for request_id in "ab":
        engine.add(EngineRequest(request_id, (5, 6), SamplingParams(max_tokens=2)))
    for core in cores:
        told, added = core.connection.receive()
        assert told == Tell(order)
        assert isinstance(added, Add)
    engine.close()


def test_an_order_for_a_request_goes_where_the_request_is() -> None:
    """What a replica asks for reaches the caller. If it dies, the next one asks for itself."""
    cores = [FakeCore(), FakeCore()]
    engine, order = make(cores), ControlCall("give_inputs", {"key": "k"})
    engine.add(EngineRequest("a", (5, 6), SamplingParams(max_tokens=2)))
    first, other = sorted(cores, key=lambda core: not core.connection.wait_readable(0))
    asks = EngineOutput("a", (), extras={ASKS: ["k"]})
    first.say(Stepped(StepOutputs(others=[asks])))
    assert list(engine.step()) == [asks]
    engine.tell(order, ["a", "of no request"])
    assert [type(each) for each in first.connection.receive()] == [Add, Tell]
    assert not other.connection.wait_readable(0)
    first.connection.close()
    while not other.connection.wait_readable(0):
        engine.step()
    assert [type(each) for each in other.connection.receive()] == [Add]
    engine.close()


def test_a_call_that_fails_in_one_replica_is_an_error() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)

    def answer(core: FakeCore, errors: Sequence[str | None]) -> None:
        for error in errors:
            assert core.connection.wait_readable(20)
            (message,) = core.connection.receive()
            assert isinstance(message, Control)
            assert message.call == ControlCall("load", {"path": "x"})
            core.say(Answered(message.number, {"loaded": "x"}, error))

    said: list[tuple[str | None, ...]] = [(None, None, None), (None, "no room", None)]
    for core, errors in zip(cores, said, strict=True):
        threading.Thread(target=answer, args=(core, errors), daemon=True).start()
    call = ControlCall("load", {"path": "x"})
    assert engine.call(call) == {"loaded": "x"}
    with pytest.raises(ControlError, match=r"^replica 1 of 2: no room$"):
        engine.call(call)
    assert engine.call(call) == {"loaded": "x"}
    engine.close()


@pytest.mark.parametrize(
    ("name", "said", "found"),
    [
        ("load_adapter", (["a"], ["b", "a"]), ["a", "b"]),
        ("has_read_adapter", (True, False), False),
        ("has_read_adapter", (True, True), True),
    ],
)
def test_answers_about_adapters_are_those_of_all_replicas(name: str, said: tuple[Any, Any], found: Any) -> None:
    """Each may have dropped others, and the slowest one says when all have read."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)

    def answer(core: FakeCore, value: Any) -> None:
        assert core.connection.wait_readable(20)
        (message,) = core.connection.receive()
        assert isinstance(message, Control)
        core.say(Answered(message.number, value))

    for core, value in zip(cores, said, strict=True):
        threading.Thread(target=answer, args=(core, value), daemon=True).start()
    assert engine.call(ControlCall(name, {"digest": "x"})) == found
    engine.close()


def lose_who_has(request_id: str, cores: list[FakeCore], engine: Replicas) -> list[EngineOutput]:
    """End the core that runs the request; return the outputs of the step that notices."""
    for core in cores:
        core.listen()
    (having,) = [core for core in cores if request_id in core.requests]
    cores.remove(having)
    having.connection.close()
    return list(engine.step().others)


def test_what_was_under_way_in_too_many_deaths_goes_on_nowhere() -> None:
    """It may be their cause. What only waited goes on."""
    cores = [FakeCore() for _ in range(MOST_LOST + 1)]
    engine = make(cores)
    engine.add(EngineRequest("suspect", (1, 2, 3), SamplingParams(max_tokens=5, seed=1)))
    for deaths in range(MOST_LOST):
        outputs = lose_who_has("suspect", cores, engine)
        assert [output.finish_reason for output in outputs] == (["error"] if deaths == MOST_LOST - 1 else [])
    assert "has ended" in str(outputs[0].stop_reason)
    cores[0].listen()
    assert not cores[0].requests
    engine.add(EngineRequest("next", (1, 2, 3), SamplingParams(max_tokens=1, seed=1)))
    cores[0].step(1)
    assert [output.finish_reason for output in engine.step().others] == ["length"]
    engine.close()


# What a core that has done nothing answers when it is asked for its metrics.
FIGURES: dict[str, Any] = dict.fromkeys((*replica.COUNTERS, *replica.GAUGES, *OF_EACH, "kv_usage_peak"), 0)


def test_who_went_on_elsewhere_is_counted() -> None:
    """Once for each time, and not when it ended instead."""
    cores = [FakeCore() for _ in range(MOST_LOST + 1)]
    engine = make(cores)
    engine.add(EngineRequest("suspect", (1, 2, 3), SamplingParams(max_tokens=5, seed=1)))
    for _ in range(MOST_LOST):
        lose_who_has("suspect", cores, engine)

    def answer() -> None:
        assert cores[0].connection.wait_readable(20)
        (question,) = [message for message in cores[0].connection.receive() if isinstance(message, Control)]
        cores[0].say(Answered(question.number, FIGURES))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert engine.call(ControlCall("metrics"))["requests_rerun"] == MOST_LOST - 1
    engine.close()


def test_who_waits_for_room_is_among_those_who_wait() -> None:
    """Besides those that replicas have and do not run yet."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    filled(cores, engine)

    def answer(core: FakeCore) -> None:
        assert core.connection.wait_readable(20)
        (question,) = core.connection.receive()
        assert isinstance(question, Control)
        core.say(Answered(question.number, FIGURES | {"waiting": 3}))

    for core in cores:
        threading.Thread(target=answer, args=(core,), daemon=True).start()
    found = engine.call(ControlCall("metrics"))
    assert (found["waiting"], found["requests_queued"]) == (2 * 3 + 4, 4)
    engine.close()


def test_what_a_dead_replica_counted_stays_and_what_it_held_does_not() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    figures = FIGURES | {"generated_tokens": 5, "running": 1, "blocks_total": 10, "blocks_free": 4}
    figures |= {"graph_replays_by_key": {"decode 1": 2}, "kv_usage_peak": 0.25}

    def answer(core: FakeCore, more: dict[str, Any]) -> None:
        assert core.connection.wait_readable(20)
        (question,) = core.connection.receive()
        assert isinstance(question, Control)
        core.say(Answered(question.number, figures | more))

    def asked(living: Sequence[FakeCore], **more: Any) -> dict[str, Any]:
        threads = [threading.Thread(target=answer, args=(core, more), daemon=True) for core in living]
        for thread in threads:
            thread.start()
        return engine.call(ControlCall("metrics"))

    names = ("generated_tokens", "running", "blocks_total", "blocks_free", "graph_replays_by_key", "kv_usage_peak")
    both = asked(cores)
    assert [both[name] for name in names] == [10, 2, 20, 8, {"decode 1": 4}, 0.25]
    cores[1].connection.close()
    assert not engine.step().others  # that it is gone is noticed
    after = asked(cores[:1], generated_tokens=7, kv_usage_peak=0.125)
    assert [after[name] for name in names] == [12, 1, 10, 4, {"decode 1": 4}, 0.25]
    assert after["kv_usage"] == 1 - 4 / 10
    assert [(each["lives"], each["running"]) for each in after["replicas"]] == [(True, 1), (False, 0)]
    engine.close()


# Gauges of one engine that are none of all together: of the first replica, or made of others.
NOT_ADDED = {"kv_usage", "api_processes", "capture_seconds", "start_s", "draft_sharpness_shares", "draft_length_chosen"}
NOT_ADDED |= {"paused", "weight_updates"}  # all replicas are paused, and get an update, together


def test_each_figure_of_the_server_is_that_of_all_replicas() -> None:
    """Every counter that /metrics shows but one, and every gauge but a few; also those that are 0."""
    names = {*GAUGES, *COUNTERS, *LABELLED, *LABELLED_GAUGES} - NOT_ADDED
    assert {*GAUGES, *LABELLED_GAUGES, "weight_updates"} >= NOT_ADDED
    by_name = {*LABELLED, *LABELLED_GAUGES}
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)

    def answer(core: FakeCore) -> None:
        assert core.connection.wait_readable(20)
        (question,) = core.connection.receive()
        assert isinstance(question, Control)
        told = {name: {"a": 3, "b": 0} if name in by_name else 3 for name in names}
        core.say(Answered(question.number, FIGURES | told))

    for core in cores:
        threading.Thread(target=answer, args=(core,), daemon=True).start()
    found = engine.call(ControlCall("metrics"))
    total = {"a": 6, "b": 0}
    assert {name: found[name] for name in names} == {name: total if name in by_name else 6 for name in names}
    engine.close()


def test_times_are_told_by_our_clock() -> None:
    core = FakeCore()
    there = Replica(0, "replica 0 of 1", core, Connection(core.socket, decode_to_api), 256, clock_ahead_s=5.0)
    engine = Replicas(config(), [there])
    engine.add(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=1)))
    core.say(Stepped(StepOutputs(others=[EngineOutput("a", (7,), scheduled_time=100.0)])))
    (output,) = engine.step().others
    assert output.scheduled_time == 105.0
    engine.close()


def test_who_has_never_answered_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_ANSWER_S", 0.05)
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    answered = threading.Event()

    def answer() -> None:
        for core in cores:
            assert core.connection.wait_readable(20)
            core.connection.receive()
        cores[0].say(Answered(1, FIGURES))
        for _ in range(4):  # whoever waits looks whether the time is over
            time.sleep(0.05)
            cores[0].say(Stepped(StepOutputs()))
        answered.set()
        cores[1].say(Answered(1, FIGURES))

    threading.Thread(target=answer, daemon=True).start()
    engine.call(ControlCall("check_integrity"))
    assert answered.is_set()
    engine.close()


def filled(cores: list[FakeCore], engine: Replicas, policy_priorities: bool = False) -> list[str]:
    """Add as many requests as the replicas accept, then four that wait; return all names."""
    names = [f"r{number}" for number in range(len(cores) * AHEAD * MOST + 4)]
    for number, name in enumerate(names):
        params = SamplingParams(max_tokens=3, seed=1)
        engine.add(EngineRequest(name, (1, 2, 3), params, priority=-number if policy_priorities else 0))
    for core in cores:
        core.listen()
    return names


def test_who_waits_after_a_death_may_be_aborted() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    names = filled(cores, engine)
    lost = list(cores[1].requests)
    cores[1].connection.close()
    engine.step()
    for name in lost:
        engine.abort(name)
    ended: list[str] = []
    while engine.has_unfinished():
        cores[0].step(AHEAD * MOST)
        ended += [output.request_id for output in engine.step().others if output.finish_reason is not None]
    assert sorted(ended) == sorted(set(names) - set(lost))
    engine.close()


def test_nothing_is_told_of_requests_that_were_aborted() -> None:
    """Whatever their replica has said meanwhile, in columns or with more."""
    cores = [FakeCore()]
    engine = make(cores)
    for name, most in (("gone", 9), ("goes on", 9), ("gone too", 2)):
        engine.add(EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=most, seed=1)))
    cores[0].step(3)
    engine.step()
    cores[0].step(3)
    engine.abort("gone")
    engine.abort("gone too")
    outputs = engine.step()
    assert (outputs.request_ids, [output.request_id for output in outputs.others]) == (["goes on"], [])
    engine.close()


def test_a_reset_cache_attracts_no_prompts() -> None:
    """Before, a prompt goes where its beginning was computed, else to who was chosen longest ago."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    prompt, number = tuple(range(32)), itertools.count()

    def sent_to() -> int:
        engine.add(EngineRequest(f"r{next(number)}", prompt, SamplingParams(max_tokens=1, seed=1)))
        for core in cores:
            core.listen()
        (place,) = [index for index, core in enumerate(cores) if core.requests]
        cores[place].step(1)
        while engine.has_unfinished():
            engine.step()
        return place

    first = sent_to()
    assert sent_to() == first
    answering = [threading.Thread(target=answer_one, args=(core,), daemon=True) for core in cores]
    for thread in answering:
        thread.start()
    engine.call(ControlCall("reset_prefix_cache"))
    for thread in answering:  # an answer can arrive before the call that sent it has returned
        thread.join(20)
    assert sent_to() == 1 - first
    engine.close()


def answer_one(core: FakeCore) -> None:
    assert core.connection.wait_readable(20)
    core.listen()


def test_answers_that_failed_say_nothing_about_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [FakeCore()]
    engine = make(cores)
    told: list[bool] = []
    monkeypatch.setattr(Router, "end", lambda *arguments, finished: told.append(finished))
    for name, reason in (("a", "error"), ("b", "stop"), ("c", "length")):
        engine.add(EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=9, seed=1)))
        cores[0].say(Stepped(StepOutputs(others=[EngineOutput(name, (), finish_reason=reason)])))
        engine.step()
    assert told == [False, True, True]
    engine.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_only_answers_that_a_stop_string_ended_say_something_about_their_length(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """A client that goes ends others."""
    engine = make([FakeCore()])
    told: list[bool] = []
    monkeypatch.setattr(Router, "end", lambda *arguments, finished: told.append(finished))
    engine.add(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=1)))
    engine.abort("a", stopped=stopped)
    assert told == [stopped]
    engine.close()


def test_replicas_that_end_at_once_are_both_heard() -> None:
    """The last words of two replicas are read together, and told one after the other."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    for name in ("a", "b"):
        engine.add(EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=1, seed=1)))
    for core in cores:
        core.step(1)
    ended: list[str] = []
    while engine.has_unfinished():
        ended += [output.request_id for output in engine.step().others if output.finish_reason == "length"]
    assert sorted(ended) == ["a", "b"]
    engine.close()
