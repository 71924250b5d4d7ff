"""A server that allows little, and asks for a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from running_server import MODEL, RunningServer, ScriptedEngine, running

from compiled_engine.server.options import Limits

COMPLETION = {"model": MODEL, "prompt": "x = 1", "max_tokens": 2}
KEY = "a key"
LIMITS = Limits(max_body_bytes=20_000, max_header_bytes=4096, max_json_depth=8, max_in_flight=4, max_logprobs=5,
                max_stop=4, max_stop_length=16, max_token_list=8, max_completions=4, max_messages=4, max_tools=2,
                max_logprob_entries=100, max_answer_tokens=20,
                receive_timeout=1.0, keep_alive_timeout=1.0, write_timeout=1.0)  # fmt: skip


@contextmanager
def narrow_server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    with running(engine, api_key=("another", KEY), limits=LIMITS, strict=True) as server:
        yield server
