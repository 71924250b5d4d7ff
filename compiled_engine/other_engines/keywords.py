"""The one table of other engines' keywords for `LLM`: those of vLLM (its LLM and EngineArgs) and of nano-vllm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_engine.other_engines.compilation import COMPILATION_KEYWORDS
from compiled_engine.other_engines.not_supported import NOT_SUPPORTED
from compiled_engine.other_engines.rows import (
    Honoured,
    Nested,
    Row,
    choice,
    given_anyway,
    only,
    same,
    without_effect,
)
from compiled_engine.other_engines.without_effect import WITHOUT_EFFECT

DTYPES = {"half": "float16", "float": "float32"}
ATTENTION_BACKENDS = {"triton_attn": "triton", "torch_sdpa": "torch", "flash_attn_vllm_v1": "flash_attn"}
# What says nothing when enforce_eager says that nothing is compiled.
ABOUT_COMPILATION = frozenset(COMPILATION_KEYWORDS) - {"enforce_eager"}


def _dtype(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(value).removeprefix("torch.")  # a torch.dtype as well
    return {"dtype": DTYPES.get(name, name)}


def _attention_backend(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(getattr(value, "name", value)).lower()
    return {"attention_backend": ATTENTION_BACKENDS.get(name, name)}


def _device_ids(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, list | tuple) or len(value) != 1 or not str(value[0]).isdecimal():
        raise ValueError(f"is {value!r}; allowed: a list of one number, as the engine runs on one device")
    return {"device": f"cuda:{value[0]}"}


def _hf_token(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, bool):
        raise ValueError("holds a token; allowed: True or False, with the token in the environment variable HF_TOKEN")
    return {}


def _profiler_folder(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"profile_dir": value} if value else {}


ATTENTION_BACKEND = Honoured("`attention_backend`, in this engine's names", _attention_backend)

HONOURED: dict[str, Row] = {
    **{
        name: same(name)
        for name in (
            "model",
            "tokenizer",
            "revision",
            "tokenizer_revision",
            "download_dir",
            "skip_tokenizer_init",
            "device",
            "seed",
            "load_format",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "block_size",
            "enable_prefix_caching",
            "scheduling_policy",
            "async_scheduling",
            "logits_processors",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        )
    },
    "dtype": Honoured("`dtype`; half, float and a `torch.dtype` as well", _dtype),
    "attention_backend": ATTENTION_BACKEND,
    "attention_config": Nested(
        {
            "backend": ATTENTION_BACKEND,
            **without_effect(
                {
                    "the engine's backends have no such setting": "flash_attn_version use_prefill_decode_attention "
                    "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph use_trtllm_attention "
                    "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization "
                    "indexer_kv_dtype use_non_causal flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
                    "flex_attn_kv_block_size"
                }
            ),
        }
    ),
    "distributed_executor_backend": choice(
        "`distributed_executor`; mp is multiprocess, uni is in_process",
        {
            "mp": {"distributed_executor": "multiprocess"},
            "uni": {"distributed_executor": "in_process"},
            **{name: {"distributed_executor": name} for name in ("auto", "in_process", "multiprocess", "ray")},
        },
    ),
    "model_impl": choice(
        "`model_impl`; vllm is auto",
        {"vllm": {"model_impl": "auto"}}
        | {name: {"model_impl": name} for name in ("auto", "textbook", "transformers")},
    ),
    "num_gpu_blocks_override": same("num_blocks"),
    "kvcache_block_size": same("block_size"),
    "num_kvcache_blocks": Honoured(
        "`num_blocks`; -1 is what fits", lambda value, given: {} if value == -1 else {"num_blocks": value}
    ),
    "device_ids": Honoured("`device`, for a list of one", _device_ids),
    "generation_config": Honoured(
        '`generation_config`; "vllm" is "none"',
        lambda value, given: {"generation_config": "none" if value == "vllm" else value},
    ),
    "profiler_config": Nested(
        {
            "torch_profiler_dir": Honoured("`profile_dir`", _profiler_folder),
            **only("another profiler", "run the script under nsys, for example", profiler=("torch",)),
            **without_effect(
                {
                    "a profile has every step from start_profile() to stop_profile()": "torch_profiler_with_stack "
                    "torch_profiler_with_flops torch_profiler_use_gzip torch_profiler_dump_cuda_time_total "
                    "torch_profiler_record_shapes torch_profiler_with_memory ignore_frontend delay_iterations "
                    "max_iterations warmup_iterations active_iterations wait_iterations"
                }
            ),
        }
    ),
    "structured_outputs_config": Nested(
        {
            **only(
                "one form of JSON for all requests",
                "give it to SamplingParams(structured_outputs=...)",
                disable_any_whitespace=False,
                disable_additional_properties=False,
            ),
            **without_effect(
                {
                    "grammars are llguidance's": "backend disable_fallback",
                    "reasoning is taken apart by the server, see --reasoning-parser": "reasoning_parser "
                    "reasoning_parser_plugin enable_in_reasoning",
                }
            ),
        }
    ),
    "disable_log_stats": given_anyway("nothing is logged; `metrics()` and `RequestOutput.metrics` are always there"),
    "max_logprobs": given_anyway("any number of logprobs is allowed"),
    "disable_cascade_attn": given_anyway("there is no cascade attention"),
    "tokenizer_mode": choice("the checkpoint's fast tokenizer", {"auto": {}, "hf": {}}),
    "hf_token": Honoured("the token that huggingface_hub finds, HF_TOKEN for one", _hf_token),
    **COMPILATION_KEYWORDS,
}

KEYWORDS: dict[str, Row] = {**HONOURED, **NOT_SUPPORTED, **WITHOUT_EFFECT}
