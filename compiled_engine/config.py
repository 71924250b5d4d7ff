"""The resolved configuration: frozen, complete, and never rewritten.

`resolve/` turns what a user asked for into these values; every part of the engine reads them from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch

from compiled_engine.foreign_share import divided_config
from compiled_engine.parallel_config import ParallelConfig
from compiled_engine.quantisation import Quantisation
from compiled_engine.rope_config import RopeConfig


@dataclass(frozen=True)
class TransformersModel:
    """A model whose code is that of transformers, of this version; `config` is the text of its config.json."""

    version: str
    config: str


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts in the place of an MLP: each token goes to `per_token` of `count` experts, gated MLPs of
    `intermediate_size`. renormalise: the weights of the chosen ones add up to 1. `dense_layers` have an MLP instead.
    A model without experts has a count of 0.
    """

    count: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    renormalise: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeadShape:
    """Query heads and K/V heads of a layer, and the elements of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer as its checkpoint states it, and how it is run.

    `hub_name`: the repository of a checkpoint from the Hugging Face Hub, `revision` its commit; None for a folder.
    `sliding_windows` has one entry per layer: how many keys a query sees, itself included, or None for all.
    `transformers`: set where transformers' code is run; None for a textbook model. `rope`, biases, `rms_norm_eps` and
    `intermediate_size` say nothing then.
    `layer_heads`: the heads of each layer where layers differ in them; None where all are as num_heads, num_kv_heads
    and head_dim say. `attention_scale` None is head_dim ** -0.5. `attention_soft_cap`, `attention_sinks`: see
    attention.inputs.Scoring; 0 and False mean none. `logit_soft_cap` caps logits likewise.
    `quantisation`: None where weights are in dtype.
    `local_rope_theta`: of layers with a window where it is another, unscaled (Gemma 3).
    """

    path: Path
    hub_name: str | None
    revision: str | None
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype
    max_model_len: int
    load_format: str
    seed: int
    transformers: TransformersModel | None = None
    layer_heads: tuple[HeadShape, ...] | None = None
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    attention_sinks: bool = False
    logit_soft_cap: float = 0.0
    local_rope_theta: float | None = None
    experts: ExpertsConfig = ExpertsConfig()
    quantisation: Quantisation | None = None

    @property
    def num_mlps(self) -> int:
        """Layers with an MLP of their own instead of experts."""
        return len(self.experts.dense_layers) if self.experts.count else self.num_layers

    def heads_of(self, layer: int) -> HeadShape:
        """The heads of a layer."""
        if self.layer_heads is not None:
            return self.layer_heads[layer]
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)

    def kv_shapes(self, num_blocks: int, block_size: int) -> list[tuple[int, int, int, int, int]]:
        """The shape of each layer's KV cache."""
        heads = map(self.heads_of, range(self.num_layers))
        return [(num_blocks, 2, block_size, layer.num_kv_heads, layer.head_dim) for layer in heads]

    @property
    def implementation(self) -> str:
        """Whose code the model is: textbook or transformers."""
        return "textbook" if self.transformers is None else "transformers"


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` None means: as many as the memory budget holds."""

    block_size: int
    num_blocks: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. `policy` is fcfs (first come, first served) or priority (lower value first).

    `max_prefill_tokens`: most tokens of prompts in a step that others run in, while few requests wait; None for as many
    as it has room for.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    async_scheduling: bool = False
    max_prefill_tokens: int | None = None


@dataclass(frozen=True)
class CompileConfig:
    """Whether and how the model is compiled. `passes` are the enabled FX passes in their fixed order.

    `ranges`: token counts (first, last), ascending, that are compile ranges of their own, whose code returns the logits
    of every token. `strict`: a pass below its contract is an error. `verify`: each rewrite is executed and compared.
    `workers`: processes that compile pieces; 0 compiles them in this one.
    """

    enabled: bool
    passes: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    strict: bool
    verify: bool
    workers: int
    cache_dir: Path | None


class GraphMode(Enum):
    """Which batches replay graphs, and what these hold (see docs/cuda_graphs.md); RECORDED on a CPU, others on CUDA."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"
    BREAKABLE = "breakable"
    RECORDED = "recorded"

    @property
    def captures_decodes(self) -> bool:
        """Whether batches of decodes have full graphs of their own."""
        return self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def captures_mixed(self) -> bool:
        """Whether there are graphs for any batch."""
        return self not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY, GraphMode.RECORDED)


@dataclass(frozen=True)
class GraphConfig:
    """Graphs: the mode, and what is captured on CUDA, ascending.

    `decode_sizes`: batches of so many decodes, as full graphs. `token_sizes`: any batches of so many tokens, as what
    the mode says. `background`: capture between the steps of the first requests instead of before them.
    `short_decodes`: (decodes, tokens), batches of so many decodes with contexts of up to so many tokens, as graphs of
    their own.
    """

    mode: GraphMode
    decode_sizes: tuple[int, ...] = ()
    token_sizes: tuple[int, ...] = ()
    background: bool = False
    short_decodes: tuple[tuple[int, int], ...] = ()

    @property
    def captures(self) -> bool:
        """Whether there is anything to capture on CUDA."""
        return bool(self.decode_sizes or self.token_sizes)


def local_share(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """The shape that each of num_ranks ranks computes: its heads, and its parts of the MLP and of the vocabulary.

    Ranks that are more than the KV heads share these. A vocabulary that num_ranks does not divide stays whole.
    """
    if num_ranks == 1:
        return model
    vocab_size = model.vocab_size if model.vocab_size % num_ranks else model.vocab_size // num_ranks

    def part(heads: HeadShape) -> HeadShape:
        num_kv_heads = max(1, heads.num_kv_heads // num_ranks)
        return replace(heads, num_heads=heads.num_heads // num_ranks, num_kv_heads=num_kv_heads)

    usual = part(HeadShape(model.num_heads, model.num_kv_heads, model.head_dim))
    foreign = model.transformers
    if foreign is not None:
        sizes = usual.num_heads, usual.num_kv_heads, usual.head_dim
        foreign = replace(foreign, config=divided_config(foreign.config, num_ranks, sizes, vocab_size))
    return replace(
        model,
        num_heads=usual.num_heads,
        num_kv_heads=usual.num_kv_heads,
        layer_heads=None if model.layer_heads is None else tuple(map(part, model.layer_heads)),
        intermediate_size=model.intermediate_size // num_ranks,
        vocab_size=vocab_size,
        experts=replace(model.experts, intermediate_size=model.experts.intermediate_size // num_ranks),
        transformers=foreign,
    )


@dataclass(frozen=True)
class EngineConfig:
    """Everything. `reasons` maps a dotted field name to why it has its value, for those that were "auto".

    `tokenizer`: its folder, None for the model's own.
    """

    model: ModelConfig
    tokenizer: Path | None
    cache: CacheConfig
    scheduler: SchedulerConfig
    compile: CompileConfig
    graph: GraphConfig
    parallel: ParallelConfig
    device: torch.device
    attention_backend: str
    reasons: dict[str, str]

    @property
    def max_running(self) -> int:
        """Most requests that run at a time: those of a step for each stage, since stages compute different ones."""
        return self.scheduler.max_num_seqs * self.parallel.num_stages

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are under way at a time: one for each stage, and one that is prepared meanwhile."""
        return self.parallel.num_stages + self.scheduler.async_scheduling

    @property
    def local_model(self) -> ModelConfig:
        """The model as one rank computes it."""
        return local_share(self.model, self.parallel.tensor_parallel_size)

    @property
    def of_replica(self) -> EngineConfig:
        """The same for one of the replicas, wherever it runs."""
        executor = self.parallel.executor
        if executor == "ray":
            executor = "in_process" if self.parallel.devices_per_replica == 1 else "multiprocess"
        return replace(self, parallel=replace(self.parallel, executor=executor, data_parallel_size=1))
