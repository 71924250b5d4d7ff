"""Graph modes and sizes: what is chosen, why, and what is refused. Nothing here needs a GPU: resolving is pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.attention.backend import choose_backend
from compiled_engine.attention.case import AttentionCase, KVFormat
from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.cuda_graphs import default_capture_sizes, default_token_sizes, resolve_graphs
from compiled_engine.resolve.engine import resolve

SCHEDULER = SchedulerConfig(256, 8192, 4096, "fcfs")


def resolved(
    mode: str = "graphed",
    backend: str = "triton",
    device: str = "cuda",
    scheduler: SchedulerConfig = SCHEDULER,
    short_contexts: Callable[[int], tuple[int, ...]] = lambda size: (),
    **options: Any,
) -> tuple[GraphConfig, dict[str, str]]:
    reasons: dict[str, str] = {}
    case = AttentionCase("cuda", torch.bfloat16, 4, 2, 64, KVFormat(torch.bfloat16, 16))
    graph = resolve_graphs(
        EngineOptions(mode=mode, **options),
        compiled=mode != "eager",
        graphed=mode == "graphed",
        attention=choose_backend(backend, "auto", [case]),
        short_contexts=short_contexts,
        recording_obstacle="calls are recorded only on a CPU",
        model=tiny_config().model,
        scheduler=scheduler,
        device=torch.device(device),
        reasons=reasons,
    )
    return graph, reasons


def test_the_default_has_23_graphs_of_decodes_and_59_of_other_batches() -> None:
    graph, reasons = resolved()
    assert graph == GraphConfig(GraphMode.FULL, default_capture_sizes(256), default_token_sizes(8192))
    assert (len(graph.decode_sizes), len(graph.token_sizes)) == (23, 59)
    assert reasons.keys() == {"graph.mode", "graph.decode_sizes", "graph.token_sizes"}
    assert reasons["graph.mode"] == "default: attention backend triton can be captured for every batch"


@pytest.mark.parametrize(
    ("most", "short", "expected"),
    [
        (2, (256, 512), ((1, 256), (1, 512), (2, 256), (2, 512))),
        (2, (512, 4096), ((1, 512), (2, 512))),
        (8, (4096,), ()),
        (0, (9,), ()),
    ],
)
def test_short_contexts_have_graphs_where_they_are_less_than_all(
    most: int, short: tuple[int, ...], expected: tuple[tuple[int, int], ...]
) -> None:
    graph, _ = resolved(short_contexts=lambda size: short if size <= most else ())
    assert graph.short_decodes == expected


def test_each_size_has_its_own_short_contexts() -> None:
    contexts = {1: (256, 512), 24: (512,), 256: (1024,)}
    graph, _ = resolved(short_contexts=lambda size: contexts.get(size, ()))
    assert graph.short_decodes == ((1, 256), (1, 512), (24, 512), (256, 1024))


def test_verifications_have_graphs_for_the_contexts_that_change_what_they_launch() -> None:
    contexts = {1: (256, 512), 4: (256, 512), 24: (512, 1024)}
    graph, _ = resolved(short_contexts=lambda size: contexts.get(size, ()))
    assert graph.short_verified == ((1, 256), (1, 512), (4, 256), (4, 512), (24, 1024))


def test_where_attention_cannot_be_captured_it_runs_between_graphs_of_up_to_512_tokens() -> None:
    graph, reasons = resolved(backend="torch")
    assert graph == GraphConfig(GraphMode.FULL_AND_PIECEWISE, default_capture_sizes(256), default_capture_sizes(512))
    assert "attention backend torch can be captured only for uniform decode" in reasons["graph.mode"]


@pytest.mark.parametrize(
    ("mode", "graph_mode"),
    [
        ("eager", "full"),
        ("eager", "full_decode_only"),
        ("eager", "breakable"),
        ("compiled", "piecewise"),
        ("compiled", "full"),
        ("compiled", "full_decode_only"),
        ("compiled", "full_and_piecewise"),
        ("graphed", "full_and_piecewise"),
        ("auto", "none"),
    ],
)
def test_what_is_asked_is_taken(mode: str, graph_mode: str) -> None:
    graph, reasons = resolved(mode, graph_mode=graph_mode)
    assert graph.mode is GraphMode(graph_mode)
    assert "graph.mode" not in reasons
    assert bool(graph.decode_sizes) == graph.mode.captures_decodes
    assert bool(graph.token_sizes) == graph.mode.captures_mixed


def test_without_graphs_there_is_nothing_to_capture() -> None:
    assert resolved("compiled")[0] == GraphConfig(GraphMode.NONE)
    assert resolved("eager")[0] == GraphConfig(GraphMode.NONE)


def test_explicit_sizes() -> None:
    graph, reasons = resolved(capture_sizes=(8, 3, 8), capture_token_sizes=(64,))
    assert graph == GraphConfig(GraphMode.FULL, (3, 8), (64,))
    assert reasons.keys() == {"graph.mode"}


@pytest.mark.parametrize(
    ("mode", "options", "kind", "message"),
    [
        ("graphed", {"graph_mode": "ful"}, ValueError, "graph_mode is 'ful'; allowed: auto, none, piecewise"),
        ("graphed", {"graph_mode": "none"}, ValueError, "graph_mode is 'none', but mode is 'graphed'"),
        ("eager", {"graph_mode": "piecewise"}, ValueError, "captures compiled pieces, but mode is 'eager'"),
        ("eager", {"graph_mode": "full_and_piecewise"}, ValueError, "captures compiled pieces, but mode is 'eager'"),
        ("compiled", {"graph_mode": "breakable"}, ValueError, "captures eager code, but mode is 'compiled'"),
        ("compiled", {"capture_sizes": (8,)}, ValueError, r"capture_sizes is \(8,\), but the mode captures no CUDA"),
        ("graphed", {"capture_sizes": (0,)}, ValueError, "capture_sizes has 0; allowed: integers of at least 1"),
        ("graphed", {"capture_sizes": (257,)}, ValueError, r"has 257; allowed: at most max_num_seqs \(256\)"),
        ("graphed", {"capture_token_sizes": (9000,)}, ValueError, r"at most max_num_batched_tokens \(8192\)"),
        ("graphed", {"capture_token_sizes": ("8",)}, ValueError, "capture_token_sizes has '8'; allowed: integers"),
        (
            "graphed",
            {"graph_mode": "full_decode_only", "capture_token_sizes": (8,)},
            ValueError,
            "graph mode 'full_decode_only' captures no such batches",
        ),
        (
            "graphed",
            {"capture_sizes": (), "capture_token_sizes": ()},
            ValueError,
            "would capture nothing with capture_s",
        ),
        ("graphed", {"graph_mode": "full_decode_only", "capture_sizes": ()}, ValueError, "would capture nothing"),
    ],
)
def test_what_cannot_be_is_refused(mode: str, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        resolved(mode, **options)


def test_decodes_without_graphs_of_their_own_all_have_one() -> None:
    graph, _ = resolved(graph_mode="piecewise", scheduler=SchedulerConfig(1024, 8192, 4096, "fcfs"))
    assert graph.token_sizes[-1] == 1024


def test_a_backend_that_captures_decodes_alone_has_no_full_mode() -> None:
    with pytest.raises(
        ValueError,
        match=r"only for uniform decode; allowed: .*full_and_piecewise, attention_backend",
    ):
        resolved(backend="torch", graph_mode="full")
    assert resolved(backend="torch")[0].mode is GraphMode.FULL_AND_PIECEWISE


def test_graphs_on_a_cpu_are_an_error_that_names_cuda() -> None:
    for graph_mode in ("full", "piecewise", "breakable"):
        with pytest.raises(ValueError, match=r"replays CUDA graphs and needs a CUDA GPU; allowed: none(, recorded)?$"):
            resolve(EngineOptions(device="cpu", graph_mode=graph_mode))
    assert resolve(EngineOptions(device="cpu", graph_mode="none")).graph.mode is GraphMode.NONE
