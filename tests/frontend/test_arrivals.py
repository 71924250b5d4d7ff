"""Requests whose data is prepared while others run: their order, how many are ahead, and data that cannot be used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_core import ScriptedCore
from tiny_tokenizers import byte_level

from compiled_engine.engine.messages import RequestLimits
from compiled_engine.frontend.attachments import OF_A_CALL, Arrivals
from compiled_engine.frontend.engine_loop import EngineLoop
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.frontend.request_hooks import Attachment, RequestPart
from compiled_engine.process.smallest_first import Stopped, WorkStopped, never
from compiled_engine.sampling.params import SamplingParams

TOKENIZER = byte_level()
EOS = 1


class Data(Attachment):
    """Data that is ready once `gate` is set, or cannot be used."""

    def __init__(self, begun: Callable[[], None] = lambda: None, problem: str = "") -> None:
        self.gate = threading.Event()
        self.has_stopped = threading.Event()
        self._begun, self._problem = begun, problem

    is_ready = is_remote = False

    def wait(self, is_stopped: Stopped = never) -> None:
        self._begun()
        while not self.gate.wait(0.005):
            if is_stopped():
                self.has_stopped.set()
                raise WorkStopped("nobody waits")
        if self._problem:
            raise ValueError(self._problem)

    def expand(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (7, *token_ids)

    def part(self, token_ids: tuple[int, ...], params: SamplingParams) -> RequestPart:
        return RequestPart()


def run(
    core: ScriptedCore, data: Sequence[Data | None], *, order: Sequence[int] = (), most_running: int = 2
) -> list[RequestOutput]:
    """Run a prompt for each entry of `data`. Returns the outputs in the order of the prompts."""
    inputs = InputProcessor(TOKENIZER, RequestLimits(len(TOKENIZER.hf), 400, 400), frozenset({EOS}))
    prompts = parse_prompts([f"prompt {index}" for index in range(len(data))])
    makers = inputs.makers(prompts, SamplingParams(max_tokens=4, ignore_eos=True), attached=data)
    arrivals = Arrivals(data, makers, order or range(len(data)), most_running)
    try:
        found = EngineLoop(core, OutputProcessor(TOKENIZER)).run((), arrivals=arrivals)
        outputs = {output.request_id: output for output in found}
        return [outputs[request_id] for request_id in arrivals.request_ids]
    finally:
        arrivals.close()


def core_of(before_step: Callable[[int], None] = lambda step: None) -> ScriptedCore:
    return ScriptedCore(lambda request: [5] * 9, before_step=before_step)


class Recorded(ScriptedCore):
    """Records the prompts of its requests in the order of their arrival, with the steps before each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda request: [5] * 9, **options)
        self.arrived: list[tuple[str, int]] = []

    def add(self, request: Any, token_mask: Any = None) -> None:
        super().add(request, token_mask)
        self.arrived.append((TOKENIZER.decode(request.prompt_token_ids)[-1], self.steps))


def test_steps_run_while_data_is_prepared() -> None:
    first, second = Data(), Data()
    first.gate.set()
    core = Recorded(before_step=lambda step: second.gate.set() if step == 3 else None)
    outputs = run(core, [first, second, None])
    assert [output.prompt for output in outputs] == ["prompt 0", "prompt 1", "prompt 2"]
    assert [output.prompt_token_ids[0] == 7 for output in outputs] == [True, True, False]
    (_, of_first), (_, of_second), (_, of_third) = core.arrived
    assert of_first == 0
    assert of_third >= of_second >= 3


def test_a_bounded_number_of_prompts_is_ahead() -> None:
    begun = list[int]()
    data = [Data(lambda: begun.append(1)) for _ in range(60)]
    for each in data:
        each.gate.set()
    surplus = list[int]()
    core = Recorded(before_step=lambda step: surplus.append(len(begun) - len(core.arrived) + len(core.live)))
    outputs = run(core, data, most_running=2)
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    assert max(surplus) <= 2 + OF_A_CALL
    assert len(begun) == 60


def test_requests_arrive_in_the_given_order() -> None:
    data = [Data(), None, Data()]
    for each in filter(None, data):
        each.gate.set()
    core = Recorded()
    outputs = run(core, data, order=(2, 0, 1))
    assert [number for number, _ in core.arrived] == ["2", "0", "1"]
    assert [output.prompt for output in outputs] == ["prompt 0", "prompt 1", "prompt 2"]


def test_data_that_cannot_be_used_ends_the_call() -> None:
    """The requests that run are aborted, and other data is awaited no longer."""
    first, bad, last = Data(), Data(problem="no image"), Data()
    first.gate.set()
    core = core_of(lambda step: bad.gate.set())
    with pytest.raises(ValueError, match="no image"):
        run(core, [first, bad, last])
    assert not core.live
    assert last.has_stopped.wait(10)
