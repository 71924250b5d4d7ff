"""Keywords of other engines that change nothing here, by the reason why."""

from __future__ import annotations

from compiled_engine.other_engines.rows import Row, WithoutEffect, without_effect

WITHOUT_EFFECT: dict[str, Row] = {
    "enable_chunked_prefill": WithoutEffect("prompts are computed in chunks where others run", anyway=(True,))
} | without_effect(
    {
        "no code of a checkpoint is ever run: a model is of a family that the engine or transformers has": """
            trust_remote_code
        """,
        "the processes of an engine run on one host and need no address": """
            master_addr master_port node_rank distributed_timeout_seconds
            cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus data_parallel_rank
            data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
            data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
            dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
            disable_nccl_for_dp_synchronization disable_custom_all_reduce ray_workers_use_nsight worker_use_ray
            max_parallel_loading_workers enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
            mm_tensor_ipc mm_ipc_gpu_memory_gb dcp_q_replicate dp_sync_interval enable_hc_sp
            enable_batch_sharded_sampling elastic_ep_max_dp_size enable_nccl_comm_suspend enable_fault_tolerance
            fault_tolerance_config watchdog_config enable_shm_tensor_arena
        """,
        "it is about a server; see docs/serving.md": """
            served_model_name allowed_local_media_path allowed_media_domains tokens_only renderer_num_workers
            shutdown_timeout stream_interval _api_process_count _api_process_rank tokenizer_pool_size
        """,
        "experts are divided like an MLP, each rank having a part of all: there is no expert parallelism": """
            enable_expert_parallel enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep eplb_config
            enable_eplb expert_placement_strategy
        """,
        "no model has state-space or linear-attention layers": """
            mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend
            enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend mamba_ssu_algorithm
            enable_mamba_shared_prefix_checkpoint use_replayssm replayssm_buffer_len kda_prefill_backend
            kda_decode_backend engram_config
        """,
        "models are for text alone": """
            language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs
            mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate
            disable_chunked_mm_input enable_mm_processor_stats disable_mm_preprocessor_cache mm_hasher_algorithm
            video_pruning_method mm_processor_device mm_device_do_normalize ec_manager_config
        """,
        "there are no LoRA adapters": """
            max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
            enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
            max_lora_cls_labels
        """,
        "nothing is quantised": "allow_deprecated_quantization kv_cache_dtype_skip_layers",
        "nothing is offloaded": """
            offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step offload_params
            kv_offloading_backend swap_space
        """,
        "safetensors files are mapped into memory": """
            safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
            model_loader_extra_config ignore_patterns pt_load_map_location use_tqdm_on_load
        """,
        "kernels come from attention_backend and the passes": """
            linear_backend ir_op_priority kernel_config enable_flashinfer_autotune use_fp64_gumbel performance_mode
            kv_sharing_fast_prefill jit_monitor_mode jit_monitor_verbose sparse_indexer_topk_backend monokernel
        """,
        "the scheduler has no such setting": """
            max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold scheduler_reserve_full_isl
            prefill_schedule_interval watermark disable_hybrid_kv_cache_manager prefix_caching_hash_algo
            num_scheduler_steps use_v2_block_manager preemption_mode scheduler_delay_factor disable_async_output_proc
            long_prefill_token_threshold_adaptive max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs
            max_num_queued_tokens prefix_cache_retention_interval prefix_match_unit swa_bounded_replay
        """,
        "a CUDA graph serves any sequence length": "max_seq_len_to_capture",
        "structured output is SamplingParams(structured_outputs=...)": "guided_decoding_backend",
        "reasoning is taken apart by the server, see --reasoning-parser": """
            reasoning_parser reasoning_parser_plugin reasoning_config enable_reasoning
        """,
        "see metrics(), get_metrics() and start_profile()": """
            aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
            kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
            enable_logging_iteration_details custom_histogram_buckets per_request_spec_decode_metrics logging_config
            log_level log_config_file enable_trace_replay
        """,
        "no part of this engine reads it": "additional_config enable_cumem_allocator fail_on_environ_validation",
        "there is no sleep mode": "sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
    }
)
