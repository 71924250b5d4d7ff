"""Which attention backend and block size a model gets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_engine.attention.backend import captured_always, choose_backend, default_backend, get_backend
from compiled_engine.attention.case import AttentionCase, GraphSupport, KVFormat, Support, cases_of, planned_together
from compiled_engine.config import HeadShape
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

ON_CPU = AttentionCase("cpu", torch.float32, 4, 2, 64, KVFormat(torch.float32, 0))


def test_backends_are_imported_when_asked_for() -> None:
    code = (
        "import sys, compiled_engine.attention.op, compiled_engine.attention.backend as r; r.get_backend('torch'); "
        "assert not {'triton', 'flash_attn', 'flash_attn_interface'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch", "cpp", "triton"])
def test_a_backend_knows_its_name_and_is_made_once(name: str) -> None:
    assert get_backend(name).name == name
    assert get_backend(name) is get_backend(name)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fa4'; known backends: torch, cpp, triton, flash_attn"):
        get_backend("fa4")


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules.update(flash_attn=None, flash_attn_interface=None); "
        "from compiled_engine.attention.backend import get_backend; get_backend('flash_attn')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: attention_backend 'flash_attn' needs the package flash-attn" in process.stderr


def test_defaults() -> None:
    assert default_backend("cpu")[0] == "cpp"
    assert default_backend("cuda")[0] == "triton"


def test_auto_gives_reasons() -> None:
    choice = choose_backend("auto", "auto", [ON_CPU])
    assert (choice.backend, choice.block_size, choice.cases) == ("cpp", 16, (ON_CPU.with_block_size(16),))
    assert choice.reasons == {
        "attention_backend": "cpu: the engine's own kernel, which needs a C++ compiler",
        "cache.block_size": "the default of attention backend cpp",
    }
    given = choose_backend("torch", 20, [ON_CPU])
    assert (given.backend, given.block_size, given.reasons) == ("torch", 20, {})


def test_where_the_default_refuses_torch_is_taken_and_the_reason_shown() -> None:
    on_cuda = replace(ON_CPU, device="cuda")
    choice = choose_backend("auto", "auto", [on_cuda, replace(on_cuda, head_dim=640)])
    assert (choice.backend, choice.block_size) == ("torch", 16)
    assert choice.reasons["attention_backend"] == (
        "triton cannot run this model: head_dim is 640; allowed: multiples of 8 from 16 to 576"
    )
    choice = choose_backend("auto", 20, [on_cuda])
    assert (choice.backend, choice.block_size) == ("torch", 20)
    refused = "triton cannot run this model: block_size is 20; allowed: multiples of 16"
    assert choice.reasons == {"attention_backend": refused}
    assert choose_backend("auto", "auto", [on_cuda]).backend == "triton"


def test_what_is_offered_for_all_layers_is_the_least() -> None:
    more = Support(GraphSupport.ALWAYS, True, lambda num_requests: (256, 512))
    less = Support(GraphSupport.UNIFORM_DECODE, False, lambda num_requests: (512,) if num_requests == 1 else ())
    both = Support.of_all([more, less])
    assert (both.graphs, both.records_decodes) == (GraphSupport.UNIFORM_DECODE, False)
    assert (both.short_contexts(1), both.short_contexts(2)) == ((512,), ())
    assert Support.of_all([more]).short_contexts(7) == (256, 512)


def test_drafts_of_all_layers_have_the_graphs_that_some_layer_needs() -> None:
    last = Support(GraphSupport.ALWAYS, contexts_of_drafts=lambda num_requests, contexts: contexts[-1:])
    first = Support(GraphSupport.ALWAYS, contexts_of_drafts=lambda num_requests, contexts: contexts[:1])
    every = Support(GraphSupport.ALWAYS)
    contexts = (64, 128, 256)
    found = [Support.of_all(each).contexts_of_drafts(3, contexts) for each in ([last], [last, first], [last, every])]
    assert found == [(256,), (64, 256), contexts]


def test_backends_that_every_graph_captures() -> None:
    on_cuda = replace(ON_CPU, device="cuda").with_block_size(16)
    assert captured_always([on_cuda]) == ["triton"]
    assert captured_always([on_cuda, replace(on_cuda, head_dim=640)]) == []


def test_cases_are_those_of_layers_that_differ() -> None:
    """Layers that differ in their window alone share a plan, layers with other heads make their own."""
    model = replace(resolve(EngineOptions(device="cpu", mode="eager")).model, sliding_windows=(None, 7, None, 7))
    model = replace(model, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, attention_soft_cap=5.0)
    cases = cases_of(model, 16, torch.device("cpu"))
    assert [case.sliding_window for case in cases] == [0, 7]
    assert cases[0] == replace(ON_CPU.with_block_size(16), soft_cap=5.0)
    assert planned_together(cases) == cases[0]
    sinks = cases_of(replace(model, attention_sinks=(1, 3)), 16, torch.device("cpu"))
    assert [case.sinks for case in sinks] == [False, True]
    assert planned_together(sinks) == sinks[0]
    heads = (HeadShape(4, 2, 64), HeadShape(8, 2, 64))
    other = cases_of(replace(model, layer_heads=heads * 2), 16, torch.device("cpu"))
    assert [case.num_heads for case in other] == [4, 8]
    assert planned_together(other) is None


def test_without_a_compiler_a_cpu_gets_torch(tmp_path: Path) -> None:
    code = (
        "import torch; from compiled_engine.attention.case import AttentionCase, KVFormat; "
        "from compiled_engine.attention.backend import choose_backend; "
        "case = AttentionCase('cpu', torch.float32, 4, 2, 64, KVFormat(torch.float32, 16)); "
        "choice = choose_backend('auto', 'auto', [case]); print(choice.backend, choice.block_size, choice.reasons)"
    )
    for compiler, obstacle in (("/no/such", "no C++ compiler (/no/such) was found"), ("false", "cannot compile")):
        environment = {**os.environ, "CXX": compiler, "COMPILED_ENGINE_CACHE_DIR": str(tmp_path)}
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert process.stdout.startswith("torch 16 ")
        assert "cpp cannot run this model: " in process.stdout
        assert obstacle in process.stdout


def test_what_a_requested_backend_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="'triton' cannot run this model here: device is cpu; allowed: cuda"):
        choose_backend("triton", "auto", [ON_CPU])
    with pytest.raises(ValueError, match="'flash_attn' cannot run this model here: "):
        choose_backend("flash_attn", "auto", [ON_CPU])
    with pytest.raises(ValueError, match="num_heads is 5; allowed: multiples of num_kv_heads 2"):
        choose_backend("auto", "auto", [replace(ON_CPU, num_heads=5)])


@pytest.mark.parametrize("block_size", [0, -16, 16.0, "16", "AUTO"])
def test_block_sizes_that_are_none(block_size: object) -> None:
    with pytest.raises(ValueError, match=r"block_size is .*; allowed: 1 to 65536, or 'auto'"):
        choose_backend("auto", block_size, [ON_CPU])  # type: ignore[arg-type]
