"""Runs the synchronous loop of `LLM`: adds requests to the core, steps it, yields what changed, cleans up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from compiled_engine.engine.messages import ControlCall, EngineRequest, StepOutputs
from compiled_engine.frontend.asked_data import AskedData
from compiled_engine.frontend.attachments import Arrivals
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prepared_request import PreparedRequest, Running
from compiled_engine.process.forks import Owner

# Ctrl-C takes effect between steps: an interrupted step would leave the core's state inconsistent.


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer SIGINT until the block ends. A second SIGINT within the block takes effect immediately.

    Only the main thread gets the signal, so in other threads this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if received:
            handler(number, frame)
        received.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])


# Requests added between two checks for Ctrl-C.
AT_A_TIME = 32
# Longest wait for data that the core has asked for, if a step gave no output.
PATIENCE_S = 0.005


class Core(Protocol):
    """The engine core's methods that the loop calls."""

    held: str

    def add(self, request: EngineRequest, given: Any = None) -> None: ...

    def tell(self, call: ControlCall, request_ids: Sequence[str]) -> None: ...

    def abort(self, request_id: str, *, stopped: bool = False) -> object: ...

    def step(self) -> StepOutputs: ...

    def has_unfinished(self) -> bool: ...

    def can_step(self) -> bool: ...


class EngineLoop:
    """Runs requests on the core in the caller's thread.

    Several runs may be active, each an iterator. Advancing any of them steps the core for all, and each yields its own
    requests' outputs. A run that ends early, by an exception, an interrupt or a closed iterator, aborts its requests.

    Only one iterator may advance at a time: a second thread, or a token mask that calls its own engine, gets a
    RuntimeError.
    """

    def __init__(self, core: Core, outputs: OutputProcessor) -> None:
        self._core = core
        self._outputs = outputs
        self._data = AskedData()
        self._changed: dict[str, Running] = {}  # not yet yielded, by request id
        self._closed = False
        self._owner = Owner("LLM")
        self._failure = ""  # the last step's error as text; the exception would keep the engine alive
        self._in_use = threading.Lock()
        self._abandoned: list[Generator[list[RequestOutput], None, None]] = []  # ended while another run advanced

    def close(self) -> None:
        """Stop all runs: a run that needs another step raises RuntimeError. Called before the core is closed."""
        with self._turn():
            self._closed = True
            self._data.close()

    def run(
        self, requests: Sequence[PreparedRequest], *, partial: bool = False, arrivals: Arrivals | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield each request's output when it is finished; with `partial`, also whenever the output has grown.

        arrivals: further requests, each added once the data of its prompt is ready. Raises the errors of
        `Arrivals.take`, and RuntimeError if the loop is closed or busy with another call.
        """
        outputs = self._run(requests, partial, arrivals)
        try:
            while True:
                self._owner.require_here()
                with self._turn():
                    of_step = next(outputs, None)
                if of_step is None:
                    return
                yield from of_step
        finally:
            if self._in_use.acquire(blocking=False):
                try:
                    outputs.close()
                finally:
                    self._in_use.release()
            else:
                self._abandoned.append(outputs)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this LLM is busy with another call; allowed: one call at a time, from one thread")
        try:
            self._close_abandoned()
            yield
            self._close_abandoned()
        finally:
            self._in_use.release()

    def _close_abandoned(self) -> None:
        """Close the runs that ended early while another run advanced.

        No reference to a run is kept between iterations, since it would keep the engine alive.
        """
        while self._abandoned:
            self._abandoned.pop().close()

    def _run(
        self, requests: Sequence[PreparedRequest], partial: bool, arrivals: Arrivals | None
    ) -> Generator[list[RequestOutput], None, None]:
        """Yield lists of outputs, one for each step that has any."""
        running: dict[str, Running] = {}
        added: set[str] = set()
        try:
            while running or requests or arrivals:
                for first in range(0, len(requests), AT_A_TIME):
                    self._require_open()
                    with deferred_interrupt():
                        for request in requests[first : first + AT_A_TIME]:
                            running[request.request_id] = self._outputs.add(request, partial=partial)
                            for engine_request in request.engine_requests:
                                self._core.add(engine_request, request.given)
                                added.add(engine_request.request_id)
                requests = ()
                if arrivals and (requests := arrivals.take(len(running))):
                    continue
                changed = [request_id for request_id in self._changed if request_id in running]
                if not changed:
                    self._step()
                of_step = []
                for request_id in changed:
                    state = self._changed.pop(request_id)
                    if state.finished:
                        del running[request_id]
                    if state.finished or partial:
                        of_step.append(state.snapshot())
                if of_step:
                    yield of_step
        finally:
            for request_id, state in running.items():
                self._changed.pop(request_id, None)
                for engine_request_id in state.unfinished_ids():
                    self._outputs.forget(engine_request_id)
                    if engine_request_id in added and not self._closed and self._owner.is_here:
                        with deferred_interrupt():
                            self._core.abort(engine_request_id)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")

    def _step(self) -> None:
        self._require_open()
        if not self._core.has_unfinished():
            raise RuntimeError(f"a step failed and ended this request with it{self._failure}")
        if self._core.held and not self._core.can_step():
            raise RuntimeError(f"no step is run: {self._core.held}")
        while self._data and not self._core.can_step():  # replicas, which may all wait for data
            self._send_data(PATIENCE_S)
        with deferred_interrupt():
            try:
                outputs = self._core.step()
            except BaseException as error:
                self._failure = f": {type(error).__name__}: {error}"
                raise
            changed, aborts = self._outputs.process(outputs)
            for asked in self._outputs.take_asked():
                self._data.begin(asked)
            for engine_request_id in aborts:
                self._core.abort(engine_request_id, stopped=True)
            for state in changed:
                self._changed[state.request.request_id] = state
        if self._data:
            self._send_data(0 if outputs else PATIENCE_S)

    def _send_data(self, timeout_s: float) -> None:
        """Send the core the data that it has asked for and that is ready, after waiting at most timeout_s for some."""
        for request_id, calls in self._data.take(timeout_s):
            for call in calls:
                self._core.tell(call, [request_id])
