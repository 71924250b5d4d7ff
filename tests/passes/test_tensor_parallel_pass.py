"""The pass tensor_parallel: its contract, its verifier, and the slices of parameters that belong to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import family, write_checkpoint
from family_comparison import verified_passes
from pass_cases import BIASED, CPU, FAMILIES, LLAMA, RANGES, Family
from tiny_models import tiny_config
from torch import fx

from compiled_engine.config import EngineConfig, ParallelConfig
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.compiler.build import apply_passes, trace_rank, trace_whole
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import TracedGraph, without_storage
from compiled_engine.models.checkpoint.build_model import shards_of
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.connect import RankLayout
from compiled_engine.parallel.group import FakeGroup, current_group, in_group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.matching import aten, emit, is_call
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel, all_reduce
from compiled_engine.resolve.parallel import DIVISIBLE


def config_of(family: Family, num_ranks: int, num_layers: int = 2, **changes: object) -> EngineConfig:
    shape = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "vocab_size": 104,
        "rope": family.rope,
        "tie_word_embeddings": family.tied,
        "qkv_bias": family.qkv_bias,
        "attention_out_bias": family.other_biases,
        "mlp_bias": family.other_biases,
        "sliding_windows": (family.sliding_window,) * num_layers,
    }
    config = tiny_config(family.architecture, num_layers, **shape | changes)
    compile_ = replace(config.compile, strict=True, verify=True)
    return replace(config, parallel=ParallelConfig(num_ranks, "multiprocess"), compile=compile_)


_traced: dict[str, TracedGraph] = {}
_whole: dict[str, TracedGraph | None] = {}


def traced(config: EngineConfig) -> TracedGraph:
    """Equal configurations are traced once."""
    if (key := repr(config)) not in _traced:
        model = without_storage(build_model(local_model(config)), config.device)
        _traced[key] = trace_rank(config, model, forward_signature(config))
    return _traced[key]


def whole_of(config: EngineConfig) -> TracedGraph | None:
    """What a rank's graph is compared with, once for each configuration."""
    if (key := repr(config)) not in _whole:
        _whole[key] = trace_whole(config, build_model)
    return _whole[key]


CASES = [*((family, 2) for family in FAMILIES if family.architecture in DIVISIBLE), (BIASED, 4)]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("family", "num_ranks"), CASES, ids=str)
def test_the_ranks_together_compute_the_whole(family: Family, num_ranks: int) -> None:
    """Every pass keeps its contract and its verifier on a rank's graph."""
    config = config_of(family, num_ranks)
    graphs, whole = traced(config), whole_of(config)
    for compile_range in RANGES:
        _, reports = apply_passes(config, graphs, compile_range, whole)
        first = reports[0]
        assert first.name == "tensor_parallel"
        assert first.matches == first.contract == first.verified == 2 * 2 + 1


def test_graphs_of_transformers_code_are_divided_too(tmp_path: Path) -> None:
    divisible = family("phi3").to_divide()
    write_checkpoint(tmp_path, replace(divisible, changes={**divisible.changes, "num_hidden_layers": 1}))
    reports = verified_passes(tmp_path, {"device": "cpu", "tensor_parallel_size": 2})
    sums = [report for report in reports if report.name == "tensor_parallel"]
    assert len(sums) == 2
    for report in sums:
        assert report.matches == report.contract == report.verified == 2 * 1 + 1


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    config = config_of(LLAMA, 2, vocab_size=103)
    _, reports = apply_passes(config, traced(config), RANGES[0], whole_of(config))
    assert reports[0].matches == reports[0].contract == 2 * 2
    assert shards_of(config)["lm_head.weight"].dim is None


def test_layers_stay_alike() -> None:
    config = config_of(BIASED, 2, num_layers=4)
    config = replace(config, compile=replace(config.compile, verify=False))
    module, _ = apply_passes(config, traced(config), RANGES[1])
    _, unique = make_plan(module.graph, split(module.graph))
    assert len(unique) == 3


def test_a_missing_sum_is_found() -> None:
    config = config_of(LLAMA, 2)
    whole = replace(config, parallel=ParallelConfig(1, "in_process"))
    compile_range = CompileRange(1, 256)
    graph_pass = TensorParallel(shards_of(config), 2, traced(whole).for_range(compile_range).graph)
    graph = traced(config).for_range(compile_range).graph
    result = graph_pass.run(graph)
    assert graph_pass.verify(graph, result, compile_range, CPU) == result.matches
    lost: fx.Node = result.replacements[1].after
    lost.replace_all_uses_with(lost.all_input_nodes[0])
    graph.erase_node(lost)
    kept = tuple(r for r in result.replacements if r.after is not lost)
    with pytest.raises(VerificationError, match="tensor_parallel"):
        graph_pass.verify(graph, replace(result, replacements=kept), compile_range, CPU)


def test_a_sum_that_finds_no_place_is_an_error_in_any_mode() -> None:
    config = config_of(LLAMA, 2)
    compile_range = CompileRange(1, 256)
    graph = traced(config).for_range(compile_range).graph
    product = [node for node in graph.nodes if is_call(node, aten.mm.default)][3]  # the output projection
    with graph.inserting_before(product):
        weight = emit(graph, aten.clone.default, product.args[1])
    product.update_arg(1, weight)
    with pytest.raises(ContractError, match=r"tensor_parallel matched 4 times .* its contract is 5"):
        run_passes(graph, [TensorParallel(shards_of(config), 2)], {"tensor_parallel"}, compile_range, CPU)


def test_the_key_has_the_number_of_ranks_and_not_who_runs_them() -> None:
    one, two = config_of(LLAMA, 1), config_of(LLAMA, 2)
    in_process = replace(one, parallel=ParallelConfig(1, "in_process"))
    assert cache_factors(one) == cache_factors(in_process) != cache_factors(two)
    assert "tensor_parallel" in cache_factors(two)["passes"]


def test_slices_of_parameters() -> None:
    """KV heads are shared by neighbours where there are fewer of them than ranks; a bias that is added counts once."""
    shards = shards_of(config_of(BIASED, 4))
    layer = "model.layers.0.self_attn"
    assert shards[f"{layer}.q_proj.weight"] == Shard((128, 64), 0, (Section(128, 4),))
    assert shards[f"{layer}.k_proj.weight"] == Shard((32, 64), 0, (Section(32, 2),))
    assert shards[f"{layer}.o_proj.weight"] == Shard((64, 128), 1, (Section(128, 4),))
    assert shards[f"{layer}.o_proj.bias"] == Shard((64,), first_only=True)
    assert shards["model.norm.weight"] == Shard((64,))
    rows = torch.arange(32 * 64).view(32, 64)
    parts = [shards[f"{layer}.k_proj.weight"].of(rows, rank, 4) for rank in range(4)]
    assert torch.equal(parts[0], rows[:16])
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[3], rows[16:])
    bias = shards[f"{layer}.o_proj.bias"]
    assert [int(bias.of(torch.ones(64), rank, 4).sum()) for rank in range(4)] == [64, 0, 0, 0]


def test_a_collective_needs_a_group() -> None:
    with pytest.raises(RuntimeError, match="outside of a group"):
        current_group()
    with in_group(FakeGroup(2)):
        assert torch.equal(all_reduce(torch.ones(2, 3)), torch.ones(2, 3))


def test_ranks_that_share_a_layer_are_neighbours() -> None:
    layout = RankLayout(tensor=2, pipeline=3, data=2)
    assert [layout.place(rank).share for rank in range(4)] == [0, 1, 0, 1]
    assert (layout.place(5).data, layout.place(5).stage) == (0, 2)
    assert (layout.place(6).data, layout.place(6).stage) == (1, 0)
    assert layout.name(6) == "rank 6 of 12 (replica 1 of 2, stage 0 of 3)"
    with pytest.raises(IndexError, match="allowed: 0 to 11"):
        layout.place(12)
