"""What a user may ask of the engine, before anything is resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory


@dataclass(frozen=True)
class EngineOptions:
    """The keyword arguments of `LLM`; "auto" and None leave the choice to `resolve`.

    model: checkpoint folder in Hugging Face layout, or org/name or org/name@revision of the Hugging Face Hub; None is
        the bundled model. revision: branch, tag or commit of a model from the hub; None for its main branch.
    tokenizer: folder or name of the tokenizer, when it is not the model's. tokenizer_revision: as revision.
    download_dir: where files from the hub are kept, instead of huggingface_hub's own cache.
    skip_tokenizer_init: load no tokenizer; prompts are then token ids, and outputs have no text.
    mode: eager | compiled | graphed | auto, the shorthand for compile on or off and the graph mode.
    dtype: auto | float32 | bfloat16 | float16.
    device: auto | cpu | cuda | cuda:N.
    max_model_len: most tokens of prompt and output together.
    max_num_seqs: most requests in one step.
    max_num_batched_tokens: most tokens in one step (the token budget).
    max_prefill_tokens: most tokens of prompts in a step that other requests run in: less holds up their next tokens
        less, and prompts more. With eight or more requests waiting it is so much for each four of them. None for as
        many as the step has room for.
    block_size: tokens in a KV cache block, or "auto" for the attention backend's own.
    num_blocks: size of the KV cache in blocks, instead of what fits into memory.
    gpu_memory_utilization: share of the device's memory that the engine may use, weights included.
    scheduling_policy: fcfs | priority.
    async_scheduling: launch a step before the results of the one before it are known; None: on CUDA.
    load_format: auto | safetensors | dummy (random weights).
    model_impl: auto | textbook | transformers: whose code the model is; auto takes the textbook's where there is one.
    attention_backend: auto | torch | triton | flash_attn.
    passes: the FX passes to run, by name; None for all. disable_passes: those to leave out.
    strict_passes: an error if a pass matches less often than it must in a known model family.
    verify_passes: execute every rewrite on random inputs, before and after, against an fp32 oracle.
    compile_ranges: token counts up to which the model is compiled once more for small batches, such as (8, 64);
        () for none, None for what pays on the device.
    compile_workers: processes that compile; 0 compiles in this one, None chooses by the number of cores.
    graph_mode: auto | none | piecewise | full | full_decode_only | full_and_piecewise | breakable: what CUDA graphs
        hold, instead of what `mode` stands for; on a CPU auto | none | recorded.
    capture_sizes: numbers of decodes to capture as full CUDA graphs, instead of the default rule.
    capture_token_sizes: the same for batches with prefills, by their tokens.
    background_capture: capture between the steps of the first requests instead of before them.
    cache_dir: where compiled artifacts are kept; compile_cache False keeps none.
    generation_config: auto (the checkpoint's defaults for sampling) | none.
    tensor_parallel_size: devices that compute each layer together, one process a device.
    pipeline_parallel_size: stages that the layers are divided into, each on devices of its own.
    data_parallel_size: replicas of the model, each on devices of its own; requests are divided among them.
    sequence_parallel: with several devices a layer, each normalises a share of the tokens of long prefills.
    collectives: auto | nccl: what carries sums between GPUs; auto is symmetric memory where they reach each other's.
    distributed_executor: auto | in_process | multiprocess | ray: who runs the devices; auto is in_process for one. With
        ray, replicas are on the nodes of a Ray cluster.
    logits_processors: the user's own, in the order of their calls (see LogitsProcessor): objects, classes or functions
        that make one, or "package.module:Name" for any of these.
    profile_dir: where `LLM.stop_profile` writes.
    """

    model: str | Path | None = None
    tokenizer: str | Path | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | Path | None = None
    skip_tokenizer_init: bool = False
    mode: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_tokens: int | None = None
    block_size: int | str = "auto"
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    seed: int = 0
    load_format: str = "auto"
    model_impl: str = "auto"
    attention_backend: str = "auto"
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    strict_passes: bool = False
    verify_passes: bool = False
    compile_ranges: tuple[int, ...] | None = None
    compile_workers: int | None = None
    graph_mode: str = "auto"
    capture_sizes: tuple[int, ...] | None = None
    capture_token_sizes: tuple[int, ...] | None = None
    background_capture: bool = False
    cache_dir: str | Path | None = None
    compile_cache: bool = True
    generation_config: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    collectives: str = "auto"
    distributed_executor: str = "auto"
    logits_processors: tuple[LogitsProcessor | LogitsProcessorFactory | str, ...] = ()
    profile_dir: str | Path = "profiles"
