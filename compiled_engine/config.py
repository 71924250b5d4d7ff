"""The engine's resolved configuration, frozen and complete, and its conversion to JSON.

`resolve/` computes the configuration from the user's options (options.py), and every part of the engine reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from compiled_engine.kv_format import AUTO, cache_dtype, halves_of, head_width
from compiled_engine.pooling import Pooling
from compiled_engine.quantisation import Quantisation
from compiled_engine.speech import SpeechConfig, SpeechDescription
from compiled_engine.vision import VisionDescription


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary position embedding (RoPE)."""

    theta: float
    kind: str = "default"  # default, linear, llama3, yarn, longrope or dynamic
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
    # LongRoPE's factors of each pair's wavelength, for requests up to the original length and for longer ones.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def angle_scale(self) -> float:
        """Factor by which cos and sin are multiplied; 1 except in YaRN (Peng et al., 2023) and LongRoPE."""

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            original = self.original_max_position_embeddings
            return math.sqrt(1 + math.log(self.factor) / math.log(original)) if original and self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)


@dataclass(frozen=True)
class LengthAngles:
    """Rotary angles that depend on a request's length if it is longer than `border` tokens."""

    border: int
    # All angles of a request change when it exceeds the border, so its keys are computed again (LongRoPE). Otherwise
    # keys keep the angles with which they were computed (dynamic NTK).
    recomputes: bool


RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


@dataclass(frozen=True)
class ParallelConfig:
    """The distribution of the model over devices and processes."""

    tensor_parallel_size: int  # ranks that compute each layer together, one per device
    # in_process, multiprocess, or ray: replicas in a cluster, each of which uses one of the other executors
    executor: str
    data_parallel_size: int = 1  # replicas, each with its own devices and requests
    stage_layers: tuple[int, ...] = ()  # number of layers (attentions) in each pipeline stage; empty for a single stage
    collectives: str = "auto"  # auto, or nccl: without symmetric memory

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_layers))

    @property
    def has_replicas(self) -> bool:
        """Whether the engine cores are replicas in processes of their own, here or on other hosts.

        Also True for a single replica on Ray.
        """
        return self.data_parallel_size > 1 or self.executor == "ray"

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of a replica."""
        return self.tensor_parallel_size * self.num_stages

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all replicas, each with a device of its own."""
        return self.devices_per_replica * self.data_parallel_size


@dataclass(frozen=True)
class TransformersModel:
    """A model that runs the code of transformers."""

    version: str  # of transformers
    config: str  # text of the model's config.json


@dataclass(frozen=True)
class RowState:
    """A recurrent state of a layer, held in a buffer with a row for each running request and for each snapshot.

    A snapshot is a copy of a request's states that the prefix cache keeps.
    """

    name: str  # of the buffer
    shape: tuple[int, ...]  # of a row
    dtype: str
    in_snapshots: bool = True  # whether snapshots have it too
    num_decays: int = 1  # of a state [H, k, v]: factors by which a token decays a head's matrix: 1, or k, one per row
    num_groups: int = 0  # of a state [H, k, v]: heads of queries and keys, each of which serves H / num_groups heads

    @property
    def row_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Recurrences:
    """The recurrent states of all of a model's layers."""

    states: tuple[RowState, ...]  # with drafts, also the tensors that keep updates of drafts, see recurrence/states.py
    num_rows: int = 0  # rows of each state, one per running request
    num_snapshots: int = 0  # further rows of states that snapshots have, for the prefix cache; 0: no prefix caching
    num_drafts: int = 0  # most drafts of a request in a step, for which the states have room

    @property
    def row_bytes(self) -> int:
        """Bytes of all recurrent states of one running request."""
        return sum(state.row_bytes for state in self.states)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of all recurrent states of a request."""
        return sum(state.row_bytes for state in self.states if state.in_snapshots)

    def rows_of(self, state: RowState) -> int:
        """Return the number of rows of a state: those of running requests, followed by those of snapshots."""
        return self.num_rows + (self.num_snapshots if state.in_snapshots else 0)


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts in place of a layer's MLP.

    Each token goes to `per_token` of `count` experts, which are gated MLPs.
    """

    count: int = 0  # 0: a model without experts
    per_token: int = 0
    intermediate_size: int = 0
    renormalise: bool = False  # the chosen experts' weights add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead


@dataclass(frozen=True)
class HeadConfig:
    """A draft head, which drafts tokens from hidden states of the engine's model: an EAGLE-3 head or an MTP layer."""

    target_size: int  # elements of a hidden state
    num_aux_layers: int  # layers whose inputs it reads; 0: an MTP layer, which reads the last hidden states
    vocab_size: int  # of its logits, at most the model's
    norm_before_residual: bool = False  # the residual is the normed input of its layer, instead of the input
    norm_before_fc: bool = False  # the concatenated hidden states are normed first
    hidden_first: bool = False  # an MTP layer's projection reads the hidden state before the embedding, not after it
    # An MTP layer ends with the model's last norm, and its projection reads hidden states before that norm.
    shares_norm: bool = False

    @property
    def is_mtp(self) -> bool:
        """Whether the head is a layer for multi-token prediction (MTP) from the model's own checkpoint."""
        return self.num_aux_layers == 0


@dataclass(frozen=True)
class HeadShape:
    """The number and size of a layer's attention heads; all values are 0 in a layer without attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Latent attention: elements of the cached latent, and of a head's key and value; head_dim is that of a cached row,
    # which all heads share. 0: keys and values are cached.
    latent_dim: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer as its checkpoint states it, and how it is run."""

    path: Path
    hub_name: str | None  # repository on the Hugging Face Hub; None for a folder
    revision: str | None  # its commit
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
    # Keys that a query sees in each layer, itself included, None for all; in an encoder, keys on either side.
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype
    max_model_len: int
    load_format: str
    seed: int
    # Set if transformers' code is run; then rope, biases, rms_norm_eps and intermediate_size have no effect. None for a
    # textbook model.
    transformers: TransformersModel | None = None
    # None: all layers have num_heads, num_kv_heads, head_dim, latent_dim, key_dim and value_dim.
    layer_heads: tuple[HeadShape, ...] | None = None
    latent_dim: int = 0  # see HeadShape, like key_dim and value_dim
    key_dim: int = 0
    value_dim: int = 0
    # The layer whose KV cache each layer reads: its own number, or that of an earlier layer, which writes the keys and
    # values of both. None: each layer has its own cache.
    kv_layers: tuple[int, ...] | None = None
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float = 0.0  # see attention.inputs.Scoring; 0: none
    attention_sinks: tuple[int, ...] = ()  # layers with sinks, see attention.inputs.Scoring
    linear_biases: bool = False  # scores have biases that are linear in positions (ALiBi), as elements of keys
    num_biases: int = 0  # of a head's scores, by relative position, in an encoder: see attention.op.packed_attention
    logit_soft_cap: float = 0.0  # a soft cap of logits; 0: none
    local_rope_theta: float | None = None  # unscaled theta of layers with a window, if it differs (Gemma 3)
    experts: ExpertsConfig = ExpertsConfig()
    quantisation: Quantisation | None = None  # None: weights are in dtype
    wrapper: str | None = None  # the multimodal architecture whose checkpoint has the model, if any
    pooling: Pooling | None = None  # None: the model generates
    # False for an encoder: tokens see later ones too, so a text is computed in one step, and nothing is cached.
    causal: bool = True
    token_types: int = 0  # number of token types; 0: tokens have no types
    refused_id: int | None = None  # a token that prompts must not have, as the model counts no position for it
    length_angles: LengthAngles | None = None  # None: rotary angles depend on positions alone
    recurrences: Recurrences | None = None  # None: no layer has a recurrent state
    merged_adapter: Path | None = None  # folder of an adapter that is merged into the weights when they are loaded
    head: HeadConfig | None = None  # set for a draft head, whose vocab_size is that of its embedding
    vision: VisionDescription | None = None  # set for a vision tower, which has no tokens
    speech: SpeechDescription | None = None  # set for a speech model, whose other fields describe the decoder
    overrides: str = ""  # values that replace those in config.json, as JSON

    @property
    def num_mlps(self) -> int:
        """Number of layers with a single MLP instead of a mixture of experts."""
        return len(self.experts.dense_layers) if self.experts.count else self.num_layers

    def heads_of(self, layer: int) -> HeadShape:
        """Return the number and size of a layer's attention heads."""
        if self.layer_heads is not None:
            return self.layer_heads[layer]
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return HeadShape(*heads, self.latent_dim, self.key_dim, self.value_dim)

    def kv_layer(self, layer: int) -> int:
        """Return the number of the layer whose KV cache `layer` reads: `layer` itself, or an earlier layer."""
        return layer if self.kv_layers is None else self.kv_layers[layer]

    def kv_shapes(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> list[tuple[int, int, int, int, int]]:
        """Return the shape of the KV cache that each layer reads, see kv_format.py; an empty list for an encoder.

        `dtype` is that of the cache; None: the model's dtype.
        """
        if not self.causal:
            return []
        heads = map(self.heads_of, range(self.num_layers))
        dtype = dtype or self.dtype
        sizes = ((each, head_width(dtype, each.head_dim, each.latent_dim)) for each in heads)
        return [(num_blocks, halves_of(each.latent_dim), block_size, each.num_kv_heads, width) for each, width in sizes]

    @property
    def yields_tokens(self) -> bool:
        """Whether requests get tokens. Requests to a pooling model get vectors or scores instead."""
        return self.pooling is None

    @property
    def implementation(self) -> str:
        """Origin of the model's code: textbook or transformers."""
        return "textbook" if self.transformers is None else "transformers"


@dataclass(frozen=True)
class BlockFilesConfig:
    """Folder and limits of the files to which blocks of the KV cache are written."""

    folder: Path  # of this model, below the user's, see resolve/host_blocks.py
    limit: int  # blocks with files, for each replica
    most_bytes: int  # files of all models below the user's folder
    state_weight: int = 1  # blocks that the file of a snapshot of recurrent states counts as


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int  # tokens per block
    num_blocks: int | None  # None: as many as the memory budget holds
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    kv_dtype: str = AUTO  # auto: the model's dtype; or the name of an 8-bit format, see kv_format
    host_blocks: int = 0  # blocks of the prefix cache that host memory has room for
    host_states: int = 0  # snapshots of recurrent states that host memory has room for
    block_files: BlockFilesConfig | None = None  # None: blocks in host memory are not written to files


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's policy and the limits of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str  # fcfs (first come, first served) or priority (lower value first)
    async_scheduling: bool = False
    # Most prompt tokens in a step that also decodes, while few requests wait; None: no limit.
    max_prefill_tokens: int | None = None


@dataclass(frozen=True)
class AdapterConfig:
    """Limits for LoRA adapters that requests choose."""

    max_loras: int  # slots on the device, which is the most adapters in a step
    max_lora_rank: int
    max_cpu_loras: int  # copies in host memory beyond which unused adapters are dropped


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings for publishing events of the prefix cache over ZeroMQ."""

    endpoint: str  # of the PUB socket: bound if it has a wildcard or names a local socket, otherwise connected to
    replay_endpoint: str | None  # of the ROUTER socket that replays batches; None: there is none
    topic: str
    buffer_steps: int  # batches kept for replays
    hwm: int  # messages that wait for a slow subscriber before further ones are dropped
    max_queued: int  # batches that may wait for the publishing thread
    data_parallel_rank: int = 0  # number of the replica

    def of_replica(self, number: int) -> KVEventsConfig:
        """Return the configuration of replica `number`. As in vLLM, each replica has endpoints of its own."""
        replay = self.replay_endpoint and _endpoint_of(self.replay_endpoint, number)
        return replace(
            self, endpoint=_endpoint_of(self.endpoint, number), replay_endpoint=replay, data_parallel_rank=number
        )


def _endpoint_of(endpoint: str, number: int) -> str:
    """Return the endpoint of replica `number`. `endpoint`: that of replica 0.

    The number is added to the port of a TCP address. Other addresses get the suffix _dp and the number.
    """
    if not number:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{number}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}"


@dataclass(frozen=True)
class ImagesConfig:
    """The images of prompts: their vision tower, and limits of their embeddings on the device.

    An embedding is a row of vision.row_size values, for one position of a prompt.
    """

    vision: VisionDescription
    config: str  # text of the checkpoint's config.json, from which the tower is made
    most_embeddings: int  # of one image
    cache_size: int  # embeddings on the device
    step_size: int  # most embeddings that a step computes, or those of one image if it has more

    @property
    def sections(self) -> tuple[int, ...]:
        """The numbers of a head's rotary frequencies that use positions in time, in height and in width (M-RoPE).

        () if tokens have a single position.
        """
        return self.vision.mrope_section or ()


@dataclass(frozen=True)
class ImageInput:
    """Settings for reading and processing the images of prompts."""

    placeholder: int  # token that stands for an image in prompts, before it is replaced by those of its embeddings
    max_images: int  # of a prompt
    settings: dict[str, Any]  # arguments of the checkpoint's processor
    cache_bytes: int  # processed images kept in each process that takes requests
    num_workers: int  # processes that process images
    max_pixels: int  # of an image
    allowed_domains: tuple[str, ...]  # hosts from which images are fetched
    local_folder: Path | None  # folder whose files URLs may name


@dataclass(frozen=True)
class CompileConfig:
    """Options of compilation."""

    enabled: bool
    passes: tuple[str, ...]  # enabled FX passes, in their fixed order
    # Token counts (first, last) that are compiled separately, ascending; these forwards return every token's logits.
    ranges: tuple[tuple[int, int], ...]
    strict: bool  # a pass that matches less than its contract is an error
    verify: bool  # execute each rewrite, and compare the results
    workers: int  # processes that compile pieces; 0: compile in this process
    cache_dir: Path | None
    plugins: tuple[str, ...] = ()  # modules that register passes


class GraphMode(Enum):
    """Selects the batches that replay graphs, and the part of a step that a graph contains; see docs/cuda_graphs.md.

    RECORDED is for CPUs: calls of C++ kernels are recorded and replayed.
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
        """Whether batches without prefills have graphs of the whole forward."""
        return self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def captures_mixed(self) -> bool:
        """Whether graphs are captured for batches of any kind, including batches with prefills."""
        return self not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY, GraphMode.RECORDED)


@dataclass(frozen=True)
class GraphConfig:
    """The graph mode, and the batch sizes of captured CUDA graphs in ascending order."""

    mode: GraphMode
    decode_sizes: tuple[int, ...] = ()  # numbers of decodes
    token_sizes: tuple[int, ...] = ()  # token counts of other batches
    # (decodes, most tokens of a context) of additional decode graphs for short contexts, without and with drafts
    short_decodes: tuple[tuple[int, int], ...] = ()
    short_verified: tuple[tuple[int, int], ...] = ()

    def short_shapes(self, query_len: int) -> tuple[tuple[int, int], ...]:
        """Return (requests, most tokens of a context) of each decode graph for short contexts.

        `query_len` is the number of rows per request, 1 without drafts.
        """
        return self.short_decodes if query_len == 1 else self.short_verified

    @property
    def captures(self) -> bool:
        """Whether there are CUDA graphs to capture."""
        return bool(self.decode_sizes or self.token_sizes)


@dataclass(frozen=True)
class DraftConfig:
    """A draft model or draft head. It shares the engine's dtype, cache options, ranks and attention backend."""

    model: ModelConfig
    compile: CompileConfig
    graph: GraphConfig


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding: drafts that are verified together with a request's newest token."""

    method: str = "none"  # none, ngram, draft_model, eagle3 or mtp
    num_tokens: int = 0  # most drafts per request and step
    lookup_max: int = 0  # for ngram: most and fewest last tokens whose earlier occurrence is looked up
    lookup_min: int = 0
    draft: DraftConfig | None = None  # the draft model or head
    # If not empty, drafts are accepted at random, not by comparison: entry i is the probability of at least i + 1.
    acceptance_rates: tuple[float, ...] = ()
    aux_layers: tuple[int, ...] = ()  # the model's layers whose inputs a head reads, in the order of reading
    reads_hidden: bool = False  # a head reads the model's last hidden states
    adapts: bool = False  # choose the number of drafts of each step by measured times and acceptance
    sharpnesses: tuple[float, ...] = (1.0,)  # factors on a head's logits for sampling drafts; the best one is found

    @property
    def has_head(self) -> bool:
        """Whether a head makes the drafts, from hidden states of the model."""
        return self.reads_hidden or len(self.aux_layers) > 0

    @property
    def skips_head(self) -> bool:
        """Whether the engine may leave out the draft head in a step."""
        return self.adapts and self.has_head

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of drafts per request that a step may have, ascending; 0 is among them if the number adapts."""
        return draft_lengths(self.num_tokens) if self.adapts else (self.num_tokens,)

    @property
    def verified(self) -> tuple[int, ...]:
        """Numbers of rows per request (newest token and drafts) that a step with drafts may have, ascending."""
        return tuple(1 + length for length in self.lengths if length)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Numbers of rows per request that a step of decodes may have, with or without drafts, ascending."""
        return (1, *self.verified)

    @property
    def rare(self) -> tuple[int, ...]:
        """The numbers of rows per request (see `query_lens`) that few steps have. Graphs exist for fewer batch sizes.

        If the number of drafts is fixed, this is 1, for steps without drafts. If it adapts, these are all numbers
        except the smallest and the largest.
        """
        if self.adapts:
            return self.verified[:-1]
        return (1,) if self.num_tokens else ()

    @property
    def sizes_read(self) -> tuple[int, ...] | None:
        """Batch sizes of the CUDA graphs for steps that verify no drafts, but in which the draft head reads the tokens.

        None if the engine has no draft head, or if the head runs in every step.
        """
        return self.draft.graph.decode_sizes if self.draft is not None and self.skips_head else None


def draft_lengths(most: int) -> tuple[int, ...]:
    """Return the numbers of drafts that an adaptive step may have, ascending: `most`, halved repeatedly down to 0.

    There are few numbers, because steps of each must be measured and have graphs of their own.
    """
    return tuple(most >> power for power in range(most.bit_length(), -1, -1))


@dataclass(frozen=True)
class EngineConfig:
    """The whole configuration of an engine."""

    model: ModelConfig
    tokenizer: Path | None  # its folder; None for the model's
    cache: CacheConfig
    scheduler: SchedulerConfig
    compile: CompileConfig
    graph: GraphConfig
    parallel: ParallelConfig
    device: torch.device
    attention_backend: str
    reasons: dict[str, str]  # reasons of automatically chosen values, by dotted field name
    speculation: SpeculationConfig
    adapters: AdapterConfig | None  # None: requests have no adapters
    images: ImagesConfig | None  # None: prompts have no images
    image_input: ImageInput | None  # None: prompts have no images, see reasons
    speech: SpeechConfig | None  # set for a speech model, each of whose prompts has a clip
    kv_events: KVEventsConfig | None  # None: no events of the prefix cache are published
    sleeps: bool  # the engine may give its memory back while it is idle
    logprobs_mode: str  # the logits from which log-probabilities are computed: RAW or PROCESSED
    batch_invariant: bool  # a request gets the same bits whatever other requests share its steps

    @property
    def max_new_tokens_per_step(self) -> int:
        """Most tokens that a step yields for a request."""
        return 1 + self.speculation.num_tokens

    @property
    def num_ahead(self) -> int:
        """Most drafts that a step computes for a request, in addition to the request's newest token."""
        return self.speculation.num_tokens

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Numbers of rows per request (newest token and drafts), above one, that a step of decodes may have."""
        return self.speculation.verified

    @property
    def rare_query_lens(self) -> tuple[int, ...]:
        """Numbers of rows per request that few steps have, see SpeculationConfig.rare."""
        return self.speculation.rare

    @property
    def offset_choices(self) -> tuple[bool, ...]:
        """Whether the rows of batches have offsets (engine/input_batch.py), as batches with drafts need them.

        (False,) for an engine without drafts, (True,) for one with drafts. (True, False) if steps may skip the draft
        head: then batches of both kinds occur.
        """
        if not self.speculation.num_tokens:
            return (False,)
        return (True, False) if self.speculation.skips_head else (True,)

    @property
    def further_models(self) -> tuple[EngineConfig, ...]:
        """Configurations of the models that run besides the engine's model, such as a draft model.

        Each has a KV cache of its own, addressed by the same block tables.
        """
        return () if self.draft is None else (self.draft,)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache's tensors."""
        return cache_dtype(self.cache.kv_dtype, self.model.dtype)

    @property
    def max_running(self) -> int:
        """Most running requests: max_num_seqs for each pipeline stage, since stages compute different requests."""
        return self.scheduler.max_num_seqs * self.parallel.num_stages

    @property
    def steps_in_flight(self) -> int:
        """Most steps in flight: one per pipeline stage, and one more with async scheduling."""
        return self.parallel.num_stages + self.scheduler.async_scheduling

    @property
    def draft(self) -> EngineConfig | None:
        """The configuration of the draft model or head, without drafts of its own; None if there is neither."""
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
            images=None,
            image_input=None,
            speech=None,
            kv_events=None,
        )

    def of_replica(self, number: int) -> EngineConfig:
        """Return the configuration of the replica with this number."""
        executor = self.parallel.executor
        if executor == "ray":
            executor = "in_process" if self.parallel.devices_per_replica == 1 else "multiprocess"
        parallel = replace(self.parallel, executor=executor, data_parallel_size=1)
        return replace(self, parallel=parallel, kv_events=self.kv_events and self.kv_events.of_replica(number))


def json_value(value: Any) -> Any:
    """Convert a configuration value to a JSON value."""
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
    """Return every field of nested dataclasses as a JSON value, under its dotted name. prefix: put before the names."""
    flat: dict[str, Any] = {}
    for field in fields(value):
        name, inner = prefix + field.name, getattr(value, field.name)
        flat |= flat_fields(inner, f"{name}.") if is_dataclass(inner) else {name: json_value(inner)}
    return flat


# Ends of the names of fields without influence on what is computed: locations, and reasons for automatic choices. A
# model that runs besides the engine's has such fields too.
_OF_NO_EFFECT = (".model.path", ".model.hub_name", ".model.revision", ".compile.cache_dir", ".tokenizer", ".reasons")


def effective_fields(config: EngineConfig) -> dict[str, Any]:
    """Return the fields that may influence what the engine computes, in the form of `flat_fields`."""
    fields_of = flat_fields(replace(config, kv_events=None, cache=replace(config.cache, block_files=None)))
    return {name: value for name, value in fields_of.items() if not f".{name}".endswith(_OF_NO_EFFECT)}
