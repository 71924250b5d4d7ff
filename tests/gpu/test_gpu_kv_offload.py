"""Prefixes come back from host memory and from files on a GPU while other requests decode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import family, write_checkpoint

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "num_blocks": 100,  # two prefixes and the other request
}
COMPILED: dict[str, Any] = {"mode": "graphed", "compile_workers": 0}
PREFIXES = [tuple((7 * start + 3 * place * place) % 4000 + 5 for place in range(600)) for start in range(3)]
SAME = ("traces", "compiles", "captures")


def run(prefixes: Sequence[tuple[int, ...]] = PREFIXES, **options: Any) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the tokens of requests that evict one another's prefixes, and metrics. Another request decodes throughout.

    It gets a token in each step, whatever the others wait for.
    """
    tokens: dict[str, list[int]] = {"other": []}

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    with closing(start_core(resolve(EngineOptions(**OPTIONS | options)), SilentProgress())) as core:
        before = core.metrics()
        core.add(EngineRequest("other", tuple(range(10, 30)), params(800)))
        while not tokens["other"]:
            for output in core.step():
                tokens[output.request_id] += output.new_token_ids
        for number in range(9):
            request_id, finished = f"r{number}", False
            tokens[request_id] = []
            core.add(EngineRequest(request_id, (*prefixes[number % 3], 9, 9 + number), params(6)))
            while not finished:
                outputs = list(core.step())
                for output in outputs:
                    tokens[output.request_id] += output.new_token_ids
                    finished |= output.request_id == request_id and output.finish_reason is not None
                assert "other" in {output.request_id for output in outputs}
        core.abort("other")
        after = core.metrics()
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    tokens["other"] = tokens["other"][:50]  # it has as many more as there were steps
    return tokens, after


def test_prefixes_come_back_while_others_decode(tmp_path: Path) -> None:
    """From host memory, and after a restart from files."""
    expected, _ = run(mode="eager", enable_prefix_caching=False)
    options: dict[str, Any] = {"kv_offloading_size": 0.1, "kv_offloading_folder": tmp_path, **COMPILED}
    found, metrics = run(**options)
    assert found == expected
    assert metrics["kv_offload_loaded"] > 0
    assert metrics["kv_offload_read"] == 0
    found, again = run(**options)
    assert found == expected
    assert again["kv_offload_loaded"] >= again["kv_offload_read"] > 0
    assert metrics["kv_offload_file_errors"] == again["kv_offload_file_errors"] == 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_states_come_back_while_others_decode(name: str, tmp_path: Path) -> None:
    """The device has room for two snapshots, of the three that the prefixes end at."""
    few = family(name)
    write_checkpoint(tmp_path / "model", replace(few, changes={**few.changes, "max_position_embeddings": 1024}))
    prefixes = [tuple(token % 120 + 5 for token in prefix) for prefix in PREFIXES]
    model: dict[str, Any] = {"prefixes": prefixes, "model": tmp_path / "model"}
    expected, _ = run(mode="eager", enable_prefix_caching=False, **model)
    options = {"kv_offloading_size": 0.1, "kv_offloading_folder": tmp_path / "files", "num_state_snapshots": 2}
    for is_restart in (False, True):
        found, metrics = run(**options, **COMPILED, **model)
        assert found == expected
        assert metrics["kv_offload_loaded_states"] > 0
        assert (metrics["kv_offload_read_states"] > 0) == is_restart
        assert metrics["kv_offload_file_errors"] == 0
