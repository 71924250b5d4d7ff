"""The pass rope_kv_write: on the models' traced graphs, on graphs built by hand, and on those that only look alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import attend, attention
from compiled_engine.config import RopeConfig
from compiled_engine.graphs.compiler.piece import piece_from_json
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.textbook.layers import rotate
from compiled_engine.passes.framework.graph_inputs import Source, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.rope.expand_references import expand_references
from compiled_engine.passes.rope.rope_attend import RopeAttend
from compiled_engine.passes.rope.rope_kv_write import RopeKVWrite

ATTENTION = torch.ops.compiled_engine.attention.default
ATTEND = torch.ops.compiled_engine.attend.default
FUSED = torch.ops.compiled_engine.rope_kv_write.default
CPU = torch.device("cpu")
YARN = RopeConfig(10000.0, "yarn", factor=4.0, original_max_position_embeddings=64)


def count(module: fx.GraphModule, target: Callable[..., object]) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@cache
def trace_of(architecture: str, dtype: torch.dtype, num_layers: int, **changes: Any) -> TracedGraph:
    config = tiny_config(architecture, num_layers, num_heads=6, rms_norm_eps=3e-4, dtype=dtype, **changes)
    return trace(without_storage(build_model(config.model), CPU), forward_signature(config))


def traced_model(architecture: str, dtype: torch.dtype, num_layers: int = 3, **changes: Any) -> fx.GraphModule:
    """The graph of a small model that returns hidden states."""
    return trace_of(architecture, dtype, num_layers, **changes).for_range(CompileRange(1, 256))


def run(module: fx.GraphModule, num_tokens: int = 7) -> list[torch.Tensor]:
    """What the graph returns for a random batch, and then every cache."""
    module.recompile()
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = RandomInputs(module.graph, num_tokens, CPU, 1.0)
    values = [inputs.of(node) for node in placeholders]
    outputs = module(*values)
    return [*outputs, *(value for value in values if isinstance(value, torch.Tensor) and value.dim() == 5)]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


@pytest.mark.product(one_in=24)
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_layer_of_every_family(architecture: str, dtype: torch.dtype, merged: bool) -> None:
    module = traced_model(architecture, dtype)
    if merged:
        MergeLinears().run(module.graph)
    expected = run(module)
    result = RopeKVWrite().run(module.graph)
    module.graph.lint()
    assert (result.matches, result.near_misses) == (3, ())
    assert [replacement.after.target for replacement in result.replacements] == [ATTEND] * 3
    assert (count(module, ATTENTION), count(module, FUSED), count(module, torch.ops.aten.neg.default)) == (0, 3, 0)
    assert_same(run(module), expected)


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("rope", [RopeConfig(10000.0), YARN])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_size(head_dim: int, rope: RopeConfig) -> None:
    module = traced_model("Qwen3ForCausalLM", torch.bfloat16, 1, head_dim=head_dim, rope=rope)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    assert_same(run(module), expected)


@pytest.mark.parametrize(
    ("passes", "between"),
    [((RopeKVWrite(),), ["rope_kv_write", "attend"]), ((RopeKVWrite(), RopeAttend()), ["rope_attend"])],
)
def test_the_op_stands_between_the_pieces(passes: tuple[GraphPass, ...], between: list[str]) -> None:
    """Three unique pieces, with nothing between the op and attend; the stitched forward gives the same values, and so
    it does where attentions are called by somebody else."""
    module = traced_model("Qwen3ForCausalLM", torch.float32, num_layers=4)
    expected = run(module)
    assert [graph_pass.run(module.graph).matches for graph_pass in passes] == [4] * len(passes)
    plan, pieces = make_plan(module.graph, split(module.graph))
    assert len(pieces) == 3
    ops = [step.op for step in plan.steps]
    assert ops == [None, *(f"compiled_engine::{op}" for op in between)] * 4 + [None]
    inputs = RandomInputs(module.graph, 7, CPU, 1.0)
    values = {source_of(node): inputs.of(node) for node in module.graph.find_nodes(op="placeholder")}
    parameters = {source.name: value for source, value in values.items() if source.kind == "parameter"}
    arguments = {source.name: value for source, value in values.items() if source.kind == "argument"}
    prefix = "attention_inputs."
    fields = {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}
    caches = [arguments[f"kv_caches.{i}"] for i in range(4)]
    batch = AttentionInputs(**fields, backend="torch")
    called = []

    def call(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        called.append(function)
        function(*arguments)

    for on_attention in (None, call):
        compiled = {key: piece_from_json(text)[0] for key, text in pieces.items()}
        forward = stitch(plan, compiled, parameters, on_attention)
        hidden = forward(arguments["input_ids_T"], arguments["positions_T"], batch, caches)
        # A backend whose one kernel does all three may round otherwise.
        torch.testing.assert_close([hidden, *caches], expected, rtol=1e-5, atol=1e-5)
    assert called == [attend] * 4


@pytest.mark.product(one_in=64)
@pytest.mark.parametrize("passes", [(RopeKVWrite(),), (RopeKVWrite(), RopeAttend())])
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_written_out_attention_writes_again(architecture: str, passes: tuple[GraphPass, ...]) -> None:
    module = traced_model(architecture, torch.bfloat16)
    expected = run(module)
    for graph_pass in passes:
        graph_pass.run(module.graph)
    fused = len(module.graph.nodes)
    expanded = expand_references(module)
    assert (count(expanded, ATTENTION), count(expanded, ATTEND), count(expanded, FUSED)) == (3, 0, 0)
    assert_same(run(expanded), expected)
    assert len(module.graph.nodes) == fused
    assert_same(run(module), expected)


Tensors = dict[str, torch.Tensor]
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def norm_with(eps: float, dim: int = -1) -> Norm:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps)).to(x.dtype)

    return norm


textbook_norm = norm_with(1e-6)


def attention_graph(
    dtype: torch.dtype = torch.bfloat16,
    norm_q: Norm = textbook_norm,
    norm_k: Norm = textbook_norm,
    rotate_q: Rotation = rotate,
    rotate_k: Rotation = rotate,
    rotate_v: Rotation = lambda x, cos, sin: x,
    also: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]] = lambda q, k: (),
    **shapes: tuple[int, ...],
) -> fx.GraphModule:
    """One layer's attention on 7 tokens, 4 query heads, 2 K/V heads and head size 16; `also` reads the rotated q, k."""
    parameters = {"q": (7, 4, 16), "k": (7, 2, 16), "v": (7, 2, 16), "cos": (7, 1, 16), "sin": (7, 1, 16)}
    parameters |= {"q_weight": (16,), "k_weight": (16,)} | shapes
    batch = {
        "query_start_loc_R1": (4,),
        "seq_lens_R": (3,),
        "block_table_RB": (3, 2),
        "slot_mapping_T": (7,),
        "host_3": (3,),
    }

    def function(
        p: dict[str, torch.Tensor], b: dict[str, torch.Tensor], cache: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q = rotate_q(norm_q(p["q"], p["q_weight"]), p["cos"], p["sin"])
        k = rotate_k(norm_k(p["k"], p["k_weight"]), p["cos"], p["sin"])
        v = rotate_v(p["v"], p["cos"], p["sin"])
        return attention(q, k, v, cache, AttentionInputs(**b, backend="torch"), 0.25), *also(q, k)

    with FakeTensorMode():
        fakes_p = {name: torch.empty(shape, dtype=dtype) for name, shape in parameters.items()}
        fakes_b = {name: torch.empty(shape, dtype=torch.int32) for name, shape in batch.items()}
        module = make_fx(function)(fakes_p, fakes_b, torch.empty((9, 2, 16, 2, 16), dtype=dtype))
    names = [*parameters, *(f"attention_inputs.{name}" for name in batch), "kv_caches.0"]
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        is_parameter = name in parameters
        node.meta["source"] = Parameter.of(name, node.meta["val"]) if is_parameter else Source("argument", name)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule({}, graph)


def by_slices(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return sin * torch.cat((-x[..., half:], x[..., :half]), dim=-1) + cos * x


def unnormed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("rotation", [rotate, by_slices])
@pytest.mark.parametrize("norm", [textbook_norm, norm_with(0.37), unnormed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_graph_built_by_hand(dtype: torch.dtype, norm: Norm, rotation: Rotation) -> None:
    module = attention_graph(dtype, norm, norm, rotation, rotation)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=FUSED)
    assert [node.op for node in fused.all_input_nodes] == ["placeholder"] * len(fused.all_input_nodes)
    assert_same(run(module), expected)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def turned(change: str) -> Rotation:
    """The textbook's rotation but for one thing."""

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        dim = -2 if change == "heads" else -1
        if change == "other parts":
            first, second = x[..., :8], x[..., 4:12]
        else:
            first, second = (x + 1 if change == "another x" else x).chunk(2, dim)
        return x * cos + torch.cat((second, -first) if change == "back" else (-second, first), dim) * sin

    return rotation


def partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(x[..., :8], cos, sin), x[..., 8:]), dim=-1)


def in_fp32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(x.float(), cos, sin).to(x.dtype)


def turned_before_the_cast(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As in ERNIE 4.5."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def in_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By angles of pairs, as GPT-OSS."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def partial_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In fp32, a part of each head, neighbours together."""
    return torch.cat((interleaved(x[..., :8].float(), cos, sin).to(x.dtype), x[..., 8:]), dim=-1)


@pytest.mark.parametrize(
    ("rotation", "angles", "form"),
    [
        (interleaved, 16, (0, True, False, False)),
        (partial, 8, (8, False, False, False)),
        (in_fp32, 16, (0, False, True, False)),
        (turned_before_the_cast, 16, (0, True, True, False)),
        (in_halves, 8, (0, False, False, False)),
        (partial_pairs, 8, (8, True, True, False)),
    ],
)
@pytest.mark.parametrize("norm", [textbook_norm, unnormed])
def test_other_forms_of_rotation(norm: Norm, rotation: Rotation, angles: int, form: tuple[int | bool, ...]) -> None:
    shapes = {"cos": (7, 1, angles), "sin": (7, 1, angles)}
    module = attention_graph(torch.bfloat16, norm, norm, rotation, rotation, **shapes)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=FUSED)
    assert fused.args[-4:] == form
    assert_same(run(module), expected)


def test_a_norm_behind_the_rotation() -> None:
    """As Hunyuan has it."""

    def both(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return x, weight

    def rotation(pair: Any, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return textbook_norm(rotate(pair[0], cos, sin), pair[1])

    module = attention_graph(torch.bfloat16, both, both, rotation, rotation)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=FUSED)
    assert fused.args[-4:] == (0, False, False, True)
    assert_same(run(module), expected)


def four_alike() -> Rotation:
    """Neighbours together, and each angle serves two pairs of them."""

    @cache
    def repeated(angles: torch.Tensor) -> torch.Tensor:
        return angles.repeat_interleave(4, dim=-1).unsqueeze(1)

    return lambda x, cos, sin: interleaved(x, repeated(cos), repeated(sin))


def test_an_angle_that_serves_several_pairs_is_none_of_a_pair() -> None:
    rotation = four_alike()
    module = attention_graph(torch.bfloat16, unnormed, unnormed, rotation, rotation, cos=(7, 4), sin=(7, 4))
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    assert_same(run(module), expected)


@pytest.mark.parametrize("known", [False, True])
def test_angles_that_are_repeated_for_neighbours_are_read_once(known: bool) -> None:
    """The op takes those of pairs, with a dimension for heads, which the graph may have already."""

    @cache
    def repeated(angles: torch.Tensor) -> torch.Tensor:
        return angles.repeat_interleave(2, dim=-1).unsqueeze(1)

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if known:  # and in another place, which is not it
            x = x + cos.unsqueeze(2).sum() + cos.unsqueeze(1).sum()
        return interleaved(x, repeated(cos), repeated(sin))

    module = attention_graph(torch.float32, unnormed, unnormed, rotation, rotation, cos=(7, 8), sin=(7, 8))
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=FUSED)
    angles = [node for node in fused.all_input_nodes if node.meta["val"].shape == (7, 1, 8)]
    assert [node.target for node in angles] == [torch.ops.aten.unsqueeze.default] * 2
    assert [node.args[1] for node in angles] == [1, 1]
    assert_same(run(module), expected)


def test_neighbours_may_be_named_up_to_the_end() -> None:
    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.stack((-x[..., 1 : x.shape[-1] : 2], x[..., 0 : x.shape[-1] : 2]), dim=-1)
        return x * cos + turned.flatten(-2) * sin

    module = attention_graph(torch.float32, unnormed, unnormed, rotation, rotation)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    assert_same(run(module), expected)


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        (lambda x, cos, sin: rotate(x, cos.cos(), cos.sin()), 1),
        (lambda x, cos, sin: rotate(x.transpose(0, 1).transpose(0, 1), cos.cos() * 2, sin), 1),
        (lambda x, cos, sin: (x * cos.cos()) @ torch.ones(16, 16, dtype=x.dtype), 0),
        (rotate, 0),
        (lambda x, cos, sin: x, 0),
    ],
    ids=["rotated", "rotated and scaled", "multiplied afterwards", "by inputs", "not rotated"],
)
def test_a_query_made_from_cosines_is_expected_to_match(rotation: Rotation, expected: int) -> None:
    graph = attention_graph(torch.float32, unnormed, unnormed, rotation, lambda x, cos, sin: x).graph
    assert [each.contract(graph, CompileRange(1, 8)) for each in (RopeKVWrite(), RopeAttend())] == [expected] * 2


def scaled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By a number of each token, as Ministral 3."""
    return rotate(x, cos, sin) * cos.sum(-1, keepdim=True)


def test_a_scale_behind_the_rotation_comes_before_it() -> None:
    module = attention_graph(torch.float32, unnormed, unnormed, scaled)
    expected = run(module)
    assert RopeKVWrite().run(module.graph).matches == 1
    torch.testing.assert_close(run(module), expected)
