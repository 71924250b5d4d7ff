"""What graphs take of memory is predicted once, and again whenever anything that it depends on has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_capture import RecordedCapture

from compiled_engine.config import DraftConfig, EngineConfig, flat_fields
from compiled_engine.graphs.cache.folder import open_cache
from compiled_engine.graphs.cache.lookup import Lookup
from compiled_engine.graphs.cache.work_folder import WorkFolder
from compiled_engine.graphs.cuda_graphs import memory
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind, decode_key
from compiled_engine.graphs.cuda_graphs.manager import CudaGraphManager
from compiled_engine.graphs.cuda_graphs.memory import ENOUGH_DRIVER_BYTES, MemoryReading, families, predicted_bytes
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

KEY = "0" * 31 + "1"


class Graphs:
    """Predicts another number each time."""

    def __init__(self) -> None:
        self.predictions = 0
        self.expected: list[int] = []
        self.names_to_capture = ["decode_2", "decode_1"]

    def predict(self, all_reduce_min: Callable[[int], int]) -> int:
        self.predictions += 1
        return 1000 + self.predictions

    def expect(self, predicted: int) -> int:
        self.expected.append(predicted)
        return predicted


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return resolve(EngineOptions(device="cpu", max_model_len=64))


def lookup_in(root: Path, status: str = "hit", key: str = KEY) -> Lookup:
    return Lookup(open_cache(root).entry(key), key, status, None, WorkFolder(None, "test_"))


def test_a_second_process_does_not_predict(config: EngineConfig, tmp_path: Path) -> None:
    first, second = Graphs(), Graphs()
    assert predicted_bytes(config, lookup_in(tmp_path, "miss"), first) == 1001
    elsewhere = replace(config, model=replace(config.model, path=Path("/elsewhere")), reasons={})
    assert predicted_bytes(elsewhere, lookup_in(tmp_path), second) == 1001
    assert (first.predictions, first.expected, second.predictions, second.expected) == (1, [], 0, [1001])


@pytest.mark.parametrize("lookup", [lambda root: None, lambda root: lookup_in(root, "off")])
def test_without_a_cache_each_process_predicts(
    lookup: Callable[[Path], Lookup | None], config: EngineConfig, tmp_path: Path
) -> None:
    graphs = Graphs()
    assert [predicted_bytes(config, lookup(tmp_path), graphs) for _ in range(2)] == [1001, 1002]


def test_ranks_ask_one_another_as_often_whatever_their_caches_are(config: EngineConfig, tmp_path: Path) -> None:
    asked: list[int] = []

    def all_reduce_min(value: int) -> int:
        asked.append(value)
        return 0

    for lookup in (None, lookup_in(tmp_path, "off"), lookup_in(tmp_path, "miss")):
        predicted_bytes(config, lookup, Graphs(), all_reduce_min)
    assert asked == [0, 0, 0]


@pytest.mark.parametrize("agreed", [1, 0])
def test_ranks_sample_as_many_graphs_whatever_else_their_devices_hold(agreed: int) -> None:
    """One rank alone has seen enough at once: its driver says that the first graph took much."""

    class Capture(RecordedCapture):
        def memory(self) -> MemoryReading:
            self.num_readings += 1
            return MemoryReading(0, self.num_readings * (ENOUGH_DRIVER_BYTES + 1))

        num_readings = 0

    class Step:
        num_runs = num_warm_ups = 0

        def fill(self, key: GraphKey) -> None: ...

        def warm_up(self, key: GraphKey) -> None:
            self.num_warm_ups += 1

        def run(self, key: GraphKey) -> torch.Tensor:
            self.num_runs += 1
            return torch.zeros(1)

        def tensor_ids(self) -> tuple[int, ...]:
            return ()

    step, asked = Step(), []

    def all_reduce_min(value: int) -> int:
        asked.append(value)
        return agreed

    keys = [GraphKey(GraphKind.FULL, n, n, n, 1, 64) for n in range(1, 6)]
    CudaGraphManager(dict.fromkeys(keys, step), Capture(torch.device("cpu"))).predict(all_reduce_min)
    assert asked == [1] * (1 if agreed else len(keys))
    assert step.num_runs == step.num_warm_ups == len(asked)


@pytest.mark.parametrize(
    "other",
    [
        {"kind": GraphKind.PIECEWISE},
        {"max_query_len": 2},
        {"purpose": "draft-2"},
        {"without_offsets": True},
        {"extra": (("rank", 16),)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_graphs_that_hold_other_kernels_are_measured_apart(other: dict[str, Any]) -> None:
    """Each takes about as much memory as those of its kind, and the prediction is a mean for each kind."""
    keys = [decode_key(size, 64) for size in (1, 2, 4)]
    others = [key._replace(**other) for key in keys]
    found = families([*keys, *others])
    assert sorted(found, key=str) == sorted([keys[::-1], others[::-1]], key=str)


def test_other_factors_are_another_prediction(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs()
    scheduler = replace(config.scheduler, max_num_seqs=config.scheduler.max_num_seqs - 1)
    graph = replace(config.graph, decode_sizes=(1, 2))
    others = [replace(config, scheduler=scheduler), replace(config, graph=graph)]
    found = [predicted_bytes(c, lookup_in(tmp_path), graphs) for c in (config, *others)]
    found.append(predicted_bytes(config, lookup_in(tmp_path, key="2" * 32), graphs))
    for names in (["decode_1", "decode_2"], ["decode_1"]):  # what is captured first takes memory that others use again
        graphs.names_to_capture = names
        found.append(predicted_bytes(config, lookup_in(tmp_path), graphs))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found.append(predicted_bytes(config, lookup_in(tmp_path), graphs))
    monkeypatch.setattr(memory, "_describe", lambda device: {"driver": "another"})
    found.append(predicted_bytes(config, lookup_in(tmp_path), graphs))
    found += [predicted_bytes(config, lookup_in(tmp_path), graphs, share=share) for share in (0, 1, 1)]
    assert found == [*range(1001, 1009), 1008, 1009, 1009]


def test_the_code_that_is_captured_or_captures_is_a_factor(config: EngineConfig) -> None:
    source = memory.graph_memory_factors(config, "1" * 32, [])["source"]
    captured = {"attention/backends/triton_decode.py", "sampling/sampler.py", "engine/runner.py"}
    assert {"graphs/cuda_graphs/capture.py", "kernels/launcher.py", *captured} <= source.keys()
    assert len(set(source.values())) > 1


def test_a_gpu_and_its_driver_are_factors(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver by the files of its library that are mapped, whose names have its version."""
    on_gpu = replace(config, device=torch.device("cuda", 0))
    mapped = tmp_path / "maps"
    monkeypatch.setattr(memory, "MAPPED_FILES", mapped)

    def described(name: str, *versions: str) -> Any:
        lines = [f"7f00 r-xp 00000000 00:4 7  /usr/lib/libcuda.so.{version}" for version in versions]
        mapped.write_text("\n".join([*lines, "7f01 r-xp 00000000 00:4 8  /usr/lib/libcudart.so.13"]))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"{name} of {device}")
        return memory.graph_memory_factors(on_gpu, KEY, [])["device"]

    base = described("H100", "570.1")
    assert base == {"type": "cuda", "properties": "H100 of cuda:0", "driver": ["/libcuda.so.570.1"]}
    assert described("H100", "570.1", "570.1") == base
    assert described("H200", "570.1") != base
    assert described("H100", "580.1") != base
    assert described("H100", "580.1", "570.1") == described("H100", "570.1", "580.1")
    assert memory.graph_memory_factors(config, KEY, [])["device"] == {"type": "cpu"}


def test_every_field_of_the_configuration_is_a_factor_but_where_things_are_and_why(config: EngineConfig) -> None:
    drafted = replace(
        config,
        speculation=replace(config.speculation, draft=DraftConfig(config.model, config.compile, config.graph)),
    )
    for each, draft in ((config, False), (drafted, True)):
        left_out = flat_fields(each).keys() - memory.graph_memory_factors(each, KEY, [])["config"].keys()
        where = {"model.path", "model.hub_name", "model.revision", "compile.cache_dir"}
        of_draft = {f"speculation.draft.{name}" for name in where} if draft else set()
        assert left_out == where | of_draft | {"tokenizer", "reasons"}


@pytest.mark.parametrize(
    "variable",
    [
        *("CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS"),
        *("TRITON_ALWAYS_COMPILE", "NVIDIA_TF32_OVERRIDE"),
    ],
)
def test_what_sets_up_cuda_is_a_factor(
    variable: str, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs()
    monkeypatch.delenv(variable, raising=False)
    found = [predicted_bytes(config, lookup_in(tmp_path), graphs)]
    for value in ("1", "2", "1"):
        monkeypatch.setenv(variable, value)
        found.append(predicted_bytes(config, lookup_in(tmp_path), graphs))
    assert found == [1001, 1002, 1003, 1002]


def test_where_kernels_are_kept_is_none(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    for folder in ("/one", "/another"):
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        assert predicted_bytes(config, lookup_in(tmp_path), graphs) == 1001


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another number": lambda kept: kept | {"bytes": 1},
    "no number": lambda kept: kept | {"bytes": "1001"},
    "other factors": lambda kept: kept | {"factors": {}},
    "not the digest": lambda kept: kept | {"digest": ""},
    "no object": lambda kept: [],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_counts_as_none(damage: str, config: EngineConfig, tmp_path: Path) -> None:
    graphs = Graphs()
    predicted_bytes(config, lookup_in(tmp_path), graphs)
    (file,) = (tmp_path / "compiled").glob(f"{KEY}_graphs_*.json")
    file.write_text(json.dumps(DAMAGE[damage](json.loads(file.read_text()))))
    assert predicted_bytes(config, lookup_in(tmp_path), graphs) == 1002
    file.write_text("{")
    assert predicted_bytes(config, lookup_in(tmp_path), graphs) == 1003
    assert predicted_bytes(config, lookup_in(tmp_path), graphs) == 1003


def test_another_users_file_counts_as_none(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs()
    predicted_bytes(config, lookup_in(tmp_path), graphs)
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    folder = tmp_path / "compiled"
    lookup = Lookup(folder / KEY, KEY, "hit", None, WorkFolder(None, "test_"))
    assert predicted_bytes(config, lookup, graphs) == 1002


def test_a_folder_that_cannot_be_written_to_is_no_error_and_what_is_half_written_has_the_name_of_its_entry(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it goes with the entry if the process is killed."""
    lookup, written = lookup_in(tmp_path), []

    def fail(source: str, target: Path) -> None:
        written.append(Path(source).name)
        raise OSError("read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        assert predicted_bytes(config, lookup, Graphs()) == 1001
    assert [name.startswith(f"{KEY}_graphs_") for name in written] == [True]
    assert list((tmp_path / "compiled").iterdir()) == []


def test_it_is_removed_with_its_entry(config: EngineConfig, tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    predicted_bytes(config, lookup_in(tmp_path), Graphs())
    with cache.locked(KEY):
        cache.remove(KEY)
    assert list(cache.path.iterdir()) == []
    assert cache.all_keys() == []
