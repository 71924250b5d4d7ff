"""Modules that every process of an engine imports, so that passes of the user's own are there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from left_over import workers

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.graph_pass import GraphPass, PassResult
from compiled_engine.passes.registry import register_pass, unregister_pass
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

MODULE = "some_passes"
SOURCE = """
from compiled_engine.passes.registry import register_pass
from compiled_engine.passes.framework.graph_pass import GraphPass, PassResult


class Counted(GraphPass):
    name = "counted"

    def contract(self, graph, compile_range):
        return 1

    def run(self, graph):
        return PassResult(len(graph.find_nodes(op="output")), (), ())


register_pass(Counted(), after="rms_norm")
"""
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mode": "compiled",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_blocks": 8,
    "compile_ranges": (),
    "compile_cache": False,
}
PROMPT = {"prompt_token_ids": [1, 2]}
ONE = SamplingParams(max_tokens=1, temperature=0)


class Here(GraphPass):
    """Registered by the test itself, so in this process alone."""

    name = "here"
    uuid = "1"

    def contract(self, graph: Any, compile_range: Any) -> int:
        return 0

    def run(self, graph: Any) -> PassResult:
        return PassResult(0, (), ())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    return path


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield MODULE
    if sys.modules.pop(MODULE, None) is not None:
        unregister_pass("counted")


def matches(metrics: dict[str, Any]) -> int:
    (passes,) = (passes for name, passes in metrics["passes"].items() if not name.startswith("logits/"))
    found: int = passes["counted"]["matches"]
    return found


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("kind", ["two ranks", "a core of its own"])
def test_a_pass_of_a_plugin_runs_in_every_process(kind: str, checkpoint: Path, plugin: str) -> None:
    (on_every_rank if kind == "two ranks" else in_the_process_of_the_core)(checkpoint, plugin)


def on_every_rank(checkpoint: Path, plugin: str) -> None:
    with LLM(checkpoint, plugins=[plugin], tensor_parallel_size=2, strict_passes=True, **ENGINE) as llm:
        llm.generate(PROMPT, ONE, use_tqdm=False)
        assert matches(llm.metrics()) == 1


def in_the_process_of_the_core(checkpoint: Path, plugin: str) -> None:
    async def run() -> int:
        engine = AsyncLLM(checkpoint, plugins=[plugin], strict_passes=True, **ENGINE)
        try:
            return matches(await engine.metrics())
        finally:
            await engine.shutdown()

    assert asyncio.run(run()) == 1


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_pass_that_another_process_does_not_have_is_an_error(checkpoint: Path, kind: Any) -> None:
    """Otherwise that process would silently leave the pass out."""
    more = {"tensor_parallel_size": 2} if kind is LLM else {}
    register_pass(Here())
    try:
        with pytest.raises(ValueError, match=r"passes has 'here', which was registered in another process .*plugins="):
            kind(checkpoint, **ENGINE, **more)
    finally:
        unregister_pass("here")
    assert not workers()


def test_a_plugin_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_plugin.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, reason in (("no_such_plugin", "ModuleNotFoundError"), ("failing_plugin", "ZeroDivisionError")):
        with pytest.raises(ValueError, match=rf"plugins has '{name}', which cannot be imported \({reason}: .*allowed"):
            resolve(EngineOptions(device="cpu", plugins=(name,)))
