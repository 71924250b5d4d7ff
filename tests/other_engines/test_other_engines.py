"""The keywords of vLLM and nano-vllm: each has a row, and means here what the row says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from foreign_signatures import NANO_VLLM, VLLM_0_25, VLLM_0_33

from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.keywords import CONFIG_KEYS, KEYWORDS, Honoured, Nested, Only, WithoutEffect
from compiled_engine.other_engines.translate import Translated, make_options, translate

SIGNATURES = {"vLLM": VLLM_0_25 | VLLM_0_33, "nano-vllm": NANO_VLLM}
# What honoured keywords stand for, on a GPU.
HONOURED: list[tuple[str, Any, dict[str, Any]]] = [
    ("model", "folder", {"model": "folder"}),
    ("tokenizer", "folder", {"tokenizer": "folder"}),
    ("revision", "main", {"revision": "main"}),
    ("tokenizer_revision", "main", {"tokenizer_revision": "main"}),
    ("download_dir", "folder", {"download_dir": "folder"}),
    ("skip_tokenizer_init", True, {"skip_tokenizer_init": True}),
    ("device", "cpu", {"device": "cpu"}),
    ("device_ids", [1], {"device": "cuda:1"}),
    ("seed", 7, {"seed": 7}),
    ("load_format", "dummy", {"load_format": "dummy"}),
    ("kv_cache_dtype", "int8_per_token_head", {"kv_cache_dtype": "int8"}),
    ("kv_cache_dtype", "fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
    ("max_model_len", 128, {"max_model_len": 128}),
    ("max_num_seqs", 4, {"max_num_seqs": 4}),
    ("max_num_batched_tokens", 64, {"max_num_batched_tokens": 64}),
    ("gpu_memory_utilization", 0.5, {"gpu_memory_utilization": 0.5}),
    ("block_size", 32, {"block_size": 32}),
    ("kvcache_block_size", 256, {"block_size": 256}),
    ("num_gpu_blocks_override", 9, {"num_blocks": 9}),
    ("override_pooler_config", {"normalize": False}, {"pooler_config": {"normalize": False}}),
    ("num_kvcache_blocks", 9, {"num_blocks": 9}),
    ("num_kvcache_blocks", -1, {}),
    ("enable_prefix_caching", False, {"enable_prefix_caching": False}),
    ("scheduling_policy", "priority", {"scheduling_policy": "priority"}),
    ("logprobs_mode", "processed_logprobs", {"logprobs_mode": "processed_logprobs"}),
    ("enable_sleep_mode", True, {"enable_sleep_mode": True}),
    ("async_scheduling", False, {"async_scheduling": False}),
    ("speculative_config", {"method": "ngram"}, {"speculative_config": {"method": "ngram"}}),
    ("speculative_config", {}, {}),
    ("kv_offloading_size", 2.5, {"kv_offloading_size": 2.5}),
    ("kv_events_config", {"topic": "kv"}, {"kv_events_config": {"topic": "kv"}}),
    ("logits_processors", ["package:Name"], {"logits_processors": ("package:Name",)}),
    ("tensor_parallel_size", 2, {"tensor_parallel_size": 2}),
    ("pipeline_parallel_size", 2, {"pipeline_parallel_size": 2}),
    ("data_parallel_size", 2, {"data_parallel_size": 2}),
    ("runner", "pooling", {"runner": "pooling"}),
    ("convert", "embed", {"convert": "embed"}),
    ("pooler_config", {"normalize": False}, {"pooler_config": {"normalize": False}}),
    ("enable_lora", True, {"enable_lora": True}),
    ("max_loras", 4, {"max_loras": 4}),
    ("max_lora_rank", 32, {"max_lora_rank": 32}),
    ("max_cpu_loras", 8, {"max_cpu_loras": 8}),
    ("language_model_only", True, {"language_model_only": True}),
    ("mm_processor_cache_gb", 1, {"mm_processor_cache_gb": 1}),
    ("limit_mm_per_prompt", {"image": 2, "video": 0}, {"limit_mm_per_prompt": {"image": 2, "video": 0}}),
    ("mm_processor_kwargs", {"max_pixels": 64}, {"mm_processor_kwargs": {"max_pixels": 64}}),
    ("allowed_media_domains", ["images.example"], {"allowed_media_domains": ("images.example",)}),
    ("allowed_local_media_path", "/data", {"allowed_local_media_path": "/data"}),
    ("hf_overrides", {"rope_theta": 5}, {"hf_overrides": {"rope_theta": 5}}),
    ("json_model_override_args", '{"rope_theta": 5}', {"hf_overrides": {"rope_theta": 5}}),
    ("rope_scaling", {"rope_type": "default"}, {"hf_overrides": {"rope_scaling": {"rope_type": "default"}}}),
    ("rope_theta", 1e6, {"hf_overrides": {"rope_theta": 1e6}}),
    ("model_impl", "vllm", {}),
    ("model_impl", "transformers", {"model_impl": "transformers"}),
    ("quantization", "fp8", {"quantization": "fp8"}),
    ("quantization", "fp8_per_block", {"quantization": "fp8_block"}),
    ("quantization", "compressed-tensors", {"quantization": "compressed-tensors"}),
    ("distributed_executor_backend", "mp", {"distributed_executor": "multiprocess"}),
    ("distributed_executor_backend", "uni", {"distributed_executor": "in_process"}),
    ("dtype", "half", {"dtype": "float16"}),
    ("dtype", "float", {"dtype": "float32"}),
    ("dtype", "bfloat16", {"dtype": "bfloat16"}),
    ("dtype", torch.float16, {"dtype": "float16"}),
    ("attention_backend", "FLASH_ATTN", {"attention_backend": "flash_attn"}),
    ("attention_backend", "triton", {"attention_backend": "triton"}),
    ("attention_config", {"backend": "TRITON_ATTN"}, {"attention_backend": "triton"}),
    ("generation_config", "vllm", {"generation_config": "none"}),
    ("generation_config", "auto", {}),
    ("profiler_config", {"profiler": "torch", "torch_profiler_dir": "here"}, {"profile_dir": "here"}),
    ("disable_log_stats", False, {}),
    ("max_logprobs", 100, {}),
    ("disable_cascade_attn", False, {}),
    ("tokenizer_mode", "hf", {}),
    ("config_format", "hf", {}),
    ("hf_token", True, {}),
    ("enforce_eager", True, {"mode": "eager"}),
    ("enforce_eager", False, {}),
    ("optimization_level", 0, {"mode": "eager"}),
    ("optimization_level", 3, {}),
    ("compilation_config", 0, {"mode": "eager"}),
    ("compilation_config", 3, {}),
    ("compilation_config", {"level": 3}, {}),
    ("compilation_config", {"mode": "NONE"}, {"mode": "eager"}),
    ("compilation_config", {"cudagraph_mode": "FULL_DECODE_ONLY"}, {"graph_mode": "full_decode_only"}),
    ("compilation_config", {"use_cudagraph": False}, {"graph_mode": "none"}),
    ("compilation_config", {"full_cuda_graph": True}, {"graph_mode": "full"}),
    ("compilation_config", {"compile_ranges_endpoints": [8, 64]}, {"compile_ranges": (8, 64)}),
    ("compilation_config", {"cache_dir": "here"}, {"cache_dir": "here"}),
    ("compilation_config", {"backend": "inductor"}, {}),
    (
        "compilation_config",
        {"cudagraph_capture_sizes": [1, 2], "cudagraph_mode": "PIECEWISE"},
        {"capture_token_sizes": (1, 2), "graph_mode": "piecewise"},
    ),
    (
        "compilation_config",
        {"cudagraph_capture_sizes": [1, 2], "cudagraph_mode": "FULL_DECODE_ONLY"},
        {"capture_sizes": (1, 2), "graph_mode": "full_decode_only"},
    ),
    ("cudagraph_capture_sizes", [1, 2], {"capture_sizes": (1, 2), "capture_token_sizes": (1, 2)}),
    ("cuda_graph_sizes", [4], {"capture_sizes": (1, 2, 4), "capture_token_sizes": (1, 2, 4)}),
    ("cuda_graph_sizes", [8], {"capture_sizes": (1, 2, 4, 8), "capture_token_sizes": (1, 2, 4, 8)}),
    ("cuda_graph_sizes", [20], {"capture_sizes": (1, 2, 4, 8, 16), "capture_token_sizes": (1, 2, 4, 8, 16)}),
    ("cuda_graph_sizes", [2, 20], {"capture_sizes": (2, 20), "capture_token_sizes": (2, 20)}),
    ("cuda_graph_sizes", [], {}),
    ("structured_outputs_config", {"disable_any_whitespace": False}, {}),
]


def rows(kind: type) -> list[tuple[str, Any]]:
    return [(name, row) for name, row in KEYWORDS.items() if isinstance(row, kind)]


def read(keywords: dict[str, Any], *, on_gpu: bool = True) -> Translated:
    return translate(keywords, on_gpu=lambda: on_gpu)


def translated(keywords: dict[str, Any], on_gpu: bool = True) -> dict[str, Any]:
    """The options, where a keyword without effect is an error."""
    found = read(keywords, on_gpu=on_gpu)
    assert found.ignored == ()
    return found.options


@pytest.mark.parametrize("signature", SIGNATURES, ids=SIGNATURES.keys())
def test_every_keyword_has_a_row_that_takes_its_default(signature: str) -> None:
    for name, default in SIGNATURES[signature].items():
        assert name in KEYWORDS
        found = read({name: default})
        EngineOptions(**found.options)
        assert not found.ignored or isinstance(KEYWORDS[name], WithoutEffect), name


@pytest.mark.filterwarnings("ignore:keywords without effect")
@pytest.mark.parametrize("signature", [VLLM_0_25, VLLM_0_25 | VLLM_0_33], ids=["0.25", "0.33"])
def test_all_defaults_together_are_the_defaults(signature: dict[str, Any]) -> None:
    options = make_options(signature | {"model": None, "gpu_memory_utilization": 0.9})
    assert options == EngineOptions()


def test_an_honoured_keyword_is_the_option() -> None:
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    for name, value, options in HONOURED:
        found = translated({name: value})
        assert {key: item for key, item in found.items() if item != defaults[key]} == options, (name, value)


def test_every_honoured_keyword_has_a_case() -> None:
    honoured = {name for name, row in KEYWORDS.items() if isinstance(row, Honoured | Nested)}
    assert honoured == {name for name, _, _ in HONOURED}
    keys = {name for name, row in CONFIG_KEYS.items() if isinstance(row, Honoured)}
    assert keys == {key for _, value, _ in HONOURED if isinstance(value, dict) for key in value} & keys


def test_what_is_not_supported_is_an_error_with_advice() -> None:
    for name, row in rows(Only):
        assert all(translated({name: value}) == {} for value in (*row.values, None)), name
        for value in (True, 2, "something", {"method": "ngram"}):
            if value not in row.values:
                with pytest.raises(ValueError, match=name) as caught:
                    read({name: value})
                assert all(text in str(caught.value) for text in (repr(value), "not supported", row.instead))


def test_what_has_no_effect_is_accepted_with_the_reason() -> None:
    for name, row in rows(WithoutEffect):
        assert read({name: "something"}) == ({}, ((name, row.reason),))
        assert all(translated({name: value}) == {} for value in (None, *(row.anyway or (False,)))), name


def test_all_keywords_without_effect_are_in_one_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"swap_space, offload_params \(nothing.*lora_dtype \(this engine has no such setting\)"
    ) as caught:
        make_options({"swap_space": 4, "offload_params": [1], "seed": 1, "lora_dtype": "bfloat16"})
    assert len(caught) == 1


def test_kernels_and_loaders_of_other_names_are_the_default() -> None:
    """They compute the same."""
    given = {"attention_backend": "FLASHINFER", "load_format": "runai_streamer", "tokenizer_mode": "mistral"}
    found = read(given | {"attention_config": {"backend": "ROCM_AITER_FA", "use_trtllm_attention": True}})
    assert found.options == {}
    assert len(found.ignored) == 5
    with pytest.raises(ValueError, match="attention_backend is 'flsh'"):
        make_options({"attention_backend": "flsh"})


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("1m", 10**6),
        ("2M", 2 << 20),
        (128, 128),
        ("auto", None),
        (-1, None),
    ],
)
def test_a_length_may_have_a_unit(given: Any, length: int | None) -> None:
    assert translated({"max_model_len": given}).get("max_model_len") == length


@pytest.mark.parametrize("given", ["4kb", "k", "1.5K", "4 k", "many"])
def test_a_length_with_another_unit_is_an_error(given: str) -> None:
    with pytest.raises(TypeError, match=f"max_model_len is '{given}'; allowed: an integer"):
        make_options({"max_model_len": given})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"nnodes": 2}, "nnodes is 2, which is not supported; start the engine once, on one host"),
        ({"speculative_algorithm": "EAGLE3"}, "is 'EAGLE3', which is not supported; give speculative_config, a dict"),
        ({"cpu_offload_gb": True}, "cpu_offload_gb is True"),
        ({"enforce_eager": 1}, "enforce_eager is 1; allowed: True, False"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode is 'slow'; allowed"),
        ({"device_ids": [0, 1]}, r"device_ids is \[0, 1\]; allowed"),
        ({"compilation_config": {"cudagraph_mode": "SOME"}}, r"compilation_config\['cudagraph_mode'\] is 'SOME'"),
        ({"compilation_config": 1}, r"compilation_config\['mode'\] is 1; allowed: 0, 3"),
        ({"compilation_config": {"backend": "eager"}}, r"compilation_config\['backend'\] is 'eager'"),
        ({"cudagraph_capture_sizes": "all"}, "cudagraph_capture_sizes is 'all'; allowed: a list of integers"),
        (
            {"enforce_eager": True, "mode": "compiled"},
            "mode is 'compiled', but enforce_eager makes mode 'eager'",
        ),
        (
            {"num_blocks": 4, "num_gpu_blocks_override": 5},
            "num_gpu_blocks_override makes num_blocks 5, but num_blocks is 4",
        ),
        ({"lora_modules": ["a=b"]}, "lora_modules is .*give enable_lora, and lora_request=.*allowed: \\[\\], None"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"wings": 2}, "LLM has no option 'wings'$"),
        ({"enforce_eagr": True}, "did you mean 'enforce_eager'"),
        ({"max_num_seq": 2}, "did you mean 'max_num_seqs'"),
        ({"compilation_config": {"cudagraph_mod": "FULL"}}, "did you mean 'cudagraph_mode'"),
        ({"compilation_config": [3]}, "compilation_config is .*; allowed: a dict, or its 'mode'"),
        ({"attention_config": "triton"}, "attention_config is 'triton'; allowed: a dict$"),
    ],
)
def test_an_unknown_name_or_form_is_an_error(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read(keywords)


def test_a_token_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ValueError, match="HF_TOKEN") as caught:
        read({"hf_token": "secret"})
    assert "secret" not in str(caught.value)


def test_enforce_eager_silences_what_is_about_compilation() -> None:
    found = read({"compilation_config": {"cudagraph_mode": "FULL"}, "enforce_eager": True})
    assert found.options == {"mode": "eager"}
    assert found.note == "compilation_config (enforce_eager is True, so nothing is compiled)"


def test_cuda_graphs_have_no_effect_without_a_gpu() -> None:
    assert read({"cudagraph_capture_sizes": [1, 2]}, on_gpu=False) == (
        {},
        (("cudagraph_capture_sizes", "CUDA graphs need a CUDA GPU"),),
    )
    assert translated({"graph_mode": "full"}, on_gpu=False) == {"graph_mode": "full"}


def test_captured_sizes_stay_within_the_limits_that_are_given() -> None:
    options = translated({"cudagraph_capture_sizes": [1, 8, 64], "max_num_seqs": 8})
    assert options == {"capture_sizes": (1, 8), "capture_token_sizes": (1, 8, 64), "max_num_seqs": 8}


def test_who_asks_for_the_default_leaves_it_to_another_keyword() -> None:
    """In either order."""
    both = [("graph_mode", "auto"), ("compilation_config", {"cudagraph_mode": "PIECEWISE"})]
    for keywords in (both, both[::-1]):
        assert translated(dict(keywords)) == {"graph_mode": "piecewise"}


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, {"capture_sizes": (1, 2)}),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {"capture_token_sizes": (1, 2)}),
        ({"graph_mode": "full_decode_only"}, {"capture_sizes": (1, 2)}),
        (
            {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
            {"capture_sizes": (1, 2), "capture_token_sizes": (1, 2)},
        ),
    ],
)
def test_sizes_are_those_of_the_batches_that_are_captured(keywords: dict[str, Any], options: dict[str, Any]) -> None:
    for given in (keywords | {"cudagraph_capture_sizes": [1, 2]}, {"cudagraph_capture_sizes": [1, 2]} | keywords):
        found = translated(given)
        assert {name: value for name, value in found.items() if name.endswith("_sizes")} == options


@pytest.mark.parametrize(
    "keywords",
    [
        {"compilation_config": {"use_cudagraph": False, "cudagraph_capture_sizes": [1, 2]}},
        {"compilation_config": 0, "cudagraph_capture_sizes": [1]},
        {"cudagraph_capture_sizes": [1], "optimization_level": 0},
        {"mode": "compiled", "cuda_graph_sizes": [8]},
    ],
)
def test_sizes_have_no_effect_where_nothing_is_captured(keywords: dict[str, Any]) -> None:
    found = read(keywords)
    assert "the mode captures no CUDA graphs" in found.note
    assert not {"capture_sizes", "capture_token_sizes"} & found.options.keys()
    own = {"capture_sizes": (1,), "mode": "eager"}  # this engine's are an error of `resolve`
    assert translated(own) == own


def test_this_engines_own_options_are_taken_as_they_are() -> None:
    own = {"mode": "compiled", "passes": ("silu_mul",), "num_blocks": None}
    assert translated(own) == own


def test_no_row_denies_an_option_of_this_engine() -> None:
    own = {field.name for field in fields(EngineOptions)}
    assert [name for name in sorted(own & KEYWORDS.keys()) if isinstance(KEYWORDS[name], Only | WithoutEffect)] == []
