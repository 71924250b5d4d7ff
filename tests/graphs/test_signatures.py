"""The declarations of the callables: arguments, tensors, results and ranges; and the passes that each of them has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch import fx

from compiled_engine.attention.inputs import FORWARD_ARGUMENTS, SIZES, STEP_TENSORS, AttentionInputs, StepTensor
from compiled_engine.config import AdapterConfig, EngineConfig, HeadConfig
from compiled_engine.graphs.compiler.build import fusion_passes, structure_passes, trace_whole
from compiled_engine.graphs.compiler.signature import (
    Signature,
    callables_of,
    combine_signature,
    compile_ranges,
    extra_step_tensors,
    forward_signature,
    logits_signature,
)
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.registry import registered_passes
from compiled_engine.pooling import Dense, Pooling
from compiled_engine.quantisation import online

HEAD = HeadConfig(32, 3, 50)
ADAPTERS = AdapterConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=2)
SMALL, WHOLE = [CompileRange(1, 4, small=True), CompileRange(5, 8, small=True)], CompileRange(1, 256)


def config_with(**changes: Any) -> EngineConfig:
    """changes: of the model, or of the engine by name."""
    config = tiny_config(num_layers=2)
    config = replace(config, compile=replace(config.compile, ranges=((1, 4), (5, 8))))
    of_engine = {name: changes.pop(name) for name in ("adapters", "device", "speculation") if name in changes}
    return replace(config, model=replace(config.model, **changes), **of_engine)


def pooling(*sizes: tuple[int, int]) -> Pooling:
    return Pooling("embed", ("lasttoken",), tuple(Dense("dense", *size) for size in sizes), "normalise")


# Callables


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["forward", "logits"]),
        ({"adapters": ADAPTERS}, ["forward", "logits", "adapted", "adapted_logits"]),
        ({"head": HEAD}, ["forward", "logits", "combine"]),
        ({"pooling": pooling()}, ["forward"]),
        ({"pooling": pooling((64, 8))}, ["forward", "pooler"]),
        ({"pooling": pooling((64, 8)), "adapters": ADAPTERS}, ["forward", "pooler", "adapted"]),
    ],
)
def test_a_model_has_the_callables_that_it_needs(changes: dict[str, Any], names: list[str]) -> None:
    found = callables_of(config_with(**changes))
    assert list(found) == names
    assert [name for name, signature in found.items() if signature.direct] == [
        name for name in names if name in ("logits", "adapted_logits", "combine", "pooler")
    ]
    assert [name for name, signature in found.items() if signature.adapted] == [n for n in names if "adapted" in n]
    for name in set(names) & {"logits", "adapted_logits", "combine", "pooler"}:  # of any number of rows
        assert found[name].ranges == (WHOLE,)


def test_ranges_for_small_batches_come_before_the_one_for_all() -> None:
    config = config_with()
    assert compile_ranges(config) == (*SMALL, WHOLE)
    assert forward_signature(config).ranges == (*SMALL, WHOLE)
    config = replace(config, compile=replace(config.compile, ranges=()))
    assert compile_ranges(config) == (WHOLE,)


@pytest.mark.parametrize(
    ("changes", "results", "small_returns"),
    [
        ({}, ["hidden_TD", "logits_TV"], ("logits_TV",)),
        ({"head": HEAD}, ["hidden_TD", "logits_TV"], ()),
        ({"pooling": pooling()}, ["hidden_TD"], ()),
    ],
)
def test_small_batches_end_at_logits_unless_the_model_pools_or_drafts(
    changes: dict[str, Any], results: list[str], small_returns: tuple[str, ...]
) -> None:
    signature = forward_signature(config_with(**changes))
    assert list(signature.results) == results
    assert (signature.returns, signature.small_returns) == (("hidden_TD",), small_returns)
    assert signature.returned(WHOLE) == ("hidden_TD",)
    assert signature.returned(SMALL[0]) == (small_returns or ("hidden_TD",))
    assert (signature.direct, signature.adapted) == (False, False)


def test_a_forward_takes_a_step_and_the_caches_of_its_layers() -> None:
    config = config_with()
    signature = forward_signature(config)
    assert signature.arguments == FORWARD_ARGUMENTS
    assert signature.results["hidden_TD"] == f"model({', '.join(FORWARD_ARGUMENTS)})"
    assert signature.backend == config.attention_backend
    caches = signature.tensors[len(STEP_TENSORS) :]
    assert signature.tensors[: len(STEP_TENSORS)] == STEP_TENSORS
    assert [cache.name for cache in caches] == ["kv_caches.0", "kv_caches.1"]
    for cache, shape in zip(caches, config.model.kv_shapes(7, config.cache.block_size), strict=True):
        assert cache.shape({"blocks": 7}) == tuple(shape)
        assert cache.dtype is config.model.dtype


def test_caches_of_another_format_have_its_shapes_and_dtype() -> None:
    config = config_with()
    coded = replace(config, cache=replace(config.cache, kv_dtype="fp8_e4m3"))
    assert {tensor.dtype for tensor in forward_signature(coded).tensors[len(STEP_TENSORS) :]} == {coded.cache_dtype}
    assert coded.cache_dtype is not config.cache_dtype


def test_layers_that_are_read_are_those_of_the_speculation() -> None:
    config = config_with()
    read = replace(config, speculation=replace(config.speculation, aux_layers=(0, 1)))
    assert (forward_signature(config).aux_layers, forward_signature(read).aux_layers) == ((), (0, 1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_adapters_read_their_slots(device: str) -> None:
    """On a GPU in each range; on a CPU the kernels for small batches know no adapters."""
    config = config_with(adapters=ADAPTERS, device=torch.device(device))
    forward, adapted = (callables_of(config)[name] for name in ("forward", "adapted"))
    assert adapted.ranges == (forward.ranges if device == "cuda" else (WHOLE,))
    added = [tensor.name for tensor in adapted.asked if tensor not in forward.asked]
    assert len(added) == 1
    assert [tensor.name for tensor in extra_step_tensors(config)] == added
    assert extra_step_tensors(config_with()) == ()
    assert replace(adapted, ranges=forward.ranges, asked=forward.asked, adapted=False) == forward


def test_what_is_called_beside_the_forward_takes_rows_of_its_own_width() -> None:
    """Of hidden states, of the layers that a head reads side by side, or of what was pooled, which is in float32."""
    generating = config_with(dtype=torch.bfloat16, hidden_size=48)
    pooled = callables_of(config_with(dtype=torch.bfloat16, pooling=pooling((96, 16), (16, 8))))["pooler"]
    found = {
        "logits": logits_signature(generating),
        "combine": combine_signature(generating, HEAD),
        "pooler": pooled,
    }
    assert {name: (signature.arguments, signature.returns) for name, signature in found.items()} == {
        "logits": (("hidden_RD",), ("logits_RV",)),
        "combine": (("aux_hidden_states_TE",), ("features_TD",)),
        "pooler": (("pooled_RW",), ("result_RL",)),
    }
    tensors = {name: signature.tensors for name, signature in found.items()}
    assert tensors == {
        "logits": (StepTensor("hidden_RD", ("tokens", 48), torch.bfloat16),),
        "combine": (StepTensor("aux_hidden_states_TE", ("tokens", 3 * 32), torch.bfloat16),),
        "pooler": (StepTensor("pooled_RW", ("tokens", 96), torch.float32),),
    }
    assert {name: dict(signature.results) for name, signature in found.items()} == {
        "logits": {"logits_RV": "model.logits(hidden_RD)"},
        "combine": {"features_TD": "model.combine(aux_hidden_states_TE)"},
        "pooler": {"result_RL": "model.pooler(pooled_RW)"},
    }


# A signature's sizes and arguments


def signature_of(*tensors: StepTensor, most: int = 64, **changes: Any) -> Signature:
    arguments = tuple(dict.fromkeys(tensor.name.partition(".")[0] for tensor in tensors))
    result = {"result": f"model({', '.join(arguments)})"}
    return Signature(arguments, tensors, result, ("result",), (*SMALL, CompileRange(1, most)), **changes)


def test_open_sizes_have_their_bounds_and_equal_names_are_equal_sizes() -> None:
    """A trace holds for its example, even where a step has fewer tokens."""
    x = StepTensor("x_TD", ("tokens", 8), torch.float32)
    y = StepTensor("y_RT", ("requests", "tokens"), torch.int32)
    for most, bound in ((64, 64), (4, 12), (12, 12), (13, 13)):
        signature = signature_of(x, y, most=most)
        assert signature.most_tokens == bound
        assert signature.open_sizes() == {
            ("x_TD", 0): ("tokens", 1, bound),
            ("y_RT", 0): ("requests", *SIZES["requests"]),
            ("y_RT", 1): ("tokens", 1, bound),
        }
    examples = signature_of(x, y).examples(torch.device("cpu"))
    assert {name: (tuple(example.shape), example.dtype) for name, example in examples.items()} == {
        "x_TD": ((12, 8), torch.float32),
        "y_RT": ((3, 12), torch.int32),
    }


def test_tensors_are_passed_as_arguments_in_their_order() -> None:
    """A name is a path: into a step's inputs of attention, or into a list."""
    config = config_with()
    signature = forward_signature(config)
    tensors = signature.examples(torch.device("cpu"))
    ids, positions, inputs, caches = signature.passed(tensors)
    assert ids is tensors["input_ids_T"]
    assert positions is tensors["positions_T"]
    assert isinstance(inputs, AttentionInputs)
    assert inputs.backend == config.attention_backend
    for name in ("slot_mapping_T", "seq_lens_R", "block_table_RB", "work_W", "query_start_loc_R1", "host_3"):
        assert getattr(inputs, name) is tensors[f"attention_inputs.{name}"]
    assert [cache is tensors[f"kv_caches.{number}"] for number, cache in enumerate(caches)] == [True, True]


# Passes


def names_of_structure(
    config: EngineConfig, aux_layers: tuple[int, ...] = (), *, with_experts: bool = False
) -> list[str]:
    graph = fx.Graph()
    if with_experts:
        node = graph.placeholder("weight")
        node.meta["val"] = torch.empty(4, 64, 32)
        node.meta["source"] = Parameter("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), "float32")
    return [each.name for each in structure_passes(config, graph, WHOLE, None, aux_layers)]


def test_passes_that_give_a_graph_its_meaning_are_run_where_there_is_something_to_say() -> None:
    config = config_with()
    shared = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    quantised = config_with(quantisation=online("fp8", ()))
    experts = replace(config.model.experts, count=4, per_token=2, intermediate_size=32)
    mixture = config_with(quantisation=online("fp8", ()), experts=experts)
    coded = replace(config, cache=replace(config.cache, kv_dtype="fp8_e4m3"))
    all_of_them = replace(mixture, parallel=shared.parallel, cache=coded.cache)
    assert names_of_structure(config) == []
    assert names_of_structure(config_with(experts=experts), with_experts=True) == []
    assert names_of_structure(replace(config, cache=replace(config.cache, kv_dtype="int8"))) == []
    assert names_of_structure(shared) == ["tensor_parallel"]
    assert names_of_structure(quantised) == ["quantise"]
    assert names_of_structure(mixture, with_experts=True) == ["quantise", "quantise_experts"]
    assert names_of_structure(coded) == ["kv_scales"]
    assert names_of_structure(config, (1,)) == ["aux_hidden_states"]
    in_order = ["tensor_parallel", "quantise", "quantise_experts", "kv_scales", "aux_hidden_states"]
    assert names_of_structure(all_of_them, (1,), with_experts=True) == in_order


def test_passes_that_fuse_are_the_registered_ones_but_for_what_is_called_op_by_op() -> None:
    config = config_with()
    passes, enabled = fusion_passes(config, forward_signature(config))
    assert [each.name for each in passes] == [each.name for each in registered_passes()]
    assert enabled == config.compile.passes
    assert fusion_passes(config, logits_signature(config)) == ((), config.compile.passes)


def test_adapters_are_added_behind_the_merged_linears_and_no_activation_is_fused_over_them() -> None:
    config = config_with(adapters=ADAPTERS)
    passes, enabled = fusion_passes(config, callables_of(config)["adapted"])
    names = [each.name for each in passes]
    place = names.index("merge_linears")
    assert names[place + 1] == "adapters"
    assert [name for name in names if name != "adapters"] == [each.name for each in registered_passes()]
    assert "gated_linear" in config.compile.passes
    assert enabled == (*(name for name in config.compile.passes if name != "gated_linear"), "adapters")
    plain, _ = fusion_passes(config, callables_of(config)["forward"])
    assert [each.name for each in plain] == [each.name for each in registered_passes()]


@pytest.mark.parametrize(("ranks", "verify"), [(1, False), (1, True), (2, False)])
def test_the_undivided_model_is_traced_only_where_a_share_is_compared_with_it(ranks: int, verify: bool) -> None:
    def no_model(model: Any) -> Any:
        raise AssertionError

    config = config_with()
    config = replace(
        config,
        parallel=replace(config.parallel, tensor_parallel_size=ranks),
        compile=replace(config.compile, verify=verify),
    )
    assert trace_whole(config, no_model) is None
    compared = replace(
        config,
        parallel=replace(config.parallel, tensor_parallel_size=2),
        compile=replace(config.compile, verify=True),
    )
    with pytest.raises(AssertionError):
        trace_whole(compared, no_model)
