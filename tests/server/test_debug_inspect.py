"""/debug/inspect: what the compiler did to the model that is served, where the option asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer, running
from test_server_metrics import samples

from compiled_engine.async_llm import AsyncLLM

# The entry of the compile cache that the tests of `compiled-engine inspect` have as well.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "num_blocks": 16,
    "compile_ranges": (8,),
    "compile_workers": 0,
    "progress": False,
}


@pytest.fixture(scope="module")
def compiled() -> Iterator[RunningServer]:
    with running(AsyncLLM(**ENGINE, core="in_process"), debug_inspect=True, api_key=("a key",)) as server:
        yield server


def get(server: RunningServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=60)


def test_the_report_is_that_of_the_running_model(compiled: RunningServer) -> None:
    key = {"authorization": "Bearer a key"}
    report = get(compiled, "/debug/inspect?format=json", **key).json()
    assert report["cache"]["status"] in ("hit", "miss")
    assert {one["name"] for one in report["passes"] if one["applied"]} >= {"merge_linears", "rope_kv_write"}
    assert [one["matches"] for one in report["passes"]] == [one["contract"] for one in report["passes"]]
    assert report["metrics"]["blocks_total"] == 16
    assert "load weights" in {span["name"] for span in report["phases"]["start_up"]}
    page = get(compiled, "/debug/inspect", **key)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "rope_kv_write" in page.text
    assert get(compiled, "/debug/inspect").status_code == 401


def test_metrics_tell_of_the_compiler(compiled: RunningServer) -> None:
    figures = samples(compiled, authorization="Bearer a key")
    (info,) = [name for name in figures if name.startswith("compiled_engine:compile_cache_info")]
    assert "status=hit,why=found" in info or "status=miss,why=" in info
    names = {name.partition(",")[0] for name in figures}
    assert {"compiled_engine:pass_matches", "compiled_engine:start_up_seconds"} <= names
    assert figures["compiled_engine:pass_matches,pass=rope_kv_write,range=1-64"] == 6


def test_without_the_option_there_is_none(server: RunningServer) -> None:
    assert get(server, "/debug/inspect").status_code == 404
