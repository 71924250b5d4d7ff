"""Graph modes by what the device, the attention backend and the model allow, and limits by device; all is pure."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.attention.backend import AttentionChoice
from compiled_engine.attention.case import AttentionCase, GraphSupport, KVFormat, Support
from compiled_engine.config import GraphMode, Recurrences, RowState, SchedulerConfig
from compiled_engine.options import EngineOptions
from compiled_engine.pooling import EMBED, LAST, NORMALISE, Pooling
from compiled_engine.resolve import engine
from compiled_engine.resolve.cuda_graphs import (
    default_capture_sizes,
    default_token_sizes,
    graphs_of_head,
    recording_obstacle,
    resolve_graphs,
)
from compiled_engine.resolve.engine import resolve, warn_if_eager
from compiled_engine.resolve.recurrences import GIB, MIB, most_requests, resolve_snapshots, state_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEVER, DECODES, ALWAYS = GraphSupport.NEVER, GraphSupport.UNIFORM_DECODE, GraphSupport.ALWAYS
SCHEDULER = SchedulerConfig(16, 1024, 256, "fcfs")
RECURRENCES = Recurrences((RowState("state", (4, 8), "float32"), RowState("tail", (4,), "bfloat16")))
CASE = AttentionCase(
    "cuda", torch.float32, 4, 2, 640, KVFormat(torch.float32, 16)
)  # of a size that no backend captures
OBSTACLE = "something is in the way"


def mode_of(
    graph_mode: str = "auto",
    mode: str = "auto",
    device: torch.device = CUDA,
    support: GraphSupport = ALWAYS,
    *,
    recurrent: bool = False,
    obstacle: str | None = OBSTACLE,
) -> tuple[GraphMode, str]:
    """The mode and its reason; mode `auto` is graphed, as where nothing else is asked for."""
    reasons: dict[str, str] = {}
    graph = resolve_graphs(
        EngineOptions(mode=mode, graph_mode=graph_mode),
        compiled=mode != "eager",
        graphed=mode in ("auto", "graphed"),
        attention=AttentionChoice("some", 16, (CASE,), Support(support), {}),
        short_contexts=lambda size: (),
        recording_obstacle=obstacle,
        model=replace(tiny_config().model, recurrences=RECURRENCES if recurrent else None),
        scheduler=SCHEDULER,
        device=device,
        reasons=reasons,
    )
    assert bool(graph.decode_sizes) == graph.mode.captures_decodes
    assert bool(graph.token_sizes) == graph.mode.captures_mixed
    return graph.mode, reasons.get("graph.mode", "")


@pytest.mark.parametrize(
    ("facts", "expected", "reason"),
    [
        ({"support": ALWAYS}, "full", "can be captured for every batch"),
        ({"support": DECODES}, "full_and_piecewise", "captured only for uniform decode"),
        ({"support": NEVER}, "piecewise", "cannot be captured, so it runs between the graphs"),
        ({"support": ALWAYS, "recurrent": True}, "full", "can be captured for every batch"),
        ({"support": DECODES, "recurrent": True}, "full_decode_only", "the model has recurrences"),
        ({"support": NEVER, "recurrent": True}, "none", "the model has recurrences"),
        ({"mode": "compiled"}, "none", "graphs come with mode graphed"),
        ({"mode": "eager"}, "none", "graphs come with mode graphed"),
        ({"device": CPU, "obstacle": None}, "recorded", "calls of C++ kernels can be recorded"),
        ({"device": CPU, "obstacle": None, "mode": "graphed"}, "recorded", "calls of C++ kernels can be recorded"),
        ({"device": CPU, "obstacle": None, "mode": "compiled"}, "none", "graphs come with mode graphed"),
        ({"device": CPU}, "none", f"decodes cannot be recorded: {OBSTACLE}"),
    ],
)
def test_the_mode_that_is_taken_by_itself(facts: dict[str, Any], expected: str, reason: str) -> None:
    mode, given = mode_of(**facts)
    assert mode is GraphMode(expected)
    assert reason in given


@pytest.mark.parametrize(
    ("facts", "allowed"),
    [
        ({}, "none piecewise full full_decode_only full_and_piecewise"),
        ({"mode": "graphed"}, "piecewise full full_decode_only full_and_piecewise"),
        ({"mode": "compiled"}, "none piecewise full full_decode_only full_and_piecewise"),
        ({"mode": "eager"}, "none full full_decode_only breakable"),
        ({"support": DECODES}, "none piecewise full_decode_only full_and_piecewise"),
        ({"support": DECODES, "mode": "eager"}, "none full_decode_only breakable"),
        ({"support": NEVER}, "none piecewise"),
        ({"support": NEVER, "mode": "eager"}, "none breakable"),
        ({"recurrent": True}, "none full full_decode_only"),
        ({"recurrent": True, "support": DECODES, "mode": "eager"}, "none full_decode_only"),
        ({"recurrent": True, "support": NEVER}, "none"),
        ({"device": CPU}, "none"),
        ({"device": CPU, "obstacle": None}, "none recorded"),
        ({"device": CPU, "obstacle": None, "mode": "graphed"}, "recorded"),
        ({"device": CPU, "mode": "graphed"}, ""),
    ],
)
def test_modes_that_may_be_asked_for(facts: dict[str, Any], allowed: str) -> None:
    """Each is taken as it is, or refused with those that are possible."""
    for mode in GraphMode:
        if mode.value in allowed.split():
            assert mode_of(mode.value, **facts) == (mode, "")
            continue
        with pytest.raises(ValueError, match=f"graph_mode is '{mode.value}'") as error:
            mode_of(mode.value, **facts)
        listed = str(error.value).partition("; allowed: ")[2]
        assert listed == (", ".join(allowed.split()) or "another mode")


def test_mode_graphed_needs_graphs_on_a_cpu_too() -> None:
    with pytest.raises(ValueError, match=f"mode is 'graphed', but {OBSTACLE}; allowed: auto, eager, compiled"):
        mode_of(mode="graphed", device=CPU)


def test_an_encoder_has_no_graphs_of_decodes() -> None:
    graphs = [
        resolve_graphs(
            EngineOptions(),
            compiled=True,
            graphed=True,
            attention=AttentionChoice("some", 16, (), Support(NEVER), {}),
            short_contexts=lambda size: (),
            recording_obstacle=OBSTACLE,
            model=tiny_config().model,
            scheduler=SchedulerConfig(700, 2048, 256, "fcfs"),
            device=CUDA,
            reasons={},
            decodes=decodes,
        )
        for decodes in (True, False)
    ]
    # Decodes in graphs of all batches need one for as many as may run; else they end at 512 tokens.
    assert [(graph.decode_sizes, graph.token_sizes[-1]) for graph in graphs] == [((), 700), ((), 512)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"device": CUDA}, "calls are recorded only on a CPU"),
        ({"enabled": False}, "nothing is compiled"),
        ({"ranks": 2}, "calls are recorded only in a single process"),
        ({"pools": True}, "only decodes are recorded, and a model that pools has none"),
        ({"records": False}, "attention backend some cannot be recorded"),
        ({"ranges": ()}, "no compile range is for small batches"),
        ({"ranges": ((1, 8), (9, 100_000))}, "C++ kernels do not serve all of the model: they serve up to"),
        ({"dtype": torch.bfloat16}, "C++ kernels do not serve all of the model: they compute in float32"),
    ],
)
def test_why_decodes_cannot_be_recorded(change: dict[str, Any], expected: str | None) -> None:
    config = tiny_config(dtype=change.get("dtype", torch.float32))
    pooling = Pooling(EMBED, LAST, (), NORMALISE) if change.get("pools") else None
    compile_config = replace(
        config.compile, enabled=change.get("enabled", True), ranges=change.get("ranges", ((1, 8), (9, 64)))
    )
    found = recording_obstacle(
        compile_config,
        replace(config.parallel, tensor_parallel_size=change.get("ranks", 1)),
        replace(config.model, pooling=pooling),
        AttentionChoice("some", 16, (), Support(NEVER, change.get("records", True)), {}),
        change.get("device", CPU),
    )
    assert (found is None) == (expected is None)
    assert (found or "").startswith(expected or "")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 2, 3, 4), (1, 2, 4)),
        ((3, 5, 9), (3, 5, 9)),
        ((3, 6, 7, 60), (3, 6, 60)),
        ((8, 256, 288, 320), (8, 256, 288, 320)),
        ((64, 192, 224, 400), (64, 192, 400)),
    ],
)
def test_a_head_has_graphs_of_powers_of_two_and_of_all_larger_sizes(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """A power that is no size is padded to the next size that is."""
    assert graphs_of_head(sizes).decode_sizes == expected


@pytest.mark.parametrize(
    "limit", [1, 2, 3, 7, 8, 100, 128, 160, 300, 512, 513, 640, 700, 2048, 2049, 3000, 9000, 20000]
)
def test_default_sizes_are_close_to_each_other_and_end_at_the_limit(limit: int) -> None:
    """A batch is padded to the next size."""
    sizes, end = [1, 2, 4], 0
    for until, step in ((128, 8), (512, 32), (2048, 128), (4096, 256), (8192, 512), (16384, 1024), (32768, 2048)):
        sizes += range(end + step, until + 1, step)
        end = until
    assert default_token_sizes(limit) == (*(size for size in sizes if size < limit), limit)
    of_decodes = [1, 2, 4, *range(8, 129, 8), *range(160, limit, 32)]
    assert default_capture_sizes(limit) == (*(size for size in of_decodes if size < limit), limit)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (64, 2048, False)),
        ({"max_num_seqs": 3}, (3, 2048, False)),
        ({"max_num_batched_tokens": 40}, (40, 40, False)),
        ({"max_num_batched_tokens": 100}, (64, 100, False)),
        ({"async_scheduling": True}, (64, 2048, True)),
    ],
)
def test_limits_of_a_cpu(options: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    config = resolve(EngineOptions(device="cpu", **options))
    scheduler = config.scheduler
    found = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.async_scheduling
    assert found == expected
    reasons = {name.removeprefix("scheduler.") for name in config.reasons if name.startswith("scheduler.")}
    assert reasons == {"max_num_seqs", "max_num_batched_tokens", "async_scheduling"} - options.keys()


def test_limits_of_a_gpu_are_larger_and_the_host_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("is_available", True), ("device_count", 1), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    scheduler = resolve(EngineOptions(device="cuda", mode="eager", attention_backend="torch")).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.async_scheduling) == (256, 8192, True)


@pytest.mark.parametrize(
    ("asked", "current", "expected"),
    [("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cuda:0", 1, "cuda:0"), ("cuda:1", 0, "cuda:1"), ("cpu", 0, "cpu")],
)
def test_devices_with_two_gpus(asked: str, current: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("is_available", True), ("device_count", 2), ("current_device", current)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    reasons: dict[str, str] = {}
    assert engine.resolve_device(asked, reasons) == torch.device(expected)
    assert bool(reasons) == (asked == "auto")
    with pytest.raises(ValueError, match="device is 'cuda:2'; allowed: cuda:0 to cuda:1"):
        engine.resolve_device("cuda:2", reasons)


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no CUDA GPU here; allowed: auto, cpu"):
        engine.resolve_device("cuda", {})
    assert engine.resolve_device("auto", {}) == CPU


@pytest.mark.parametrize(
    ("options", "compiled", "graphed"),
    [
        ({"mode": "auto"}, True, True),
        ({"mode": "auto", "graph_mode": "none"}, True, False),
        ({"mode": "compiled"}, True, False),
        ({"mode": "graphed"}, True, True),
        ({"mode": "eager"}, False, False),
    ],
)
def test_what_is_compiled_and_graphed(options: dict[str, Any], compiled: bool, graphed: bool) -> None:
    config = resolve(EngineOptions(device="cpu", **options))
    assert (config.compile.enabled, config.graph.mode is GraphMode.RECORDED) == (compiled, graphed)
    assert ("compile.enabled" in config.reasons) == (options["mode"] == "auto")


def test_breakable_graphs_are_of_eager_code() -> None:
    with pytest.raises(ValueError, match="graph_mode is 'breakable', which replays CUDA graphs"):
        resolve(EngineOptions(device="cpu", graph_mode="breakable"))


@pytest.mark.parametrize(
    ("mode", "has_compiler", "warns"), [("auto", False, True), ("auto", True, False), ("eager", False, False)]
)
def test_a_slow_mode_that_nobody_asked_for_is_warned_of(
    mode: str, has_compiler: bool, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setenv("CXX", "/no/such/compiler")
    options = EngineOptions(device="cpu", mode=mode)
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        warn_if_eager(options, resolve(options))
    assert ("mode is eager, which is slower: compiling on a CPU needs a C++ compiler" in caplog.text) == warns
    assert ("/no/such/compiler, which CXX names, was not found" in caplog.text) == warns


def test_states_of_requests_are_divided_among_ranks_and_bound_their_number() -> None:
    model = replace(tiny_config().model, recurrences=RECURRENCES)
    assert [state_bytes(model, ranks) for ranks in (1, 2)] == [4 * 8 * 4 + 4 * 2, (4 * 8 * 4 + 4 * 2) // 2]
    assert state_bytes(tiny_config().model, 1) == 0
    assert [most_requests(size, CPU) for size in (0, 1, GIB // 2, GIB, GIB + 1, 9 * GIB)] == [None, GIB, 2, 1, 1, 1]
    assert most_requests(GIB, CUDA) == 8


def test_snapshots_are_bounded_by_memory_and_by_requests() -> None:
    def count(request_bytes: int, max_num_seqs: int, device: torch.device = CPU, **options: Any) -> tuple[int, bool]:
        reasons: dict[str, str] = {}
        found = resolve_snapshots(EngineOptions(**options), request_bytes, max_num_seqs, device, reasons)
        return found, "model.recurrences.num_snapshots" in reasons

    assert count(MIB, 2) == (16, True)
    assert count(MIB, 200) == (256, True)
    assert count(MIB, 2000, CUDA) == (4096, True)
    assert count(300 * MIB, 4) == (3, True)
    assert count(MIB, 2, num_state_snapshots=7) == (7, False)
    assert count(MIB, 2, num_state_snapshots=0) == (0, False)
    assert count(MIB, 2, enable_prefix_caching=False) == count(0, 2) == (0, False)
    assert count(0, 2, num_state_snapshots=0) == (0, False)
