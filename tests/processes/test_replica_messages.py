"""Messages to and from replicas, and their end, without a model."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from test_replicas import AHEAD, FIGURES, MOST, FakeCore, config, filled, make
from token_masks import OneOf

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest, StepOutputs
from compiled_engine.features.prompt_logprobs.extras import NAME, next_position
from compiled_engine.processes import replicas
from compiled_engine.processes.channel import Connection
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.processes.replica import Replica, RoutedRequest
from compiled_engine.processes.replicas import Replicas
from compiled_engine.processes.wire import Abort, Add, Answered, Control, Stepped, Tell, ToCore, decode_to_api
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows

CALL = ControlCall("f", {"a": 1})


def engine_of(
    cores: list[FakeCore],
    given: EngineConfig | None = None,
    slots: tuple[int, ...] = (256, 256, 256),
    **more: Any,
) -> Replicas:
    return Replicas(
        given or config(),
        [
            Replica(
                number, f"replica {number} of {len(cores)}", core, Connection(core.socket, decode_to_api), num_slots
            )
            for number, (core, num_slots) in enumerate(zip(cores, slots, strict=False))
        ],
        **more,
    )


def request(name: str, length: int = 3, priority: int = 0, seed: int | None = 1) -> EngineRequest:
    return EngineRequest(name, tuple(range(length)), SamplingParams(max_tokens=3, seed=seed), priority=priority)


def heard(core: FakeCore) -> list[ToCore]:
    """Return all messages so far."""
    found: list[ToCore] = []
    while core.connection.wait_readable(0):
        found += core.connection.receive()
    return found


def test_the_smallest_replica_bounds_a_request() -> None:
    """Which of them gets it is not known yet."""
    engine = engine_of([FakeCore(), FakeCore(), FakeCore()], slots=(256, 64, 128))
    assert engine.num_slots == 64
    engine.close()


def test_all_replicas_are_told() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    engine.tell(CALL)
    assert [heard(core) for core in cores] == [[Tell(CALL)]] * 2
    engine.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_an_abort_says_whether_the_output_is_complete(stopped: bool) -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    engine.add(request("a"))
    engine.abort("a", stopped=stopped)
    added, aborted = [message for core in cores for message in heard(core)]
    assert isinstance(added, Add)
    assert aborted == Abort(("a",), stopped)
    engine.abort("a")  # once more, of nothing
    assert not any(map(heard, cores))
    engine.close()


def test_ids_are_used_once_at_a_time() -> None:
    core = FakeCore()
    engine = make([core])
    engine.add(request("a"))
    with pytest.raises(ValueError, match="request_id 'a' is already in use"):
        engine.add(request("a"))
    engine.abort("a")
    engine.add(request("a"))
    assert len(heard(core)) == 3
    engine.close()


MASK = OneOf([[5]], 100)


@pytest.mark.parametrize("own", [False, True])
def test_masks_of_python_are_refused_wherever_they_are(own: bool) -> None:
    core = FakeCore()
    engine = make([core])
    params = SamplingParams(max_tokens=3, token_mask=MASK if own else None)
    with pytest.raises(ValueError, match="token_mask must be None"):
        engine.add(EngineRequest("a", (1,), params), None if own else MASK)
    assert not engine.has_unfinished()
    assert not heard(core)
    engine.close()


def seeds_of(seed: int, given: tuple[int | None, ...]) -> list[int | None]:
    """Return the seeds of requests as replicas get them, for an engine with this seed and requests with the given
    ones."""
    core = FakeCore()
    engine = engine_of([core], replace(config(), model=replace(config().model, seed=seed)))
    for number, each in enumerate(given):
        engine.add(request(str(number), seed=each))
    found = [message.request.sampling_params.seed for message in heard(core) if isinstance(message, Add)]
    engine.close()
    return found


def test_seeds_are_the_requests_or_the_engines() -> None:
    """So that whatever is sampled is sampled again after a death, and in the next engine with that seed."""
    first, second, third = seeds_of(0, (None, 5, None))
    assert second == 5
    assert None not in (first, third)
    assert first != third
    assert seeds_of(0, (None, 5, None)) == [first, second, third]
    assert seeds_of(1, (None,)) != [first]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_most_urgent_waits_shortest_where_the_policy_says_so(policy: Any) -> None:
    given = replace(config(), scheduler=replace(config().scheduler, policy=policy))
    core = FakeCore()
    engine = engine_of([core], given)
    for number in range(AHEAD * MOST):
        engine.add(request(f"first {number}"))
    for name, priority in (("late", 5), ("a", 0), ("urgent", -1), ("b", 0)):
        engine.add(request(name, priority=priority))
    heard(core)
    for number in range(AHEAD * MOST):
        engine.abort(f"first {number}")
    sent = [message.request.request_id for message in heard(core) if isinstance(message, Add)]
    assert sent == (["urgent", "a", "b", "late"] if policy == "priority" else ["late", "a", "urgent", "b"])
    engine.close()


@pytest.mark.parametrize("caching", [False, True])
def test_beginnings_attract_prompts_only_where_they_are_kept(caching: bool) -> None:
    cores = [FakeCore(), FakeCore()]
    engine = engine_of(cores, replace(config(), cache=replace(config().cache, enable_prefix_caching=caching)))
    places = []
    for number in range(3):
        engine.add(request(str(number), 32))
        places += [index for index, core in enumerate(cores) if heard(core)]
        engine.abort(str(number), stopped=True)
        for core in cores:
            heard(core)
    assert (places[1] == places[0], places[2] == places[0]) == (caching, True)
    engine.close()


def test_what_a_replica_takes_slowly_arrives_whole() -> None:
    """More than its socket holds; what it says meanwhile is heard."""
    core = FakeCore()
    engine = make([core])
    asked = [request(str(number), 60_000) for number in range(3)]
    for each in asked:
        engine.add(each)
    core.say(Stepped(StepOutputs(others=[EngineOutput("0", (), finish_reason="error", stop_reason="too long")])))
    found: list[ToCore] = []
    ended: list[EngineOutput] = []
    while len(found) < len(asked):
        while core.connection.wait_readable(0):
            found += core.connection.receive()
        ended += engine.step()
    assert found == [Add(each) for each in asked]
    assert [output.request_id for output in ended] == ["0"]
    for each in asked[1:]:
        engine.abort(each.request_id)
    assert not engine.can_step()  # nothing is left to be written
    engine.close()


def test_a_replica_that_cannot_be_understood_is_lost() -> None:
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    engine.add(request("a"))
    for core in cores:
        core.listen()
    (having,) = [core for core in cores if core.requests]
    having.connection.send(b"\0\0\0\1\xc1")
    while not any("a" in core.requests for core in cores if core is not having):
        engine.step()
        for core in cores:
            if core is not having:
                core.listen()
    engine.close()
    alone = FakeCore()
    engine = make([alone])
    alone.connection.send(b"\xff" * 8)
    with pytest.raises(EngineDeadError, match="replica 0 of 1 has ended: its messages cannot be read: MessageTooLarge"):
        engine.step()


def answering(cores: list[FakeCore], *answers: dict[str, Any] | None) -> None:
    """Let each core answer its next call in a thread, unless its answer is None."""

    def answer(core: FakeCore, value: Any) -> None:
        assert core.connection.wait_readable(20)
        (question,) = [message for message in core.connection.receive() if isinstance(message, Control)]
        if value is not None:
            core.say(Answered(question.number, value))

    for core, value in zip(cores, answers, strict=True):
        threading.Thread(target=answer, args=(core, value), daemon=True).start()


def test_a_late_replica_contributes_its_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_ANSWER_S", 0.05)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.02)
    cores = [FakeCore(), FakeCore()]
    engine = engine_of(cores, start_s=12.5)
    ask = partial(engine.call, ControlCall("metrics"))
    answering(cores, FIGURES | {"steps": 3}, FIGURES | {"steps": 4})
    found = ask()
    assert (found["steps"], found["start_s"]) == (7, 12.5)
    answering(cores, None, FIGURES | {"steps": 6})
    assert ask()["steps"] == 9
    answering(cores, {"a": 1}, {"b": 2})
    assert engine.call(ControlCall("check_integrity")) == {"a": 1}  # the first replica's
    engine.close()


def test_a_call_that_only_a_later_replica_fails_forgets_no_prompts() -> None:
    """A cache that was not reset still attracts them."""
    cores = [FakeCore(), FakeCore()]
    engine = make(cores)
    engine.add(request("a", 32))
    for core in cores:
        core.listen()
    first = next(index for index, core in enumerate(cores) if core.requests)
    engine.abort("a", stopped=True)
    for core in cores:
        core.listen()

    def fail(core: FakeCore) -> None:
        assert core.connection.wait_readable(20)
        (question,) = core.connection.receive()
        assert isinstance(question, Control)
        core.say(Answered(question.number, error="busy" if core is cores[1] else None))

    for core in cores:
        threading.Thread(target=fail, args=(core,), daemon=True).start()
    with pytest.raises(ControlError, match=r"^replica 1 of 2: busy$"):
        engine.call(ControlCall("reset_prefix_cache"))
    engine.add(request("b", 32))
    for core in cores:
        core.listen()
    assert [bool(core.requests) for core in cores] == [first == 0, first == 1]
    engine.close()


def test_the_end_comes_once_and_to_all() -> None:
    """Tested for close and for garbage collection."""

    class Closing(FakeCore):
        def close(self, timeout_s: float) -> None:
            assert [core.socket.fileno() for core in cores] == [-1, -1]  # all are told before one is waited for
            order.append(timeout_s)
            super().close(timeout_s)

    for end in (Replicas.close, lambda engine: None):
        order: list[Any] = []
        cores: list[FakeCore] = [Closing(), Closing()]
        engine = engine_of(cores, when_ended=partial(order.append, "ended"))
        engine.add(request("a"))
        end(engine)
        if end is Replicas.close:
            engine.close()
            assert not engine.has_unfinished()
            with pytest.raises(EngineDeadError, match="it was closed"):
                engine.add(request("b"))
        del engine
        first, second, ended = order
        assert first == second > 1  # they may finish what they do
        assert ended == "ended"


def test_a_queued_request_is_sent_as_soon_as_another_ends() -> None:
    """By itself, whatever the reason."""
    core = FakeCore()
    engine = make([core])
    names = filled([core], engine)
    for name, reason in zip(names, ("stop", "length", "error"), strict=False):
        core.say(Stepped(StepOutputs(others=[EngineOutput(name, (), finish_reason=reason)])))
        engine.step()
        (added,) = heard(core)
        assert isinstance(added, Add)
        assert added.request.request_id == names[AHEAD * MOST + names.index(name)]
    engine.close()


@pytest.mark.parametrize(
    ("said", "rest"),
    [
        (EngineOutput("a", ()), ((), 1)),
        (EngineOutput("a", (7, 8)), ((7, 8), 1)),
        (EngineOutput("a", (), extras={NAME: (1, LogprobRows(4, b""))}), ((), 5)),
        (EngineOutput("a", (7,), extras={NAME: (3, LogprobRows(2, b""))}), ((7,), 5)),
    ],
)
def test_what_is_left_of_a_request(said: EngineOutput, rest: tuple[tuple[int, ...], int]) -> None:
    asked = request("a", 8)
    routed = RoutedRequest(asked, (0, 0))
    routed.add(said)
    left = routed.rest()
    assert (left.output_token_ids, next_position(left)) == rest
    assert replace_rest(left) == asked


def replace_rest(left: EngineRequest) -> EngineRequest:
    """Return the request as it was submitted."""
    return EngineRequest(left.request_id, left.prompt_token_ids, left.sampling_params, priority=left.priority)
