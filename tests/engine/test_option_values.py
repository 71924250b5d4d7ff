"""Values of options: the least, the most, and what is next to them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.options import EngineOptions
from compiled_engine.pooling import PoolerConfig
from compiled_engine.schema import declarations

INTEGERS: dict[str, tuple[int, int | None]] = {
    "max_model_len": (1, 1 << 24),
    "max_num_seqs": (1, 65535),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_prefill_tokens": (1, 1 << 20),
    "num_blocks": (1, 2**31 - 1),
    "num_state_snapshots": (0, 1 << 20),
    "seed": (-(2**63), 2**64 - 1),
    "max_loras": (1, 256),
    "max_lora_rank": (1, 512),
    "max_cpu_loras": (1, 1 << 16),
    "compile_workers": (0, None),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 16),
    "data_parallel_size": (1, 1024),
}
NAMES: dict[str, tuple[str, ...]] = {
    "mode": ("auto", "eager", "compiled", "graphed"),
    "dtype": ("auto", "float32", "float", "bfloat16", "float16", "half"),
    "kv_cache_dtype": ("auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"),
    "scheduling_policy": ("fcfs", "priority"),
    "load_format": ("auto", "safetensors", "dummy"),
    "quantization": ("fp8", "fp8_block", "int4"),
    "model_impl": ("auto", "textbook", "transformers"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "attention_backend": ("auto", "torch", "cpp", "triton", "flash_attn"),
    "graph_mode": (
        *("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "breakable", "recorded"),
    ),
    "generation_config": ("auto", "none"),
    "collectives": ("auto", "nccl"),
    "distributed_executor": ("auto", "in_process", "multiprocess", "ray"),
}
SWITCHES = (
    *("skip_tokenizer_init", "enable_prefix_caching", "enable_lora", "strict_passes", "verify_passes"),
    *("compile_cache", "sequence_parallel", "async_scheduling"),
)
PATHS = ("model", "tokenizer", "download_dir", "merge_adapter", "kv_offloading_folder", "cache_dir", "profile_dir")
REVISIONS = ("revision", "tokenizer_revision")
SIZES = ("compile_ranges", "capture_sizes", "capture_token_sizes")
LISTS = ("quantization_ignore", "passes", "disable_passes", "plugins", "logits_processors")
MAY_BE_NONE = {
    *("model", "tokenizer", "download_dir", "merge_adapter", "cache_dir", "passes", "async_scheduling", "quantization"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "num_blocks"),
    *("num_state_snapshots", "max_cpu_loras", "compile_workers", "speculative_config", "pooler_config"),
    *("kv_events_config", "kv_offloading_size", "kv_offloading_folder"),
    *("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs", "image_workers", "allowed_local_media_path"),
    "audio_workers",
    *("encoder_cache_size", "max_num_encoder_input_tokens"),
    *REVISIONS,
    *SIZES,
}
# Checked with what is there, when they are resolved.
LATER = {"device", "block_size"}


def refused(name: str, value: Any, kind: type[Exception] | tuple[type[Exception], ...]) -> None:
    with pytest.raises(kind, match=f"^{name} "):
        EngineOptions(**{name: value})


def test_integers() -> None:
    for name, (least, most) in INTEGERS.items():
        for value in (least, least + 1, least + 7 if most is None else most):
            assert getattr(EngineOptions(**{name: value}), name) == value
        refused(name, least - 1, ValueError)
        if most is not None:
            refused(name, most + 1, ValueError)
        for value in (True, 1.0, "1"):
            refused(name, value, TypeError)


def test_names() -> None:
    for name, allowed in NAMES.items():
        for value in allowed:
            assert getattr(EngineOptions(**{name: value}), name) == value
        for value in ("", "AUTO", "other", 1):
            refused(name, value, ValueError)


def test_switches() -> None:
    for name in SWITCHES:
        for value in (True, False):
            assert getattr(EngineOptions(**{name: value}), name) is value
        for value in (1, 0, "yes"):
            refused(name, value, TypeError)


def test_paths_and_revisions() -> None:
    for name in (*PATHS, *REVISIONS):
        assert getattr(EngineOptions(**{name: "a"}), name) == "a"
        if name in PATHS:
            EngineOptions(**{name: Path("a")})
        else:
            refused(name, Path("a"), TypeError)
        refused(name, "", ValueError)
        refused(name, 1, TypeError)


def test_lists() -> None:
    for name in (*LISTS, *SIZES):
        EngineOptions(**{name: ()})
        EngineOptions(**{name: (1, 2) if name in SIZES else ("a", "b")})
        refused(name, ["a"], TypeError)
        refused(name, "a", TypeError)
        if name in SIZES:
            for value in (0, -1, True, "1", 1.0):
                refused(name, (1, value), ValueError)


@pytest.mark.parametrize(("share", "kind"), [(0, ValueError), (1.01, ValueError), (float("nan"), ValueError),
                                             (True, TypeError), ("1", TypeError)])  # fmt: skip
def test_the_share_of_memory(share: Any, kind: type[Exception]) -> None:
    for value in (0.001, 0.5, 1, 1.0):
        EngineOptions(gpu_memory_utilization=value)
    refused("gpu_memory_utilization", share, kind)


def test_objects() -> None:
    for given in ({"method": "ngram"}, '{"method": "ngram"}', None):
        EngineOptions(speculative_config=given)
    refused("speculative_config", 5, TypeError)
    for overrides in ({"rope_theta": 5}, '{"rope_theta": 5}', {}, None):
        EngineOptions(hf_overrides=overrides)
    refused("hf_overrides", 5, TypeError)
    for pooler in ({"dimensions": 3}, '{"dimensions": 3}', PoolerConfig(dimensions=3), None):
        EngineOptions(pooler_config=pooler)
    with pytest.raises(ValueError, match="pooler_config has no 'dimension'"):
        EngineOptions(pooler_config={"dimension": 3})


@pytest.mark.parametrize(
    ("task", "convert", "result"),
    [
        ("embed", "auto", "embed"),
        ("token_embed", "none", "embed"),
        ("classify", "auto", "classify"),
        ("score", "classify", "classify"),
        ("token_classify", "auto", "classify"),
        (None, "embed", "embed"),
        (None, "auto", "auto"),
    ],
)
def test_a_task_of_pooling_is_a_conversion(task: str | None, convert: str, result: str) -> None:
    assert PoolerConfig.of({"task": task}).converts(convert) == result


def test_a_task_that_contradicts_the_conversion_is_an_error() -> None:
    with pytest.raises(ValueError, match="task is 'embed', but convert is 'classify'"):
        PoolerConfig(task="embed").converts("classify")
    with pytest.raises(ValueError, match="task is 'reward'; allowed: embed, token_embed, classify"):
        EngineOptions(pooler_config={"task": "reward"})


def test_what_may_be_left_to_the_engine() -> None:
    for field in fields(EngineOptions):
        if field.name in MAY_BE_NONE | LATER:
            EngineOptions(**{field.name: None})
        else:
            refused(field.name, None, (TypeError, ValueError))


def test_options_of_the_command_line_that_have_names_of_their_own() -> None:
    """A switch that is on is turned off, and an option of a list gives one of its values."""
    assert {each.name: each.flag for each in declarations(EngineOptions) if each.flag != ""} == {
        "enable_prefix_caching": "--no-prefix-caching",
        "compile_cache": "--no-cache",
        "passes": "--pass",
        "disable_passes": "--disable-pass",
        "plugins": "--plugin",
        "compile_ranges": "--compile-range",
        "capture_sizes": "--capture-size",
        "capture_token_sizes": "--capture-token-size",
        "logits_processors": "--logits-processor",
    }
