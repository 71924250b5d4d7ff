"""Tables of other engines' keywords: vLLM's `LLM` and `EngineArgs`, nano-vllm's `LLM`, SGLang's speculation options.

A row says how this engine treats a keyword, which may be an argument in Python, a key of a YAML file or a command line
option. translate.py interprets the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-asc": "api_server_count",
    "-ac": "attention_config",
    "-cc": "compilation_config",
    "-O": "optimization_level",
    "-n": "nnodes",
    "-r": "node_rank",
    "-q": "quantization",
}
"""Short options of vLLM's command line."""

NO_SUCH_SETTING = "this engine has no such setting"
LEAVE_OUT = "leave it out"
IN_ONE_WAY = "images are read and processed in one way"
THE_SERVER_REASONS = "the server parses reasoning, see --reasoning-parser"


@dataclass(frozen=True, kw_only=True)
class OnCommandLine:
    """The command line syntax of a keyword. By default it is the option --word with one value."""

    switch: bool = False  # --word or --no-word, without a value
    several: bool = False  # several values in a row


@dataclass(frozen=True)
class WithoutEffect(OnCommandLine):
    """A keyword that is accepted and changes nothing. reason: why, for the warning."""

    reason: str
    anyway: tuple[Any, ...] = ()  # values that match this engine's behaviour, for which no warning is given


@dataclass(frozen=True)
class Honoured(OnCommandLine):
    """Another engine's keyword that has a meaning in this engine.

    At most one of `option`, `choices` and `read` says what a value becomes. If none does, every value is accepted and
    ignored, as the engine always does what the keyword asks for.
    """

    means: str  # description for the documents
    option: str | None = None  # this engine's option, which takes the value
    # for `option`: values with another name here, or WithoutEffect and its reason, by name in lower case; others are
    # passed on
    values: Mapping[str, str | WithoutEffect] = field(default_factory=dict)
    nothing: tuple[Any, ...] = ()  # values that set nothing, such as None
    # all allowed values with the options that they set; users may write names in lower case
    choices: Mapping[Any, Mapping[str, Any]] | None = None
    # Returns options, given the value and all keywords; or the name of a reader in `translate`.
    read: str | Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = ""


@dataclass(frozen=True)
class Only(OnCommandLine):
    """A keyword for an unsupported feature. A value that would use the feature is an error."""

    values: tuple[Any, ...]  # values that do not use the feature
    instead: str  # the alternative, for the error


@dataclass(frozen=True)
class Nested(OnCommandLine):
    """A keyword whose value is a dict with further keys."""

    rows: Mapping[str, Row]
    scalar: str | None = None  # the key that a plain integer or string stands for, if allowed


Row: TypeAlias = "Honoured | Only | WithoutEffect | Nested"
Rows: TypeAlias = "dict[str, Row]"


def written(names: str) -> dict[str, OnCommandLine]:
    """Return the command line syntax of each name in `names`, which are separated by spaces.

    `name?` is a switch, and `name*` takes several values; the result has the names without these signs.
    """
    return {
        name.rstrip("?*"): OnCommandLine(switch=name.endswith("?"), several=name.endswith("*"))
        for name in names.split()
    }


def same(names: str) -> Rows:
    """Return rows for options that have the same name and values in this engine. names: see `written`."""
    return {
        name: Honoured(f"`{name}`", name, switch=form.switch, several=form.several)
        for name, form in written(names).items()
    }


def only(instead: str, **values: Any) -> Rows:
    """Return rows for keywords of unsupported features.

    instead: the alternative that errors name. values: for each keyword, the allowed value or a tuple of the allowed
    values. A keyword whose allowed value is False is a switch on the command line.
    """
    return {
        name: Only(value if isinstance(value, tuple) else (value,), instead, switch=value is False)
        for name, value in values.items()
    }


def without_effect(names: str, reason: str = NO_SUCH_SETTING) -> Rows:
    """Return rows for keywords that are accepted and change nothing. names: see `written`."""
    return {
        name: WithoutEffect(reason, switch=form.switch, several=form.several) for name, form in written(names).items()
    }


EAGER: Mapping[str, Any] = {"mode": "eager"}
LEVELS = Honoured("`mode`: 0 is eager, 3 the default", choices={0: EAGER, 3: {}, "NONE": EAGER, "VLLM_COMPILE": {}})
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
CAPTURE_SIZES = Honoured("`capture_sizes` and `capture_token_sizes`", read="capture sizes", several=True)
LARGEST_CAPTURE: Rows = {
    "max_cudagraph_capture_size": WithoutEffect("the batches to capture follow from max_num_seqs and the memory")
}

CONFIG_KEYS: Rows = {
    "mode": LEVELS,
    "level": LEVELS,
    "cudagraph_mode": Honoured("`graph_mode`", choices={name: {"graph_mode": name.lower()} for name in GRAPH_MODES}),
    "use_cudagraph": Honoured("`graph_mode`", choices={True: {}, False: {"graph_mode": "none"}}),
    "full_cuda_graph": Honoured("`graph_mode`", choices={True: {"graph_mode": "full"}, False: {}}),
    "cudagraph_capture_sizes": CAPTURE_SIZES,
    "compile_ranges_endpoints": Honoured("`compile_ranges`", "compile_ranges"),
    "cache_dir": Honoured("`cache_dir`", "cache_dir", nothing=("",)),
    **LARGEST_CAPTURE,
    **only(LEAVE_OUT, backend=("", "inductor")),
    **without_effect(
        """
        pass_config custom_ops splitting_ops inductor_passes use_inductor_graph_partition ir_enable_torch_wrap
        compile_sizes inductor_compile_config use_inductor dynamic_shapes_config compile_cache_save_format
        debug_dump_path fast_moe_cold_start cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_specialize_lora
        compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets
        encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
        """
    ),
}

COMPILATION_KEYWORDS: Rows = {
    "enforce_eager": Honoured('`mode="eager"`', choices={True: EAGER, False: {}}, switch=True),
    "compilation_config": Nested(CONFIG_KEYS, scalar="mode"),
    "optimization_level": Honoured("`mode`: 0 is eager, others the default", choices={0: EAGER, 1: {}, 2: {}, 3: {}}),
    "cudagraph_capture_sizes": CAPTURE_SIZES,
    "cuda_graph_sizes": Honoured(
        "`capture_sizes` and `capture_token_sizes`; one value stands for 1, 2, 4 and the multiples of 8 up to it",
        read="sizes or the largest",
        several=True,
    ),
    **LARGEST_CAPTURE,
}
# Keywords without effect if enforce_eager disables compilation.
ABOUT_COMPILATION = frozenset(COMPILATION_KEYWORDS) - {"enforce_eager"}

OTHER_KERNELS = WithoutEffect("there are no kernels of this name; the default ones compute the same")
ATTENTION_BACKEND = Honoured(
    "`attention_backend`, in this engine's names; the default for kernels that it does not have",
    "attention_backend",
    {"triton_attn": "triton", "torch_sdpa": "torch", "flash_attn_vllm_v1": "flash_attn"}
    | {name: name for name in ("auto", "torch", "cpp", "triton", "flash_attn")}
    | dict.fromkeys(
        (
            *("flashinfer", "flashinfer_mla", "flashinfer_mla_sparse", "flashmla", "flashmla_sparse", "flash_attn_mla"),
            *("flash_attn_diffkv", "triton_mla", "cutlass_mla", "tokenspeed_mla", "hpc_attn", "xformers", "cpu_attn"),
            *("flex_attention", "tree_attn", "rocm_flash", "rocm_attn", "rocm_aiter_fa", "rocm_aiter_mla"),
            *("rocm_aiter_unified_attn", "rocm_aiter_triton_mla"),
        ),
        OTHER_KERNELS,
    ),
)
# Loaders of safetensors files that differ only in speed.
LOADERS = dict.fromkeys(
    ("fastsafetensors", "runai_streamer", "instanttensor"),
    WithoutEffect("safetensors files are mapped into memory"),
)
OTHER_FORMAT = WithoutEffect("a checkpoint's files in the Hugging Face format are read, not those in Mistral's")

HONOURED: Rows = {
    **same(
        "model tokenizer revision tokenizer_revision download_dir skip_tokenizer_init? device seed "
        "max_num_seqs max_num_batched_tokens gpu_memory_utilization block_size enable_prefix_caching? "
        "scheduling_policy logprobs_mode async_scheduling? logits_processors* enable_sleep_mode? "
        "tensor_parallel_size pipeline_parallel_size data_parallel_size runner convert pooler_config enable_lora? "
        "kv_offloading_size max_loras max_lora_rank max_cpu_loras language_model_only? mm_processor_cache_gb"
    ),
    "max_model_len": Honoured(
        '`max_model_len`; "auto" and -1 are the default; 4k is 4,000, and 4K is 4,096', read="length"
    ),
    "load_format": Honoured(
        "`load_format`; faster loaders of safetensors files are the default",
        "load_format",
        {**LOADERS, "mistral": OTHER_FORMAT},
    ),
    "speculative_config": Honoured("`speculative_config`", "speculative_config", nothing=({},)),
    "kv_events_config": Honoured("`kv_events_config`", "kv_events_config", nothing=({},)),
    "dtype": Honoured(
        "`dtype`; half, float and a `torch.dtype` as well",
        "dtype",
        {"half": "float16", "float": "float32", "float16": "float16", "bfloat16": "bfloat16", "float32": "float32"},
    ),
    "attention_backend": ATTENTION_BACKEND,
    "attention_config": Nested(
        {
            "backend": ATTENTION_BACKEND,
            **without_effect(
                """
                flash_attn_version use_prefill_decode_attention flash_attn_max_num_splits_for_cuda_graph
                tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization
                mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype use_non_causal flex_attn_block_m
                flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size use_fp4_indexer_cache
                """
            ),
        }
    ),
    "distributed_executor_backend": Honoured(
        "`distributed_executor`; mp is multiprocess, uni is in_process",
        choices={
            "mp": {"distributed_executor": "multiprocess"},
            "uni": {"distributed_executor": "in_process"},
            **{name: {"distributed_executor": name} for name in ("auto", "in_process", "multiprocess", "ray")},
        },
    ),
    "model_impl": Honoured(
        "`model_impl`; vllm is auto",
        choices={"vllm": {"model_impl": "auto"}}
        | {name: {"model_impl": name} for name in ("auto", "textbook", "transformers")},
    ),
    "quantization": Honoured(
        "`quantization`; the name of a format is an error unless the checkpoint states it",
        "quantization",
        {"fp8_per_tensor": "fp8", "fp8_per_block": "fp8_block"},
    ),
    "kv_cache_dtype": Honoured(
        "`kv_cache_dtype`; `int8_per_token_head` is `int8`; `fp8` needs a compiled mode, except with latent "
        "attention, and, with `triton`, compute capability 8.9; `int8` also runs in eager mode",
        choices={
            name: {"kv_cache_dtype": kept}
            for name, kept in {
                **{name: name for name in ("auto", "int8", "fp8", "fp8_e4m3")},
                "int8_per_token_head": "int8",
            }.items()
        },
    ),
    "num_gpu_blocks_override": Honoured("`num_blocks`", "num_blocks"),
    "override_pooler_config": Honoured("`pooler_config`", "pooler_config"),
    "kvcache_block_size": Honoured("`block_size`", "block_size"),
    "num_kvcache_blocks": Honoured("`num_blocks`; -1 is what fits", "num_blocks", nothing=(-1,)),
    "device_ids": Honoured("`device`, for a list of one", read="one device"),
    "generation_config": Honoured('`generation_config`; "vllm" is "none"', "generation_config", {"vllm": "none"}),
    "profiler_config": Nested(
        {
            "torch_profiler_dir": Honoured("`profile_dir`", "profile_dir", nothing=("",)),
            **only("run the script under nsys, for example", profiler=("torch",)),
            **without_effect(
                """
                torch_profiler_with_stack torch_profiler_with_flops torch_profiler_use_gzip
                torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_with_memory
                ignore_frontend delay_iterations max_iterations warmup_iterations active_iterations wait_iterations
                """,
                "a profile records every step from start_profile() to stop_profile()",
            ),
        }
    ),
    "structured_outputs_config": Nested(
        {
            **only(
                "give it to SamplingParams(structured_outputs=...)",
                disable_any_whitespace=False,
                disable_additional_properties=False,
            ),
            **without_effect("backend disable_fallback"),
            **without_effect("reasoning_parser reasoning_parser_plugin enable_in_reasoning", THE_SERVER_REASONS),
        }
    ),
    "disable_log_stats": Honoured(
        "nothing is logged; `metrics()` and `RequestOutput.metrics` are always there", switch=True
    ),
    "max_logprobs": Honoured("any number of logprobs is allowed"),
    "limit_mm_per_prompt": Honoured(
        "`limit_mm_per_prompt`, of which images count: other media are never read",
        "limit_mm_per_prompt",
        nothing=({},),
    ),
    "mm_processor_kwargs": Honoured("`mm_processor_kwargs`", "mm_processor_kwargs", nothing=({},)),
    "allowed_media_domains": Honoured(
        "`allowed_media_domains`; without it no host is asked", "allowed_media_domains", nothing=([],), several=True
    ),
    "allowed_local_media_path": Honoured("`allowed_local_media_path`", "allowed_local_media_path", nothing=("",)),
    "disable_cascade_attn": Honoured("there is no cascade attention", switch=True),
    "tokenizer_mode": Honoured(
        "the checkpoint's fast tokenizer",
        values={"mistral": OTHER_FORMAT},
        choices={"auto": {}, "hf": {}},
    ),
    "config_format": Honoured("config.json", values={"mistral": OTHER_FORMAT}, choices={"auto": {}, "hf": {}}),
    **{
        name: Honoured("`hf_overrides`", read="overrides")
        for name in ("hf_overrides", "json_model_override_args", "rope_scaling", "rope_theta")
    },
    "hf_token": Honoured("the token that huggingface_hub finds, HF_TOKEN for one", read="no token"),
    **COMPILATION_KEYWORDS,
}

# Speculation options of vLLM before speculative_config, and of SGLang.
OPTIONS_OF_DRAFTS = """
    spec_method spec_model spec_tokens speculative_model num_speculative_tokens

    speculative_model_quantization speculative_draft_tensor_parallel_size speculative_max_model_len
    speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method

    speculative_algorithm speculative_draft_model_path speculative_draft_model_revision
    speculative_draft_model_quantization speculative_num_steps speculative_num_draft_tokens speculative_eagle_topk
    speculative_token_map speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_attention_mode speculative_ngram_min_match_window_size speculative_ngram_max_match_window_size
    speculative_adaptive
"""

# Keys of vLLM's speculative_config that this engine lacks.
OTHER_KEYS_OF_DRAFTS = """
    enforce_eager max_model_len quantization attention_backend moe_backend draft_load_config code_revision
    speculative_token_tree parallel_drafting disable_padded_drafter_batch draft_sample_method acceptance_method
    posterior_threshold posterior_alpha suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
"""
KEYS_OF_DRAFTS: dict[str, Only] = {
    **dict.fromkeys(OTHER_KEYS_OF_DRAFTS.split(), Only((False,), LEAVE_OUT)),
    "disable_by_batch_size": Only(
        (False,), "give enable_adaptive_verification: True, with which a step has as many drafts as pay"
    ),
    "tensor_parallel_size": Only((False,), "give draft_tensor_parallel_size"),
    "use_heterogeneous_vocab": Only((False,), "give a draft model of the same vocabulary"),
}

# The extension of vLLM's workers whose methods `collective_rpc` has.
OPENRLHF_EXTENSION = "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"

# Unsupported features, with the values that do not use them.
NOT_SUPPORTED: Rows = {
    **only(
        LEAVE_OUT,
        code_revision=(),
        diffusion_config=({},),
        kv_transfer_config=(),
        ec_transfer_config=(),
        model_class_overrides=({},),
        scheduler_cls=(),
        worker_cls="auto",
        enable_return_routed_experts=False,
        return_sampling_mask=False,
        aux_output_config=({},),
        watermark_config=(),
        io_processor_plugin=(),
    ),
    **only(
        "leave it out: an extension reaches into vLLM's worker; collective_rpc() calls functions of yours on each rank",
        worker_extension_cls=("", OPENRLHF_EXTENSION),
    ),
    **only(
        "give tensor_parallel_size, pipeline_parallel_size or data_parallel_size",
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
    ),
    **only(
        "start the engine once, on one host or with distributed_executor_backend='ray'",
        nnodes=1,
        node_rank=0,
        data_parallel_rank=(),
        data_parallel_start_rank=(),
        data_parallel_hybrid_lb=False,
        data_parallel_external_lb=False,
    ),
    **only("give quantization", quantization_config=({},)),
    **only("give kv_cache_dtype='int8'", calculate_kv_scales=False),
    **only("give num_blocks, or gpu_memory_utilization", kv_cache_memory_bytes=()),
    **only(
        "give speculative_config, a dict with method, num_speculative_tokens and model, see docs/speculation.md",
        **dict.fromkeys(OPTIONS_OF_DRAFTS.split(), ()),
    ),
    **only("give runner and convert", task=("auto", "generate")),
    **only("give token ids", enable_prompt_embeds=False),
    **only(
        "give enable_lora, and lora_request=LoRARequest(name, 1, path) to each call, or --lora-modules name=path to "
        "compiled-engine serve",
        lora_modules=([],),
    ),
    **only(
        "use a smaller model or a device with more memory",
        cpu_offload_gb=0,
        offload_group_size=0,
    ),
    **only("leave it out: the engine itself keeps blocks in host memory", kv_offloading_backend="native"),
    **only("update_weights() takes a folder, or tensors; `serve` has the option", weight_transfer_config=()),
    **only(
        "give hf_overrides, or change the checkpoint's config.json",
        hf_config=(),
        hf_config_path=(),
        override_attention_dtype=(),
        disable_sliding_window=False,
    ),
    **only("give its fields as keywords", vllm_config=()),
    **only("give SamplingParams(stop_token_ids=...)", eos=-1),
    **only("put weights and configuration into one folder", model_weights=""),
    **only("give SamplingParams", override_generation_config=({},)),
    **only("give it to chat(chat_template=...)", chat_template=()),
}

# Keywords without effect. Specific reasons name an alternative, or say that nothing is lost.
WITHOUT_EFFECT: Rows = {
    "enable_chunked_prefill": WithoutEffect("long prompts are always computed in chunks", anyway=(True,), switch=True),
    **without_effect(
        "trust_remote_code?",
        "no code of a checkpoint is ever run: the model's code is the engine's own or that of transformers",
    ),
    **without_effect(
        """
        enable_expert_parallel? enable_ep_weight_filter? moe_backend all2all_backend enable_elastic_ep? eplb_config
        enable_eplb? expert_placement_strategy
        """,
        "there is no expert parallelism: each rank has a part of every expert, as of an MLP",
    ),
    **without_effect(
        """
        enable_mm_embeds? interleave_mm_strings? media_io_kwargs mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_only? mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin skip_mm_profiling? video_pruning_rate disable_chunked_mm_input?
        enable_mm_processor_stats? disable_mm_preprocessor_cache? mm_hasher_algorithm video_pruning_method
        mm_processor_device mm_device_do_normalize? ec_manager_config mm_tensor_ipc mm_ipc_gpu_memory_gb
        default_mm_loras enable_tower_connector_lora?
        """,
        IN_ONE_WAY,
    ),
    **without_effect("kv_cache_dtype_skip_layers*", "kv_cache_dtype applies to all layers"),
    **without_effect(
        """
        offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step offload_params
        swap_space
        """,
        "nothing is offloaded",
    ),
    **without_effect("reasoning_parser reasoning_parser_plugin reasoning_config enable_reasoning?", THE_SERVER_REASONS),
    **without_effect(
        """
        aggregate_engine_logging? show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces*
        kv_cache_metrics? kv_cache_metrics_sample cudagraph_metrics? enable_layerwise_nvtx_tracing?
        enable_mfu_metrics? enable_logging_iteration_details? custom_histogram_buckets* per_request_spec_decode_metrics?
        logging_config log_level log_config_file enable_trace_replay?
        """,
        "see metrics(), get_metrics() and start_profile()",
    ),
    **without_effect(
        """
        master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind? numa_bind_nodes*
        numa_bind_cpus* data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_multi_port_external_lb? data_parallel_backend dcp_comm_backend dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size disable_nccl_for_dp_synchronization? disable_custom_all_reduce?
        ray_workers_use_nsight? worker_use_ray? max_parallel_loading_workers enable_dbo? ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold dcp_q_replicate dp_sync_interval enable_hc_sp?
        enable_batch_sharded_sampling? elastic_ep_max_dp_size enable_nccl_comm_suspend? enable_fault_tolerance?
        fault_tolerance_config watchdog_config enable_shm_tensor_arena?

        served_model_name shutdown_timeout stream_interval tokens_only? renderer_num_workers tokenizer_pool_size
        _api_process_count _api_process_rank

        mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend
        enable_mamba_cache_stochastic_rounding? mamba_cache_philox_rounds gdn_prefill_backend mamba_ssu_algorithm
        enable_mamba_shared_prefix_checkpoint? use_replayssm? replayssm_buffer_len kda_prefill_backend
        kda_decode_backend engram_config

        fully_sharded_loras? lora_dtype lora_target_modules* specialize_active_lora? enable_mixed_moe_lora_format?
        enable_moe_shared_loras? max_lora_cls_labels

        allow_deprecated_quantization? safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size model_loader_extra_config ignore_patterns* pt_load_map_location
        use_tqdm_on_load?

        linear_backend ir_op_priority kernel_config enable_flashinfer_autotune? use_fp64_gumbel? performance_mode
        kv_sharing_fast_prefill? jit_monitor_mode jit_monitor_verbose? sparse_indexer_topk_backend monokernel?

        max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold scheduler_reserve_full_isl?
        prefill_schedule_interval watermark disable_hybrid_kv_cache_manager? prefix_caching_hash_algo
        num_scheduler_steps use_v2_block_manager? preemption_mode scheduler_delay_factor disable_async_output_proc?
        long_prefill_token_threshold_adaptive? max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs
        max_num_queued_tokens prefix_cache_retention_interval prefix_match_unit swa_bounded_replay?

        max_seq_len_to_capture guided_decoding_backend additional_config enable_cumem_allocator?
        fail_on_environ_validation? sleep_mode_backend sleep_mode_offload_cudagraph? sleep_preserve_parameter_names
        """
    ),
}

KEYWORDS: Rows = {**HONOURED, **NOT_SUPPORTED, **WITHOUT_EFFECT}
