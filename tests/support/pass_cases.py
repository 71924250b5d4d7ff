"""What the tests of passes share: graphs of small models, graphs built by hand, and their execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from families import family as bench_family
from tiny_models import tiny_config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.config import ModelConfig, RopeConfig
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.foreign_config import foreign_model
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.passes.framework.graph_inputs import Source, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.parameter import Parameter, compute
from compiled_engine.passes.layout.lowering import lower
from compiled_engine.passes.registry import registered_passes

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
SMALL, DYNAMIC = CompileRange(1, 8, True), CompileRange(1, 256)
RANGES = (SMALL, DYNAMIC)
DTYPES = (torch.float32, torch.bfloat16)
PLAIN_ROPE = RopeConfig(10000.0)
YARN = RopeConfig(10000.0, "yarn", factor=4.0, original_max_position_embeddings=64)


@dataclass(frozen=True)
class Family:
    """An architecture, with or without biases, so small that its graph runs in milliseconds."""

    architecture: str
    qkv_bias: bool = False
    other_biases: bool = False
    sliding_window: int | None = None
    tied: bool = True
    rope: RopeConfig = PLAIN_ROPE
    last_window: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    foreign: str = ""  # a family of bench.families: the code is that of transformers

    def __str__(self) -> str:
        return (
            self.architecture.removesuffix("ForCausalLM")
            + "+biases" * self.other_biases
            + "+yarn" * (self.rope is YARN)
        )


QWEN3 = Family("Qwen3ForCausalLM")
LLAMA = Family("LlamaForCausalLM", tied=False)
QWEN2 = Family("Qwen2ForCausalLM", qkv_bias=True)
MISTRAL = Family("MistralForCausalLM", sliding_window=8, last_window=8, tied=False)
BIASED = Family("LlamaForCausalLM", qkv_bias=True, other_biases=True)
QWEN3_YARN = replace(QWEN3, rope=YARN)
GEMMA3 = Family("Gemma3ForCausalLM", sliding_window=8, changes=(("local_rope_theta", 1e5), ("attention_scale", 0.2)))
GEMMA2 = Family("Gemma2ForCausalLM", changes=(("attention_soft_cap", 5.0), ("logit_soft_cap", 9.0)))
PHI3 = Family("Phi3ForCausalLM", tied=False)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", tied=False)
GPT_OSS = Family("GptOssForCausalLM", foreign="gpt_oss")
STARCODER2 = Family("Starcoder2ForCausalLM", foreign="starcoder2")
GLM4 = Family("Glm4ForCausalLM", foreign="glm4")
COHERE = Family("CohereForCausalLM", foreign="cohere")
GLM4_MOE = Family("Glm4MoeForCausalLM", foreign="glm4_moe")
HUNYUAN = Family("HunYuanDenseV1ForCausalLM", foreign="hunyuan_v1_dense")
PERSIMMON = Family("PersimmonForCausalLM", foreign="persimmon")
MINISTRAL3 = Family("Ministral3ForCausalLM", foreign="ministral3")
GEMMA4 = Family(
    "Gemma4ForCausalLM",
    foreign="gemma4_text",
    changes=(("hidden_size_per_layer_input", 16), ("vocab_size_per_layer_input", 131)),
)
LFM2 = Family("Lfm2ForCausalLM", foreign="lfm2", changes=(("layer_types", ("conv", "full_attention")),))
FAMILIES = (QWEN3, LLAMA, QWEN2, MISTRAL, BIASED, QWEN3_YARN, GEMMA2, GEMMA3, PHI3, QWEN3_MOE)


@cache
def traced(family: Family, dtype: torch.dtype, num_layers: int = 2) -> tuple[ModelConfig, TracedGraph]:
    if family.foreign:
        values = bench_family(family.foreign).config() | {"num_hidden_layers": num_layers} | dict(family.changes)
        values |= {"architectures": [family.architecture], "model_type": family.foreign}
        config = tiny_config()
        fields, names = JsonFields("config.json", values), [family.architecture]
        model = foreign_model(fields, Path("."), dtype, None, names)[0]
        if model.recurrences is not None:
            model = replace(model, recurrences=replace(model.recurrences, num_rows=4))
        config = replace(config, model=model)
        return config.model, trace(without_storage(build_model(config.model), CPU), forward_signature(config))
    shape: dict[str, Any] = {
        "num_heads": 6,
        "rms_norm_eps": 3e-4,
        "rope": family.rope,
        "tie_word_embeddings": family.tied,
        "qkv_bias": family.qkv_bias,
        "attention_out_bias": family.other_biases,
        "mlp_bias": family.other_biases,
        "sliding_windows": (family.sliding_window,) * (num_layers - 1) + (family.last_window,),
        "dtype": dtype,
    }
    config = tiny_config(family.architecture, num_layers, **shape | dict(family.changes))
    return config.model, trace(without_storage(build_model(config.model), CPU), forward_signature(config))


def graph_for(family: Family, dtype: torch.dtype, compile_range: CompileRange, num_layers: int = 2) -> fx.Graph:
    """Return a copy of a model's graph, which passes may rewrite."""
    _, graphs = traced(family, dtype, num_layers)
    graph = graphs.for_range(compile_range).graph
    if family.foreign:
        lower(graph, compile_range, CPU)
    return graph


def run_on(
    graph: fx.Graph,
    compile_range: CompileRange,
    passes: tuple[GraphPass, ...],
    enabled: tuple[GraphPass, ...] | None = None,
    *,
    verify: bool = True,
) -> tuple[PassReport, ...]:
    """Run passes over a graph in strict mode. enabled: passes whose names count as enabled; None: those that run."""
    names = [graph_pass.name for graph_pass in enabled or passes]
    return run_passes(graph, passes, names, compile_range, CPU, strict=True, verify=verify)


def run_all(
    family: Family,
    dtype: torch.dtype,
    compile_range: CompileRange,
    passes: tuple[GraphPass, ...] | None = None,
    *,
    num_layers: int = 2,
    verify: bool = True,
) -> tuple[PassReport, ...]:
    """Run passes over a model's graph in strict mode. passes: None for every registered pass."""
    graph = graph_for(family, dtype, compile_range, num_layers)
    return run_on(graph, compile_range, registered_passes() if passes is None else passes, verify=verify)


def graph_of(function: Callable[..., object], arguments: Tensors, parameters: Tensors) -> fx.GraphModule:
    """Return the ATen graph of function(**arguments, **parameters), with sources as a trace sets them."""
    inputs = arguments | parameters
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs.values()]
        module = make_fx(lambda *values: function(**dict(zip(inputs, values, strict=True))))(*fakes)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        is_parameter = name in parameters
        node.meta["source"] = Parameter.of(name, inputs[name]) if is_parameter else Source("argument", name)
    return module


def packed_parameters(module: fx.GraphModule) -> list[Parameter]:
    """Return the inputs of a graph that a pass has packed."""
    sources = [source_of(node) for node in module.graph.find_nodes(op="placeholder")]
    return [source for source in sources if isinstance(source, Parameter) and source.members]


def run(module: fx.GraphModule, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Execute a rewritten graph, packing parameters as the layout says."""
    packed = {p.name: compute(p, lambda leaf: inputs[leaf.name]) for p in packed_parameters(module)}
    module.recompile()
    values = [(inputs | packed)[n.meta["source"].name] for n in module.graph.find_nodes(op="placeholder")]
    return module(*values)


def rewrite(graph_pass: GraphPass, module: fx.GraphModule) -> PassResult:
    result = graph_pass.run(module.graph)
    module.graph.lint()
    return result


def count(module: fx.GraphModule, target: Callable[..., object]) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def random_tensors(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def targets(module: fx.GraphModule) -> list[object]:
    """Return the ops that a graph calls, in order."""
    return [node.target for node in module.graph.nodes if node.op == "call_function"]
