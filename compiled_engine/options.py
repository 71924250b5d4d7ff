"""The options of an engine as the user gives them. resolve/ converts them to a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.pooling import PoolerConfig
from compiled_engine.quantisation_names import METHODS, ONLINE
from compiled_engine.schema import (
    SWITCH,
    TEXTS,
    Kind,
    a_list,
    check_all,
    declare,
    documented,
    integer,
    number,
    one_of,
    path,
    require,
    sizes,
    switch,
    text,
)

if TYPE_CHECKING:
    from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory

CHECKPOINT = path("the path of a folder, org/name of the Hugging Face Hub, or None", format="checkpoint")
FOLDER = path("the path of a folder, or None")
REVISION = text("a branch, tag or commit, or None")
# Checked when it is resolved, against the devices of the machine.
DEVICE = Kind(lambda name, value: value, {"type": "string"})
POOLER_CONFIG = Kind(lambda name, value: PoolerConfig.of(value), {"type": "string"})
OBJECT = Kind(
    require("a dict, or one as JSON", lambda value: isinstance(value, Mapping | str)),
    {"anyOf": [{"type": "string"}, {"type": "object"}]},
)
OVERRIDES = Kind(
    require("a dict of values of config.json, or one as JSON", lambda value: isinstance(value, Mapping | str)),
    {"anyOf": [{"type": "string"}, {"type": "object"}]},
)
DOMAINS = a_list(
    {"type": "string"},
    "a host such as images.example, or host:port",
    lambda domain: re.fullmatch(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?", domain) is not None,
)
BLOCK_SIZE = Kind(lambda name, value: value, {"anyOf": [{"type": "integer"}, {"const": "auto"}]})


def _either(names: Iterable[str]) -> str:
    *others, last = (f"`{name}`" for name in names)
    return f"{', '.join(others)} or {last}"


@dataclass(frozen=True)
class EngineOptions:
    """The keyword arguments of `LLM`; "auto" and None leave the choice to `resolve`.

    Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    model: str | Path | None = declare(
        None,
        CHECKPOINT,
        "checkpoint folder in Hugging Face layout, or `org/name` or `org/name@revision` of the Hugging Face Hub",
        default_is="the bundled model",
    )
    tokenizer: str | Path | None = declare(
        None, CHECKPOINT, "folder or name of the tokenizer, when it is not the model's"
    )
    revision: str | None = declare(
        None, REVISION, "branch, tag or commit of a model from the hub", default_is="its main branch"
    )
    tokenizer_revision: str | None = declare(None, REVISION, "the same for the tokenizer")
    download_dir: str | Path | None = declare(
        None, FOLDER, "where files from the hub are kept", default_is="huggingface_hub's own cache"
    )
    skip_tokenizer_init: bool = declare(False, SWITCH, "load no tokenizer: prompts are token ids, outputs have no text")
    mode: str = declare(
        "auto",
        one_of("auto", "eager", "compiled", "graphed"),
        "`eager`, `compiled` or `graphed`",
        "on a CPU auto is graphed where the calls of decodes can be recorded, else compiled; where nothing can be "
        "compiled it is eager, with a warning",
        default_is="graphed, as far as the device and the model allow",
    )
    dtype: str = declare(
        "auto",
        one_of("auto", "float32", "float", "bfloat16", "float16", "half"),
        "`float32` or `float`, `bfloat16`, `float16` or `half`",
        default_is="float32 on a CPU, the checkpoint's on CUDA",
    )
    device: str = declare("auto", DEVICE, "`cpu`, `cuda` or `cuda:N`", default_is="CUDA where there is a GPU")
    max_model_len: int | None = declare(
        None, integer(most=1 << 24), "most tokens of prompt and output together", default_is="the model's own limit"
    )
    # CUDA's largest grid dimension.
    max_num_seqs: int | None = declare(
        None,
        integer(most=65535),
        "most requests in a step",
        default_is="256 on CUDA, 64 on a CPU, fewer with large recurrent states",
    )
    max_num_batched_tokens: int | None = declare(
        None, integer(most=1 << 20), "most tokens in a step", default_is="8192 on CUDA, 2048 on a CPU"
    )
    max_prefill_tokens: int | None = declare(
        None,
        integer(most=1 << 20),
        "most prompt tokens in a step that also generates for other requests",
        "a lower bound favours running requests over new prompts; with eight or more waiting it is scaled by a quarter "
        "of their number",
        default_is="as many as the step has room for",
    )
    block_size: int | str = declare(
        "auto", BLOCK_SIZE, "tokens in a KV cache block", "at most 65,536", default_is="the attention backend's own"
    )
    kv_cache_dtype: str = declare(
        "auto",
        one_of("auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"),
        "[store keys and values in 8 bits](quantisation.md#the-kv-cache): `int8` or `int8_per_token_head`, "
        "`fp8` or `fp8_e4m3`",
        default_is="the model's dtype",
    )
    num_blocks: int | None = declare(
        None, integer(most=2**31 - 1), "size of the KV cache in blocks", default_is="as many as fit into memory"
    )
    gpu_memory_utilization: float = declare(
        0.9,
        number("above 0 and at most 1", lambda share: 0 < share <= 1),
        "share of the GPU's memory to use, weights included; no meaning on a CPU",
    )
    enable_prefix_caching: bool = declare(
        True, SWITCH, "reuse the KV cache of prompts with a common prefix", flag="--no-prefix-caching"
    )
    kv_offloading_size: float | None = declare(
        None,
        number("at least 0", lambda size: size >= 0),
        "host memory in GiB for [blocks that the prefix cache evicts](prefix_caching.md#host-memory), of all ranks "
        "together and for each replica",
        default_is="none are kept",
    )
    kv_offloading_folder: str | Path | None = declare(
        None,
        path(),
        "folder for [files of these blocks](prefix_caching.md#files), which a later start reads",
        default_is="no files are written",
    )
    kv_offloading_folder_size: float = declare(
        32,
        number("above 0", lambda size: size > 0),
        "most GiB of these files, of all ranks together and for each replica",
    )
    kv_events_config: Mapping[str, Any] | str | None = declare(
        None,
        OBJECT,
        "[publish which blocks the prefix cache has](prefix_caching.md#events): a dict with `enable_kv_cache_events`, "
        "`endpoint` and more, on the command line as JSON",
        default_is="nothing is published",
    )
    num_state_snapshots: int | None = declare(
        None,
        integer(0, 1 << 20),
        "[snapshots of recurrent states](models.md#recurrences) that the prefix cache keeps; 0 turns it off for models "
        "with recurrences",
        default_is="as many as fit into 4 GiB on CUDA, 256 MiB on a CPU, at most 8 for each of `max_num_seqs`",
    )
    scheduling_policy: str = declare(
        "fcfs", one_of("fcfs", "priority"), "`fcfs` (first come, first served) or `priority`"
    )
    async_scheduling: bool | None = declare(
        None,
        switch("True, False or None"),
        "launch a step before the results of the one before it are known",
        default_is="on CUDA",
    )
    speculative_config: Mapping[str, Any] | str | None = declare(
        None,
        OBJECT,
        "[verify drafts of several tokens in a step](speculation.md): a dict with `method`, `num_speculative_tokens` "
        "and more, on the command line as JSON",
        default_is="one token a step",
    )
    logprobs_mode: str = declare(
        "raw_logprobs",
        one_of("raw_logprobs", "processed_logprobs"),
        "log-probabilities of tokens are those of the model, `raw_logprobs`, or those from which tokens are drawn, "
        "after biases, penalties, temperature and filters, `processed_logprobs`",
        "those of prompts are always the model's",
    )
    batch_invariant: bool = declare(
        False,
        SWITCH,
        "give a request [the same bits](rollouts.md#batch-invariance) whatever shares its steps",
    )
    seed: int = declare(0, integer(-(2**63), 2**64 - 1), "seed of random weights, and of requests without a seed")
    load_format: str = declare(
        "auto",
        one_of("auto", "safetensors", "dummy"),
        "`safetensors`, or `dummy` for random weights",
        default_is="safetensors",
    )
    quantization: str | None = declare(
        None,
        one_of(*dict.fromkeys((*ONLINE, *METHODS))),
        f"quantise linears [while they are loaded](quantisation.md): {_either(ONLINE)}; or require that the checkpoint "
        f"is quantised, by its format: {_either([name for name in METHODS if name not in ONLINE])}",
        default_is="what the checkpoint states",
    )
    quantization_ignore: tuple[str, ...] = declare(
        (),
        TEXTS,
        "leave these modules as they are: names, or `re:` and a regular expression",
        default_is="`lm_head` and the routers of experts",
    )
    enable_sleep_mode: bool = declare(
        False,
        SWITCH,
        "let the engine [sleep](rollouts.md#sleep): give back the memory of its KV cache and its weights for a while",
        "a GPU needs the package `cuda-bindings`, which comes with PyTorch",
    )
    enable_lora: bool = declare(False, SWITCH, "let each request have a [LoRA adapter](adapters.md) of its own")
    max_loras: int = declare(1, integer(most=256), "adapters that a step may have, each in a slot on the device")
    max_lora_rank: int = declare(16, integer(most=512), "largest rank of an adapter; each slot has memory for it")
    max_cpu_loras: int | None = declare(
        None,
        integer(most=1 << 16),
        "adapters to keep in host memory",
        "those that requests use are kept beyond it",
        default_is="max_loras",
    )
    merge_adapter: str | Path | None = declare(
        None,
        CHECKPOINT,
        "merge this [LoRA adapter](adapters.md) into the weights while they are loaded: a folder, or `org/name` or "
        "`org/name@revision` of the Hugging Face Hub",
    )
    model_impl: str = declare(
        "auto",
        one_of("auto", "textbook", "transformers"),
        "[source of the model's code](models.md): `textbook` or `transformers`",
        default_is="textbook if it has the architecture",
    )
    hf_overrides: Mapping[str, Any] | str | None = declare(
        None,
        OVERRIDES,
        "[values in the place of those in config.json](models.md#values-of-configjson): a dict, on the command line as "
        "JSON",
        default_is="the checkpoint's",
    )
    runner: str = declare(
        "auto",
        one_of("auto", "generate", "pooling"),
        "`generate` text, or compute [embeddings and scores](pooling.md): `pooling`",
        default_is="pooling if the checkpoint is made for it",
    )
    convert: str = declare(
        "auto",
        one_of("auto", "none", "embed", "classify"),
        "how to use a pooling model: `embed`, `classify`, or `none`, which is auto",
        default_is="classify for a classifier, and a reranker that says so",
    )
    pooler_config: str | Mapping[str, Any] | PoolerConfig | None = declare(
        None,
        POOLER_CONFIG,
        "override the [pooling](pooling.md#the-folder) of the checkpoint: a JSON object",
        "in Python also a dict, or a `PoolerConfig`",
        default_is="the checkpoint's",
    )
    language_model_only: bool = declare(
        False,
        SWITCH,
        "run only the text model of a multimodal checkpoint: its tower is not read, prompts have no images",
    )
    encoder_cache_size: int | None = declare(
        None,
        integer(most=1 << 24),
        "embeddings of images, or encoder positions of clips, to keep on the device",
        default_is="max_num_encoder_input_tokens, or those of the largest image if it has more",
    )
    max_num_encoder_input_tokens: int | None = declare(
        None,
        integer(most=1 << 24),
        "most embeddings of images, or encoder positions of clips, that a step computes",
        "a larger image has a step of its own",
        default_is="max_num_batched_tokens",
    )
    limit_mm_per_prompt: Mapping[str, Any] | str | None = declare(
        None, OBJECT, '[most images of a prompt](multimodal.md#limits): `{"image": 4}`', default_is="999"
    )
    mm_processor_kwargs: Mapping[str, Any] | str | None = declare(
        None,
        OBJECT,
        '[arguments of the image processor](multimodal.md#the-processor), such as `{"max_pixels": 1003520}`',
        default_is="the checkpoint's",
    )
    mm_processor_cache_gb: float = declare(
        4.0,
        number("at least 0", lambda size: size >= 0),
        "memory for processed images on the host in GiB, in each process that takes requests",
    )
    max_image_pixels: int = declare(1 << 26, integer(most=178_956_970), "pixels of an image, before it is decoded")
    image_workers: int | None = declare(
        None, integer(most=64), "processes that decode and process images", default_is="half of the cores, 1 to 4"
    )
    audio_workers: int | None = declare(
        None,
        integer(most=64),
        "processes that decode [audio](speech.md) and compute its features",
        default_is="half of the cores, 1 to 4",
    )
    audio_features: str = declare(
        "auto",
        one_of("auto", "device", "workers"),
        "where the [features of clips](speech.md#features) are computed: `device` or `workers`",
        default_is="device on CUDA, workers on a CPU",
    )
    allowed_media_domains: tuple[str, ...] = declare(
        (),
        DOMAINS,
        "[host from which images are fetched](multimodal.md#urls), or `host:port`",
        "without this option none are fetched",
    )
    allowed_local_media_path: str | Path | None = declare(
        None, FOLDER, "folder whose images `file:` URLs may name", default_is="none may"
    )
    attention_backend: str = declare(
        "auto",
        one_of("auto", "torch", "cpp", "triton", "flash_attn"),
        "`torch`, `cpp`, `triton` or `flash_attn`",
        default_is="triton on CUDA, cpp on a CPU",
    )
    passes: tuple[str, ...] | None = declare(
        None, TEXTS, "run these FX passes", "in their own order", flag="--pass", default_is="all"
    )
    disable_passes: tuple[str, ...] = declare((), TEXTS, "leave out these FX passes", flag="--disable-pass")
    plugins: tuple[str, ...] = declare(
        (),
        TEXTS,
        "import these modules in each process of the engine, so that their registrations take effect",
        "[passes](passes.md) of the user's own",
        flag="--plugin",
    )
    strict_passes: bool = declare(False, SWITCH, "fail if a pass matches less often than it must")
    verify_passes: bool = declare(
        False, SWITCH, "execute every rewrite on random inputs, before and after, and compare both with an fp32 oracle"
    )
    compile_ranges: tuple[int, ...] | None = declare(
        None,
        sizes(),
        "compile a separate version for batches of up to this many tokens",
        flag="--compile-range",
        default_is="64; on a CPU only for textbook models in fp32, without experts or quantised linears, with "
        "`tensor_parallel_size` 1",
    )
    compile_workers: int | None = declare(
        None,
        integer(0),
        "processes that compile; 0 compiles in this one",
        default_is="0 below four cores, then half of them, at most 8",
    )
    graph_mode: str = declare(
        "auto",
        one_of("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "breakable", "recorded"),
        "content of CUDA graphs: `none`, `piecewise`, `full`, `full_decode_only`, `full_and_piecewise` or `breakable`; "
        "on a CPU `none` or `recorded`",
        "see [cuda_graphs.md](cuda_graphs.md)",
        default_is="follows from `mode`",
    )
    capture_sizes: tuple[int, ...] | None = declare(
        None,
        sizes(),
        "batches of decodes to capture as full CUDA graphs, by their number",
        flag="--capture-size",
        default_is="1, 2, 4, 8, 16, 24 and so on",
    )
    capture_token_sizes: tuple[int, ...] | None = declare(
        None,
        sizes(),
        "the same for batches with prefills, by their tokens",
        "graphs around attention end there, or at `max_num_seqs` if that is more",
        flag="--capture-token-size",
        default_is="the same rule, with wider steps above 512",
    )
    cache_dir: str | Path | None = declare(
        None, FOLDER, "folder of compiled models", default_is="`~/.cache/compiled_engine`"
    )
    compile_cache: bool = declare(True, SWITCH, "keep compiled models", flag="--no-cache")
    generation_config: str = declare(
        "auto", one_of("auto", "none"), "`auto` takes the checkpoint's defaults for sampling, `none` ignores them"
    )
    tensor_parallel_size: int = declare(
        1,
        integer(most=1024),
        "devices that compute each layer together, one process a device",
        "see [scaling](scaling.md)",
    )
    pipeline_parallel_size: int = declare(
        1,
        integer(most=16),
        "pipeline stages of the layers, each on separate devices",
        "see [scaling](scaling.md#stages-of-layers)",
    )
    data_parallel_size: int = declare(
        1,
        integer(most=1024),
        "replicas of the model, each on separate devices; requests are divided among them",
        "see [scaling](scaling.md#replicas)",
    )
    sequence_parallel: bool = declare(
        False,
        SWITCH,
        "with several devices a layer, each normalises a share of the tokens of long prefills",
        "see [scaling](scaling.md#sequence-parallelism)",
    )
    collectives: str = declare(
        "auto",
        one_of("auto", "nccl"),
        "how all-reduces between GPUs are carried out: `auto` or `nccl`",
        default_is="symmetric memory if GPUs can access each other's",
    )
    distributed_executor: str = declare(
        "auto",
        one_of("auto", "in_process", "multiprocess", "ray"),
        "`in_process`, `multiprocess` or [`ray`](scaling.md#several-hosts-ray)",
        default_is="in_process for one device, else multiprocess",
    )
    logits_processors: tuple[LogitsProcessor | LogitsProcessorFactory | str, ...] = declare(
        (),
        TEXTS,
        "call the user's own [logits processors](logits_processors.md), in this order: `package.module:Name`",
        "in Python also objects, classes or functions that make one",
        flag="--logits-processor",
    )
    profile_dir: str | Path = declare(
        "profiles",
        path(),
        "folder of the traces of `LLM.stop_profile()`",
        "`AsyncLLM` records none; `bench step --profile` names its own folder",
    )

    def __post_init__(self) -> None:
        check_all(self)


EngineOptions.__doc__ = documented(EngineOptions)
