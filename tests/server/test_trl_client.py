"""TRL's own client, unmodified, updates the weights of a server on a CPU, and generates with them.

It needs the package trl, with datasets and pandas; the test was written with trl 1.16.0. It needs no GPU and no vLLM:
`tests/support/vllm_stand_in` has the names of vLLM that the client imports, with a communicator over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from folders import REPOSITORY
from running_server import RunningServer, running
from trained_steps import ENGINE, PROMPT, Bits, Step, trained_steps

from compiled_engine.async_llm import AsyncLLM

SUPPORT = REPOSITORY / "tests/support"
PACKAGES = ("trl", "accelerate", "datasets", "pandas", "requests")

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason=f"needs the packages {', '.join(PACKAGES)} (trl 1.16)"
)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return trained_steps(tmp_path_factory.mktemp("steps"), 3)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = AsyncLLM(core="in_process", **ENGINE | {"max_logprobs": -1})
    with running(engine, rollouts=True, weight_transfer_config='{"backend": "gloo"}') as server:
        yield server


def client(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run TRL's client. arguments: see trl_client.py."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = [str(SUPPORT / "vllm_stand_in"), *(path for path in sys.path if path)]
    command = [sys.executable, str(SUPPORT / "trl_client.py"), server.url, str(port), json.dumps(PROMPT), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def generated(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def bits_in(found: dict[str, Any]) -> Bits:
    (token_ids,), (logprobs,) = found["completion_ids"], found["logprobs"]
    return [(token_id, logprob) for token_id, (logprob,) in zip(token_ids, logprobs, strict=True)]


def state(server: RunningServer) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=60).json()["weights"]


def test_three_updates_and_a_client_that_is_killed_in_the_middle_of_one(
    server: RunningServer, steps: list[Step]
) -> None:
    found = generated(client(server, *(str(step.folder) for step in steps)))
    assert [bits_in(each) for each in found] == [step.bits for step in steps]
    for each, step in zip(found, steps, strict=True):
        assert [score for (score,) in each["scored"][0]] == pytest.approx(
            [logprob for _, logprob in step.bits], abs=3e-4
        )
    assert state(server) == {"version": "3", "updates": 3, "received": None}

    killed = client(server, "--dies", str(steps[0].folder))
    assert killed.returncode == -9, killed.stderr
    assert state(server) == {"version": "3", "updates": 3, "received": 0}  # under way, with no tensor
    assert served(server) == steps[2].bits

    (again,) = generated(client(server, str(steps[0].folder)))
    assert bits_in(again) == steps[0].bits
    assert state(server) == {"version": "4", "updates": 4, "received": None}


def served(server: RunningServer) -> Bits:
    """Return what the server generates for the prompt, without a cached prefix."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()
    fields = {
        "max_tokens": 12,
        "temperature": 1,
        "seed": 7,
        "top_p": 1,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, **fields}, timeout=60)
    (choice,) = answer.raise_for_status().json()["choices"]
    return [*zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)]
