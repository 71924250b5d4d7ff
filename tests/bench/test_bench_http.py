"""`bench http`: the engine beside its server, in fresh processes. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_engine.bench.processes import ProcessError, Ready, run_worker, server
from compiled_engine.bench.serving import beside_offline
from compiled_engine.bench.worker_workloads import ON_GPU, HttpWorkload
from compiled_engine.bench.workloads import request_lengths
from compiled_engine.cli.app import app
from compiled_engine.cli.arguments import ENGINE_ARGUMENTS, as_written
from compiled_engine.process.progress import SilentProgress

SMALL = ["--mode", "eager", "--device", "cpu", "--max-model-len", "256", "--num-blocks", "256", "--max-num-seqs", "8"]
TINY = HttpWorkload(8, 4, 8, 4096, 0.6, mixed_decodes=4, mixed_context=8, mixed_prompt=16)


OFFLINE: dict[str, Any] = {
    "output_throughput": [1.0],
    "mixed_step_ms": 1.0,
    "ready_s": 3.0,
    "date": "",
    "machine": {},
    "versions": {},
    "model": {"name": "m", "dtype": "float32"},
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "http", *SMALL, *arguments])


def test_engine_and_server_are_measured_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_engine.bench.worker_workloads.ON_CPU", TINY)
    output = tmp_path / "http.json"
    result = run("--repeats", "1", "--starts", "0", "--output", str(output))
    assert result.exit_code == 0, result.stderr
    for text in ("offline", "server", "of offline"):
        assert text in result.stdout
    found = json.loads(output.read_text())
    assert found["model"]["name"] == "bundled"
    assert found["offline"]["mixed_step_ms"] > 0
    (served,) = found["servers"]
    for measured, requests in ((served["repeats"][0], 8), (served["saturated"], 16), (served["steady"], 16)):
        assert (measured["completed"], measured["errors"]) == (requests, {})
    assert served["repeats"][0]["output_tokens"] == sum(TINY.requests(5)[1])
    assert served["steady"]["rate"] == pytest.approx(0.7 * served["saturated"]["request_throughput"])
    assert served["ratio"] == served["output_throughput"]["median"] / found["offline"]["output_throughput"]["median"]
    assert len(served["cpu_s"]) >= 2  # the server and its engine core


def test_prompts_differ_and_lengths_do_not() -> None:
    (prompts, lengths), (others, same) = ON_GPU.requests(0), ON_GPU.requests(1)
    assert (prompts, lengths) == request_lengths(256, (100, 1024), (100, 1024), 0)  # workload T
    assert lengths == same
    assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in others]
    assert all(a != b for a, b in zip(prompts, others, strict=True))


def test_what_ends_early_says_why() -> None:
    with pytest.raises(ProcessError, match=r"(?s)^the server ended with exit code 2\n.*error: model must be"):
        server(["--model", "missing"]).__enter__()
    with pytest.raises(ProcessError, match=r"(?s)^the engine ended with exit code 1\n.*model must be"):
        run_worker({"model": "missing"}, None, name="the engine")


def test_starts_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start_engine(options: Any, workload: Any, name: str) -> dict[str, Any]:
        started.append("engine")
        return OFFLINE

    @contextmanager
    def start_server(arguments: Any) -> Iterator[Ready]:
        started.append("server")
        yield Ready("", 4.0, 0)

    monkeypatch.setattr(beside_offline, "run_worker", start_engine)
    monkeypatch.setattr(beside_offline, "server", start_server)
    monkeypatch.setattr(beside_offline, "_measure_server", lambda *_: {})
    plan = beside_offline.HttpPlan({}, [], TINY, [(), ("--strict",)], 0.7, repeats=1, starts=2, processes=1)
    found = beside_offline.compare(plan, SilentProgress(), lambda result: None)
    assert started == ["engine", "server", "engine", "engine", "server", "server"]
    assert len(found["servers"]) == 2
    assert found["ready_s"] == {
        "offline": {"median": 3.0, "spread": [3.0, 3.0]},
        "server": {"median": 4.0, "spread": [4.0, 4.0]},
    }


def test_what_fails_later_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_offline, "run_worker", lambda *_, **__: OFFLINE)

    def fail(arguments: Any) -> Any:
        raise ProcessError("the server ended")

    monkeypatch.setattr(beside_offline, "server", fail)
    output = tmp_path / "http.json"
    result = run("--output", str(output))
    assert isinstance(result.exception, ProcessError)
    assert json.loads(output.read_text())["offline"]["mixed_step_ms"] == 1.0


def test_engine_options_are_written_as_they_are_read() -> None:
    given = {"mode": "eager", "enable_prefix_caching": False, "async_scheduling": True, "compile_ranges": (),
             "capture_sizes": (1, 2), "strict_passes": True}  # fmt: skip
    assert as_written(ENGINE_ARGUMENTS, given) == [
        *("--mode", "eager", "--no-prefix-caching", "--async-scheduling", "--strict-passes", "--compile-range", "0"),
        *("--capture-size", "1", "--capture-size", "2"),
    ]
