"""The random inputs that rewrites are compared on: a valid batch, caches, and parameters of ordinary size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_cases import CPU, graph_of, random_tensors
from torch import fx

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.attention.kv_codes import encode, planes
from compiled_engine.passes.framework.graph_inputs import Source, add_parameter
from compiled_engine.passes.framework.parameter import (
    CODES,
    INPUT_SCALE,
    KEPT,
    KV_SCALES,
    SCALES,
    Parameter,
    made,
)
from compiled_engine.passes.framework.random_inputs import MOST_CONTEXT, RandomInputs

BLOCK_SIZE = 4
CACHE = (9, 2, BLOCK_SIZE, 2, 8)  # blocks, keys and values, slots, heads, size of a head


def graph(parameters: tuple[Parameter, ...] = (), caches: int = 1, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """Reads token ids, caches and parameters."""
    arguments = {"input_ids_T": torch.arange(4), "hidden_TD": torch.empty(4, 6, dtype=torch.bfloat16)}
    arguments |= {f"kv_caches.{layer}": torch.empty(CACHE, dtype=dtype) for layer in range(caches)}
    found = graph_of(lambda **given: (given["hidden_TD"].float(),), arguments, random_tensors(weight=(6,))).graph
    for parameter in parameters:
        add_parameter(found, parameter)
    return found


def value_of(graph: fx.Graph, inputs: RandomInputs, name: str) -> Any:
    return inputs.of(next(n for n in graph.find_nodes(op="placeholder") if n.meta["source"].name == name))


def step(inputs: RandomInputs) -> dict[str, torch.Tensor]:
    names = ("input_ids_T", "positions_T", "attention_inputs.slot_mapping_T", "attention_inputs.seq_lens_R")
    names += ("attention_inputs.block_table_RB", "attention_inputs.query_start_loc_R1", "kv_caches.0")
    probe = fx.Graph()
    for name in names:
        probe.placeholder(name.replace(".", "_")).meta["source"] = Source("argument", name)
    nodes = probe.find_nodes(op="placeholder")
    return {name.rpartition("attention_inputs.")[2]: inputs.of(node) for name, node in zip(names, nodes, strict=True)}


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 60))
def test_a_batch_is_decodes_and_one_prompt_in_blocks_of_their_own(num_tokens: int) -> None:
    found = step(RandomInputs(graph(), num_tokens, CPU, 1.0))
    starts, seq_lens = found["query_start_loc_R1"].tolist(), found["seq_lens_R"].tolist()
    num_requests = min(num_tokens, 3)
    assert [stop - start for start, stop in pairwise(starts)] == [
        *[1] * (num_requests - 1),
        num_tokens - (num_requests - 1),
    ]
    table = found["block_table_RB"]
    assert table.numel() == len(set(table.flatten().tolist()))
    assert 0 not in table  # the block of no request
    assert table.shape[0] == num_requests
    assert len(found["input_ids_T"]) == len(found["positions_T"]) == num_tokens
    assert set(found["input_ids_T"].tolist()) <= set(range(8))
    assert found["kv_caches.0"].shape[1:] == CACHE[1:]
    assert found["kv_caches.0"].shape[0] > int(table.max())
    for request, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], seq_lens, strict=True)):
        positions = found["positions_T"][start:stop].tolist()
        assert positions == list(range(length - (stop - start), length))
        assert 1 <= positions[0] <= MOST_CONTEXT
        for token, position in zip(range(start, stop), positions, strict=True):
            slot = int(found["slot_mapping_T"][token])
            if token == 0 and num_tokens > 1:
                assert slot == -1
                continue
            assert slot == int(table[request, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def test_the_same_inputs_have_the_same_values_and_others_do_not() -> None:
    given = graph((Parameter("w.a", (3, 5), "float32"), Parameter("w.b", (3, 5), "float32")), caches=2)
    one, again, other = (RandomInputs(given, tokens, CPU, 1.0) for tokens in (5, 5, 6))
    for name in ("kv_caches.0", "kv_caches.1", "hidden_TD", "w.a", "w.b"):
        value = value_of(given, one, name)
        assert value is value_of(given, one, name)
        assert torch.equal(value, value_of(given, again, name))
        assert value.shape != (found := value_of(given, other, name)).shape or not torch.equal(value, found)
    assert not torch.equal(value_of(given, one, "w.a"), value_of(given, one, "w.b"))
    caches = [value_of(given, one, f"kv_caches.{layer}") for layer in range(2)]
    assert not torch.equal(*caches)
    hidden = value_of(given, one, "hidden_TD")
    assert (hidden.shape, hidden.dtype) == ((5, 6), torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_parameters_have_the_size_that_models_have(scale: float) -> None:
    K = 400
    of = {
        "embed_tokens.weight": (Parameter("embed_tokens.weight", (50, K), "float32"), 0.0, scale),
        "layer.weight": (Parameter("layer.weight", (50, K), "float32"), 0.0, scale / K**0.5),
        "layer.bias": (Parameter("layer.bias", (5000,), "float32"), 0.0, scale),
        "norm.weight": (Parameter("norm.weight", (5000,), "float32"), 1.0, 0.2),
    }
    given = graph(tuple(parameter for parameter, *_ in of.values()))
    inputs = RandomInputs(given, 4, CPU, scale)
    for name, (parameter, mean, deviation) in of.items():
        value = value_of(given, inputs, name)
        assert value.shape == parameter.shape
        assert float(value.mean()) == pytest.approx(mean, abs=0.05 * deviation)
        assert float(value.std()) == pytest.approx(deviation, rel=0.05)
    like = Parameter("layer.codes", (50, K), "float8_e4m3fn", CODES)
    scales, static = (
        Parameter("layer.scales", (5000, 1), "float32", SCALES),
        Parameter("i", (3,), "float32", INPUT_SCALE),
    )
    of_cache = Parameter("kv", (2, 2500), "float32", KV_SCALES)
    codes, scale_values, inputs_scale, of_keys = map(inputs.parameter, (like, scales, static, of_cache))
    assert codes.dtype == torch.float8_e4m3fn
    assert float(codes.float().std()) == pytest.approx(100, rel=0.1)
    assert (scale_values > 0).all()
    assert float(scale_values.log().mean()) == pytest.approx(float(torch.tensor(scale / 1e3).log()), abs=0.1)
    assert float(scale_values.log().std()) == pytest.approx(1, rel=0.1)
    assert inputs_scale.tolist() == pytest.approx([0.02] * 3)
    assert float(of_keys.log().mean()) == pytest.approx(0, abs=0.05)
    assert float(of_keys.log().std()) == pytest.approx(0.3, rel=0.1)


def test_a_derived_parameter_is_made_of_its_members_value() -> None:
    weight = Parameter("w", (3, 5), "float32")
    given = graph((weight, made(weight, "add", 1.0, torch.empty(3, 5))))
    inputs = RandomInputs(given, 4, CPU, 1.0)
    assert torch.equal(value_of(given, inputs, "w.add(1.0)"), value_of(given, inputs, "w") + 1)


def test_sizes_are_those_of_the_values() -> None:
    given = graph()
    inputs = RandomInputs(given, 5, CPU, 1.0)
    node = given.find_nodes(op="placeholder")[1]
    for dim, size in enumerate((5, 6)):
        node.meta["source"] = Source("size", "hidden_TD", dim)
        assert inputs.of(node) == size


def test_a_step_tensor_of_a_pass_is_padding() -> None:
    given = graph()
    node = given.find_nodes(op="placeholder")[1]
    for dims, shape in ((("tokens", 2), (5, 2)), (("requests",), (3,))):
        node.meta["source"] = Source("argument", "slots")
        node.meta["step_tensor"] = StepTensor("slots", dims, torch.int32, padding=-7)
        value = RandomInputs(given, 5, CPU, 1.0).of(node)
        assert (value.shape, value.dtype, set(value.flatten().tolist())) == (shape, torch.int32, {-7})


@pytest.mark.parametrize(("num_rows", "expected"), [(2, [0, 1, -1]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_requests_have_the_rows_that_kept_states_have(num_rows: int, expected: list[int]) -> None:
    states = Parameter("states", (num_rows, 4), "float32", KEPT), Parameter("others", (9, 4), "float32", KEPT)
    given = graph((*states, Parameter("weight.2", (1, 4), "float32")))
    node = given.find_nodes(op="placeholder")[0]
    node.meta["source"] = replace(node.meta["source"], name="rows_R")
    rows = RandomInputs(given, 5, CPU, 1.0).of(node)
    assert (rows.tolist(), rows.dtype) == (expected, torch.int32)


def test_a_coded_cache_has_codes_of_ordinary_values() -> None:
    """They are what writing kernels would have left."""
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        given = graph(dtype=torch.float32)
        node = next(n for n in given.find_nodes(op="placeholder") if n.meta["source"].name == "kv_caches.0")
        shape = (*CACHE[:-1], CACHE[-1] + (2 if dtype == torch.uint8 else 0))
        with node.meta["val"].fake_mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        cache = RandomInputs(given, 5, CPU, 1.0).of(node)
        assert cache.dtype == dtype
        codes, *scales = planes(cache)
        assert len(set(codes.flatten().tolist())) > 50
        assert all((each > 0).all() for each in scales)
        if dtype == torch.float8_e4m3fn:
            values = codes.view(dtype).float()
            assert float(values.std()) == pytest.approx(1, rel=0.2)
            assert torch.equal(encode(values.flatten(0, 1), dtype, None)[0], codes.flatten(0, 1))
