"""The resolved configuration: frozen, complete, and never rewritten; and how its values are written as JSON.

`resolve/` computes these values from a user's options; every part of the engine reads them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from compiled_engine.kv_format import AUTO, cache_dtype, head_width
from compiled_engine.pooling import Pooling
from compiled_engine.quantisation import Quantisation


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `kind` is default | linear | llama3 | yarn."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def angle_scale(self) -> float:
        """The factor of cos and sin; other than 1 in YaRN (Peng et al., 2023) alone."""

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks that compute each layer together, one per device, and their executor: in_process, multiprocess, or ray,
    where a cluster has the replicas, and each replica uses one of the other executors.

    data_parallel_size: replicas of the whole, each with separate devices and requests. stage_layers: number of layers
    (attentions) in each pipeline stage; empty for a single stage. collectives: auto or nccl, without symmetric memory.
    """

    tensor_parallel_size: int
    executor: str
    data_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    collectives: str = "auto"

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_layers))

    @property
    def has_replicas(self) -> bool:
        """Return whether requests are divided among cores in separate processes, here or elsewhere."""
        return self.data_parallel_size > 1 or self.executor == "ray"

    @property
    def devices_per_replica(self) -> int:
        """Devices that a replica runs on."""
        return self.tensor_parallel_size * self.num_stages


@dataclass(frozen=True)
class TransformersModel:
    """A model with transformers' code of this version; `config` is the text of its config.json."""

    version: str
    config: str


@dataclass(frozen=True)
class RowState:
    """A state of a layer's recurrence, of which each running request has one; `name`, `dtype`: of the tensor of all, a
    buffer of the model; `shape`: of one."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Recurrences:
    """The states of a model's recurrences. Their tensors have `num_rows` rows, as many as requests may run, and behind
    them `num_snapshots` for the prefix cache; 0: it is off."""

    states: tuple[RowState, ...]
    num_rows: int = 0
    num_snapshots: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of all states of a request, or of a snapshot."""
        return sum(state.row_bytes for state in self.states)


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
class HeadConfig:
    """A head that drafts from hidden states of another model (EAGLE-3).

    It reads `num_aux_layers` of them at each position, `target_size` elements each. vocab_size: of its logits, at most
    that of the model. norm_before_residual: its layer adds to the norm of what it reads, instead of to what it reads.
    norm_before_fc: the hidden states are normalised together first.
    """

    target_size: int
    num_aux_layers: int
    vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False


@dataclass(frozen=True)
class HeadShape:
    """Query heads and K/V heads of a layer, and the elements of each; all 0 in a layer without attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer as its checkpoint states it, and how it is run.

    `hub_name`: the repository of a checkpoint from the Hugging Face Hub, `revision` its commit; None for a folder.
    `sliding_windows` has one entry per layer: how many keys a query sees, itself included, or None for all.
    `transformers`: set where transformers' code is run; None for a textbook model. `rope`, biases, `rms_norm_eps` and
    `intermediate_size` say nothing then.
    `layer_heads`: the heads of each layer where layers differ in them; None where all are as num_heads, num_kv_heads
    and head_dim say. `attention_scale` None is head_dim ** -0.5. `attention_soft_cap`, `attention_sinks`: see
    attention.inputs.Scoring; 0 and False mean none. `logit_soft_cap` caps logits likewise.
    `quantisation`: None where weights are in dtype.
    `local_rope_theta`: of layers with a window where it is another, unscaled (Gemma 3).
    `wrapper`: the multimodal architecture whose checkpoint the text model is part of; None for a checkpoint of its own.
    `pooling`: None for a model that generates. `recurrences`: None where every layer attends and does nothing else.
    `causal`: False for an encoder, whose tokens see later ones too, so that a text is computed in one step and nothing
    is cached; its windows count the keys on either side. `token_types`: how many types its tokens may have, 0 where
    they have none. `merged_adapter`: folder of an adapter that is merged into the weights while they are loaded.
    `head`: set for a head that drafts, whose `vocab_size` is that of its embedding.
    `overrides`: values in the place of those in config.json, as JSON; empty for none.
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
    wrapper: str | None = None
    pooling: Pooling | None = None
    causal: bool = True
    token_types: int = 0
    recurrences: Recurrences | None = None
    merged_adapter: Path | None = None
    head: HeadConfig | None = None
    overrides: str = ""

    @property
    def num_mlps(self) -> int:
        """Layers with an MLP of their own instead of experts."""
        return len(self.experts.dense_layers) if self.experts.count else self.num_layers

    def heads_of(self, layer: int) -> HeadShape:
        """The heads of a layer."""
        if self.layer_heads is not None:
            return self.layer_heads[layer]
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)

    def kv_shapes(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> list[tuple[int, int, int, int, int]]:
        """The shape of each layer's KV cache; an encoder has none. dtype: of its tensors, None for the model's."""
        if not self.causal:
            return []
        heads = map(self.heads_of, range(self.num_layers))
        dtype = dtype or self.dtype
        return [(num_blocks, 2, block_size, layer.num_kv_heads, head_width(dtype, layer.head_dim)) for layer in heads]

    @property
    def yields_tokens(self) -> bool:
        """Return whether requests get tokens; others get vectors."""
        return self.pooling is None

    @property
    def implementation(self) -> str:
        """The origin of the model's code: textbook or transformers."""
        return "textbook" if self.transformers is None else "transformers"


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` None means: as many as the memory budget holds.

    kv_dtype: auto for the dtype of the model, or the name of a format of 8 bits, see kv_format.
    """

    block_size: int
    num_blocks: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    kv_dtype: str = AUTO


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. `policy` is fcfs (first come, first served) or priority (lower value first).

    `max_prefill_tokens`: most prompt tokens in a step with other running requests, while few requests wait; None for no
    limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    async_scheduling: bool = False
    max_prefill_tokens: int | None = None


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters of requests. `max_loras`: slots on the device, so as many adapters may be in a step, each of a rank
    up to `max_lora_rank`. `max_cpu_loras`: copies in host memory of adapters that no request uses are dropped beyond.
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int


@dataclass(frozen=True)
class CompileConfig:
    """Options of compilation. `passes` are the enabled FX passes in their fixed order.

    `ranges`: token counts (first, last), ascending, that are separate compile ranges, which return the logits of every
    token. `strict`: a pass below its contract is an error. `verify`: each rewrite is executed and compared.
    `workers`: processes that compile pieces; 0 compiles them in this one. `plugins`: modules that register passes.
    """

    enabled: bool
    passes: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    strict: bool
    verify: bool
    workers: int
    cache_dir: Path | None
    plugins: tuple[str, ...] = ()


class GraphMode(Enum):
    """Graph modes: batches that replay graphs, and the graphs' content (see docs/cuda_graphs.md); RECORDED on a CPU,
    others on CUDA.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"
    BREAKABLE = "breakable"
    RECORDED = "recorded"

    @property
    def captures_decodes(self) -> bool:
        """Return whether batches of decodes have separate full graphs."""
        return self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def captures_mixed(self) -> bool:
        """Return whether there are graphs for any batch."""
        return self not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY, GraphMode.RECORDED)


@dataclass(frozen=True)
class GraphConfig:
    """Graphs: the mode, and the captured sizes on CUDA, ascending.

    `decode_sizes`: numbers of decodes with full graphs. `token_sizes`: token counts of other batches with graphs of the
    mode. `short_decodes`: (decodes, tokens), numbers of decodes with contexts up to this many tokens, with separate
    graphs; `short_verified`: the same of requests whose drafts are verified.
    """

    mode: GraphMode
    decode_sizes: tuple[int, ...] = ()
    token_sizes: tuple[int, ...] = ()
    short_decodes: tuple[tuple[int, int], ...] = ()
    short_verified: tuple[tuple[int, int], ...] = ()

    @property
    def captures(self) -> bool:
        """Return whether there is anything to capture on CUDA."""
        return bool(self.decode_sizes or self.token_sizes)


@dataclass(frozen=True)
class DraftConfig:
    """A draft model or a head, how it is compiled, and its graphs; all else is the engine's: dtype, cache, ranks,
    attention."""

    model: ModelConfig
    compile: CompileConfig
    graph: GraphConfig


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafts, up to `num_tokens` a request and step, that are verified together with its newest token; 0: none.

    method: ngram, which drafts what followed the last `lookup_min` to `lookup_max` tokens where they came before, or
    draft_model or eagle3, with `draft`. acceptance_rates: drafts are not compared, but accepted at random; entry i is
    the share of drafts whose first i + 1 tokens are. Empty where drafts are compared. aux_layers: the layers of the
    model whose inputs a head drafts from, in the order in which it reads them; empty without a head. adapts: a step has
    as many drafts as pay, by measured times and acceptance. sharpnesses: factors on a head's logits with which drafts
    are sampled; of several the best is found by acceptance.
    """

    method: str = "none"
    num_tokens: int = 0
    lookup_max: int = 0
    lookup_min: int = 0
    draft: DraftConfig | None = None
    acceptance_rates: tuple[float, ...] = ()
    aux_layers: tuple[int, ...] = ()
    adapts: bool = False
    sharpnesses: tuple[float, ...] = (1.0,)

    @property
    def skips_head(self) -> bool:
        """Return whether there is a head, and steps that it does not read."""
        return self.adapts and len(self.aux_layers) > 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of drafts that steps may have, ascending."""
        return draft_lengths(self.num_tokens) if self.adapts else (self.num_tokens,)

    @property
    def verified(self) -> tuple[int, ...]:
        """The numbers of a request's newest token and drafts that steps may verify, ascending."""
        return tuple(1 + length for length in self.lengths if length)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The numbers of rows that each request may have in a step of decodes, ascending."""
        return (1, *self.verified)

    @property
    def rare(self) -> tuple[int, ...]:
        """Of `query_lens`, those of few steps, which have graphs of few sizes: one row of each request where the number
        of drafts is fixed, and where it is chosen those between no drafts and the most."""
        if self.adapts:
            return self.verified[:-1]
        return (1,) if self.num_tokens else ()

    @property
    def sizes_read(self) -> tuple[int, ...] | None:
        """Sizes of the graphs of steps without drafts that a head reads which may rest: those of its own graphs. None
        for any other engine."""
        return self.draft.graph.decode_sizes if self.draft is not None and self.skips_head else None


def draft_lengths(most: int) -> tuple[int, ...]:
    """The numbers of drafts between which a step chooses: `most`, and each half of the one before, rounded down, to 0.

    Each is measured, and has graphs of its own.
    """
    return tuple(most >> power for power in range(most.bit_length(), -1, -1))


@dataclass(frozen=True)
class EngineConfig:
    """The whole configuration. `reasons` maps dotted names of chosen fields to the reason of their value.

    `tokenizer`: its folder, None for the model's own. `adapters`: None if requests have none.
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
    speculation: SpeculationConfig
    adapters: AdapterConfig | None

    @property
    def max_new_tokens_per_step(self) -> int:
        """Most tokens that a step yields for a request."""
        return 1 + self.speculation.num_tokens

    @property
    def num_ahead(self) -> int:
        """Most tokens ahead of a request's newest one that a step computes."""
        return self.speculation.num_tokens

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The numbers of rows that each request may have in a step of decodes, if that is more than one; ascending."""
        return self.speculation.verified

    @property
    def rare_query_lens(self) -> tuple[int, ...]:
        """The numbers of rows of a request, 1 included, that few steps have: there are graphs of few sizes for them."""
        return self.speculation.rare

    @property
    def numberings(self) -> tuple[bool, ...]:
        """Whether the rows of a step have numbers (see InputBatch.numbered): both, if some steps have them."""
        if not self.speculation.num_tokens:
            return (False,)
        return (True, False) if self.speculation.skips_head else (True,)

    @property
    def beside(self) -> tuple[EngineConfig, ...]:
        """The models that run beside the engine's, each with a KV cache under the same blocks."""
        return () if self.draft is None else (self.draft,)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache's tensors."""
        return cache_dtype(self.cache.kv_dtype, self.model.dtype)

    @property
    def max_running(self) -> int:
        """Most requests that run at a time: those of a step for each stage, since stages compute different ones."""
        return self.scheduler.max_num_seqs * self.parallel.num_stages

    @property
    def steps_in_flight(self) -> int:
        """Most steps in flight: one for each stage, and one in preparation."""
        return self.parallel.num_stages + self.scheduler.async_scheduling

    @property
    def draft(self) -> EngineConfig | None:
        """The same for the draft model, which speculates on nothing; None without one."""
        draft = self.speculation.draft
        if draft is None:
            return None
        return replace(
            self,
            model=draft.model,
            compile=draft.compile,
            graph=draft.graph,
            speculation=SpeculationConfig(),
            adapters=None,
        )

    @property
    def of_replica(self) -> EngineConfig:
        """The same for one of the replicas, wherever it runs."""
        executor = self.parallel.executor
        if executor == "ray":
            executor = "in_process" if self.parallel.devices_per_replica == 1 else "multiprocess"
        return replace(self, parallel=replace(self.parallel, executor=executor, data_parallel_size=1))


def json_value(value: Any) -> Any:
    """A configuration value as JSON has it: objects, lists, numbers, text."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else str(value).removeprefix("torch.")


def flat_fields(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every field of nested dataclasses as JSON has it, under its dotted name."""
    flat: dict[str, Any] = {}
    for field in fields(value):
        name, inner = prefix + field.name, getattr(value, field.name)
        flat |= flat_fields(inner, f"{name}.") if is_dataclass(inner) else {name: json_value(inner)}
    return flat


def encode_other(value: Any) -> str:
    """msgspec's enc_hook. Raises TypeError for types that messages must not contain."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"no message holds a {type(value).__name__}")


def decode_other(kind: type, value: Any) -> Any:
    """msgspec's dec_hook."""
    if kind is torch.dtype:
        return getattr(torch, value)
    if kind in (Path, torch.device):
        return kind(value)
    raise TypeError(f"no message holds a {kind.__name__}")
