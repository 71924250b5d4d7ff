"""`compiled-engine serve` in a process of its own, for tests of its life."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx

SMALL = {
    "mode": "eager",
    "device": "cpu",
    "max_model_len": 128,
    "num_blocks": 256,
    "max_num_seqs": 8,
    "uvicorn_log_level": "error",
}


class Served:
    """A server in a process of its own. url: its address."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COMPILED_ENGINE_PORT": "0", **variables}
        code = "from compiled_engine.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--quiet", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"is served at (http://\S+)/v1", line):
                self.url = found[1]
                break
        assert hasattr(self, "url"), "".join(self.log)
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()
        with httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=60) as client:
            assert client.get(f"{self.url}/ready", timeout=30).status_code == 200

    def stream(self, max_tokens: int = 120, headers: dict[str, str] | None = None) -> httpx.Response:
        asked = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return httpx.post(f"{self.url}/v1/completions", json=asked, headers=headers, timeout=60)


@contextlib.contextmanager
def served(*arguments: str, **variables: str) -> Iterator[Served]:
    server = Served(*arguments, **variables)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
