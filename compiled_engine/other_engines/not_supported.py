"""Keywords of other engines that ask for what this engine cannot do, with the values that do not ask for it."""

from __future__ import annotations

from compiled_engine.other_engines.rows import Row, only

NOT_SUPPORTED: dict[str, Row] = {
    **only(
        "this way to use several GPUs",
        "give tensor_parallel_size, pipeline_parallel_size or data_parallel_size",
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        nnodes=1,
    ),
    **only("choosing a revision", "name a folder that has it", code_revision=()),
    **only(
        "a quantised model",
        "use a checkpoint in bfloat16, float16 or float32",
        quantization=(),
        quantization_config=({},),
    ),
    **only(
        "a KV cache of another type than the model", "choose dtype", kv_cache_dtype="auto", calculate_kv_scales=False
    ),
    **only("a KV cache given in bytes", "give num_blocks, or gpu_memory_utilization", kv_cache_memory_bytes=()),
    **only("LoRA", "merge the adapter into the checkpoint", enable_lora=False),
    **only(
        "speculative decoding",
        "leave it out: the outputs are the same without it",
        speculative_config=({},),
        spec_method=(),
        spec_model=(),
        spec_tokens=(),
        speculative_model=(),
        num_speculative_tokens=(),
    ),
    **only("diffusion", "use an autoregressive model", diffusion_config=({},)),
    **only(
        "embedding, classification or scoring",
        "use a model that generates, or another engine",
        runner=("auto", "generate"),
        convert=("auto", "none"),
        task=("auto", "generate"),
        pooler_config=(),
    ),
    **only("a prompt of embeddings", "give token ids", enable_prompt_embeds=False),
    **only(
        "weights or KV cache in the host's memory",
        "use a smaller model or a device with more memory",
        cpu_offload_gb=0,
        offload_group_size=0,
        kv_offloading_size=(0,),
    ),
    **only(
        "moving the KV cache to other engines",
        "leave it out",
        kv_transfer_config=(),
        kv_events_config=(),
        ec_transfer_config=(),
    ),
    **only("new weights for a running engine", "close() it and make a new one", weight_transfer_config=()),
    **only(
        "sleep mode", "close() the engine and make a new one: it starts from the compile cache", enable_sleep_mode=False
    ),
    **only(
        "another model configuration than the checkpoint's",
        "change its config.json",
        hf_overrides=({},),
        hf_config=(),
        hf_config_path=(),
        rope_scaling=(),
        rope_theta=(),
        override_attention_dtype=(),
        disable_sliding_window=False,
        config_format=("auto", "hf"),
    ),
    **only("a configuration object of vLLM", "give its fields as keywords", vllm_config=()),
    **only("another end-of-sequence token", "give SamplingParams(stop_token_ids=...)", eos=-1),
    **only("weights in another folder than the configuration", "put them into one", model_weights=""),
    **only("another implementation of a model", "leave it out", model_class_overrides=({},)),
    **only(
        "a scheduler or worker class of yours",
        "leave it out",
        scheduler_cls=(),
        worker_cls="auto",
        worker_extension_cls="",
    ),
    **only("changing the checkpoint's sampling defaults", "give SamplingParams", override_generation_config=({},)),
    **only("a chat template for the whole engine", "give it to chat(chat_template=...)", chat_template=()),
    **only("log-probabilities other than the model's own", "leave it out", logprobs_mode="raw_logprobs"),
    **only("returning which experts were used", "leave it out", enable_return_routed_experts=False),
    **only(
        "returning more than tokens and log-probabilities",
        "leave it out",
        return_sampling_mask=False,
        aux_output_config=({},),
    ),
    **only("watermarked text", "leave it out", watermark_config=()),
    **only("input and output plugins", "change prompts and outputs in your script", io_processor_plugin=()),
}
