"""Trace, passes, split and stitching on every model family, without weights and with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_cases import graph_of
from tiny_models import tiny_config

from compiled_engine.attention.inputs import arguments_of, attention_inputs_of, step_of
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiled_model import CompiledModel, compile_model
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.direct_piece import direct_source, load_direct
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import compile_ranges, forward_signature
from compiled_engine.graphs.compiler.split import SplitError, make_plan, split
from compiled_engine.graphs.compiler.stitch import forward_source, stitch
from compiled_engine.graphs.compiler.trace import TracedGraph, require_no_guards, trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.checkpoint.loader import fill_with_random_weights
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, SplittingOp
from compiled_engine.passes.registry import register_pass, unregister_pass
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline


def traced(config: EngineConfig) -> TracedGraph:
    return trace(without_storage(build_model(config.model), config.device), forward_signature(config))


def compiled(config: EngineConfig) -> CompiledModel:
    return compile_model(config, build_model, SilentProgress(), Timeline())


def models() -> Iterator[Any]:
    """Each architecture, of three layers and of eight."""
    for architecture in sorted(FAMILIES):
        yield pytest.param(architecture, 3, torch.bfloat16)
        yield pytest.param(architecture, 8, torch.float32)


@pytest.mark.product(one_in=48)
@pytest.mark.parametrize(("architecture", "num_layers", "dtype"), list(models()))
def test_each_range_has_three_pieces_however_deep_the_model(
    architecture: str, num_layers: int, dtype: torch.dtype
) -> None:
    config = tiny_config(architecture, num_layers, dtype=dtype)
    config = replace(config, compile=replace(config.compile, ranges=((1, 8),), strict=True))
    graph = traced(config)
    for compile_range in compile_ranges(config):
        module, reports = apply_passes(config, graph, compile_range)
        applied = [report for report in reports if report.applied]
        assert [report.matches for report in applied] == [report.contract for report in applied]
        assert not any(report.near_misses for report in applied)
        plan, unique = make_plan(module.graph, split(module.graph))
        assert len(unique) == 3
        assert len(plan.steps) == 2 * num_layers + 1
        assert Plan.from_json(plan.to_json()) == plan


def test_the_trace_holds_for_all_sizes() -> None:
    graph = traced(tiny_config())
    require_no_guards(graph.shape_env)
    sizes = {
        node.meta["source"].name: node
        for node in graph.module.graph.find_nodes(op="placeholder")
        if node.meta["source"].kind == "size"
    }
    assert "input_ids_T" in sizes


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("max_tokens", "max_requests"), [(1, 1), (64, 1), (2, 2), (12, 2)])
def test_small_limits_are_traced_too(max_tokens: int, max_requests: int) -> None:
    config = tiny_config()
    limits = replace(config.scheduler, max_num_batched_tokens=max_tokens, max_num_seqs=max_requests)
    require_no_guards(traced(replace(config, scheduler=limits)).shape_env)


def test_code_that_keeps_what_it_computes_is_refused() -> None:
    config = tiny_config()
    model = without_storage(build_model(config.model), config.device)

    class Keeps(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(*arguments)
            return self.kept * 2

    model.__class__ = Keeps
    with pytest.raises(ValueError, match="assigns tensors to attributes while it runs"):
        trace(model, forward_signature(config))


def test_code_may_keep_a_parameter_in_another_dtype() -> None:
    """Each run makes it again, so the graph need not return it."""
    config = tiny_config(num_layers=1, dtype=torch.bfloat16)
    model = without_storage(build_model(config.model), config.device)

    class Keeps(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            self.kept = self.model.norm.weight.float()
            return super().forward(*arguments) * self.kept[0]

    model.__class__ = Keeps
    signature = forward_signature(config)
    (results,) = trace(model, signature).module.graph.output_node().args
    assert len(results) == len(signature.results)


def test_no_piece_takes_or_returns_the_kv_cache() -> None:
    config = tiny_config()
    module = traced(config).for_range(CompileRange(1, 256))
    for step in split(module.graph):
        if step.piece is not None:
            names = {node.meta["source"].name for node in step.inputs if "source" in node.meta}
            assert not any(name.startswith("kv_caches") for name in names)
            for node in step.piece.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    assert value.dim() < 5


def test_an_unknown_mutating_op_is_an_error() -> None:
    graph = traced(tiny_config()).module.graph
    attention = graph.find_nodes(op="call_function", target=torch.ops.compiled_engine.attention.default)[0]
    with graph.inserting_before(attention):
        graph.call_function(torch.ops.aten.add_.Tensor, (attention.args[0], attention.args[0]))
    with pytest.raises(SplitError, match="add_"):
        split(graph)


@torch.library.custom_op("tests::accumulate", mutates_args=("total_T",))
def accumulate(total_T: torch.Tensor, x_T: torch.Tensor) -> None:
    total_T += x_T


class Accumulates(GraphPass):
    """A pass whose op writes to what it is given, as to a cache."""

    name = "accumulates"
    splitting_ops = (SplittingOp("tests::accumulate", lambda total_T, x_T: total_T.add_(10 * x_T)),)


def test_a_pass_declares_the_ops_that_the_graph_is_split_at() -> None:
    """The compiled forward calls the declared function in the op's place."""

    def function(input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        accumulate(input_ids_T, positions_T.unsqueeze(0).squeeze(0))
        return (input_ids_T.unsqueeze(0),)

    inputs = {"input_ids_T": torch.tensor([1, 2]), "positions_T": torch.tensor([3, 4])}
    graph = graph_of(function, inputs, {}).graph
    with pytest.raises(SplitError, match="tests::accumulate mutates an input"):
        split(graph)
    register_pass(Accumulates())
    try:
        steps = split(graph)
        plan, unique = make_plan(graph, steps)
        pieces = {key: load_direct(direct_source(text), "cpu") for key, text in unique.items()}
        forward = stitch(plan, pieces, {})
    finally:
        unregister_pass("accumulates")
    assert [step.op for step in steps] == [None, "tests::accumulate", None]
    assert not plan.carried  # nothing attends
    assert forward(inputs["input_ids_T"], inputs["positions_T"], None, []).tolist() == [[31, 42]]


@pytest.fixture(scope="module")
def compiled_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    config = tiny_config(num_layers=3)
    return replace(config, compile=replace(config.compile, cache_dir=tmp_path_factory.mktemp("cache")))


def test_one_artifact_serves_all_sizes_and_a_warm_start_compiles_nothing(
    compiled_config: EngineConfig,
) -> None:
    config = compiled_config
    cold = compiled(config)
    assert (cold.lookup.status, cold.counts.traces, cold.counts.compiles) == ("miss", 1, 7)

    def no_model(model: ModelConfig) -> torch.nn.Module:
        raise AssertionError("a warm start must not trace")

    warm = compile_model(config, no_model, SilentProgress(), Timeline())
    assert (warm.lookup.status, warm.counts.traces, warm.counts.compiles) == ("hit", 0, 0)
    model = build_model(config.model)
    weights = materialize(model, warm.parameters, config.device)
    fill_with_random_weights(weights, seed=0)
    (*_, forward), (logits,) = warm.bind("forward", weights.tensors), warm.bind("logits", weights.tensors)
    for num_tokens in (1, 2, 17, 256):
        block_size = config.cache.block_size
        ids = torch.randint(0, 101, (num_tokens,)).tolist()
        step = step_of(ids, [range(num_tokens)], [range(16)], block_size, config.device)
        inputs = attention_inputs_of(step, config.attention_backend)
        results = []
        for function in (forward.call, model):
            caches = [torch.zeros(shape) for shape in config.model.kv_shapes(16, block_size)]
            with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
                results.append((function(*arguments_of(step, inputs, caches)), caches))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            assert torch.equal(logits.call(results[0][0]), model.logits(results[0][0]))
    assert warm.ranges[-1].name == "logits/1-256"
    assert warm.direct.issuperset(warm.ranges[-1].plan.piece_keys())


def test_the_stitched_forward_is_readable_and_frees_what_it_used(compiled_config: EngineConfig) -> None:
    folder = compiled(compiled_config).lookup.folder / "1-256"
    source = (folder / "forward.py").read_text()
    assert source == forward_source(Plan.from_json((folder / "plan.json").read_text()))
    assert source.count("compiled_engine_attention(") == 3
    assert "del v" in source
    assert source.rstrip().split("\n")[-1].startswith("    return v")


def test_the_callers_compiler_folders_are_put_back(
    compiled_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    compiled(compiled_config)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert "TRITON_CACHE_DIR" not in os.environ


def test_an_assembler_that_the_compiler_sets_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor does so once a process, for the kernels of a GPU."""
    import os

    from compiled_engine.graphs.compiler.compile_piece import compiler_folders

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    with compiler_folders(tmp_path, "piece"):
        os.environ["TRITON_PTXAS_PATH"] = "ptxas of PyTorch"
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_tracing_again_and_again_meets_no_recompile_limit() -> None:
    config = tiny_config(num_layers=1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            require_no_guards(traced(config).shape_env)
