"""A server in a thread of the test's process, and an engine that says what a test wants to hear."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.app import build_app
from compiled_engine.server.options import Limits, ServerOptions
from compiled_engine.server.run import Server, address, bind, serve

ENGINE: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "num_blocks": 1024,
}
MODEL = "small"


class RunningServer:
    """A server in a thread of this process. url: its address. ended_with: the result of `serve`."""

    def __init__(self, engine: Any, options: ServerOptions) -> None:
        self.engine = engine
        app = build_app(engine, options, MODEL)
        self.serving = app.serving
        self.server = Server(app, options)
        self.ended_with: str | None = None
        self._bound = bind(options)
        self.url = address(options, self._bound)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.loop = asyncio.new_event_loop()

    def start(self) -> None:
        self.thread.start()
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=10)
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server as two signals would."""
        for _ in range(2):
            self.loop.call_soon_threadsafe(self.server.handle_exit, 15, None)
        self.join()

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.ended_with = self.loop.run_until_complete(serve(self.engine, self.server, self._bound))
        self.loop.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error in a response, and assert that it has OpenAI's format."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


@contextmanager
def running(engine: Any, **options: Any) -> Iterator[RunningServer]:
    server = RunningServer(engine, ServerOptions(**{"port": 0, "uvicorn_log_level": "error"} | options))
    server.start()
    try:
        yield server
    finally:
        if server.thread.is_alive():
            server.stop()


class ScriptedEngine:
    """An engine that answers every prompt with the same chunks of text. `asked` has the calls."""

    def __init__(self, engine: AsyncLLM, chunks: Sequence[str] = (), finish_reason: str = "stop") -> None:
        self._engine = engine
        self.chunks = list(chunks)
        self.finish_reason = finish_reason
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.errored: str | None = None
        self.error: Exception | None = None  # what `generate` raises
        self.pause_s = 0.0  # between chunks
        self.outputs: list[RequestOutput] = []  # what `generate` gives instead of chunks, if there are any
        self.num_given = 0  # chunks that the server has taken
        self._dead = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, params: SamplingParams, *, output: str, priority: int = 0, lora_request: Any = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append((prompt, params))
        await asyncio.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        for each in self.outputs:
            yield each
        if self.outputs:
            return
        chunks = ["".join(self.chunks)] if output == "final" else self.chunks
        for place, text in enumerate(chunks):
            last = place == len(chunks) - 1
            outputs = [
                CompletionOutput(index, text, [5], None, None, self.finish_reason if last else None, None)
                for index in range(params.n)
            ]
            self.num_given += 1
            yield RequestOutput("0", None, [1, 2], None, outputs, last, 0, RequestMetrics(time.perf_counter()))
            await asyncio.sleep(self.pause_s)

    async def prepare_structured_outputs(self) -> None:
        """Do nothing: the wrapped engine may be in use on another event loop."""

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self.errored or ""

    async def shutdown(self) -> None:
        self._dead.set()


# A server that allows little, and asks for a key.
COMPLETION = {"model": MODEL, "prompt": "x = 1", "max_tokens": 2}
KEY = "a key"
NARROW = Limits(max_body_bytes=20_000, max_header_bytes=4096, max_json_depth=8, max_in_flight=4, max_logprobs=5,
                max_stop=4, max_stop_length=16, max_token_list=8, max_completions=4, max_messages=4, max_tools=2,
                max_logprob_entries=100, max_answer_tokens=20,
                receive_timeout=1.0, keep_alive_timeout=1.0, write_timeout=1.0)  # fmt: skip
