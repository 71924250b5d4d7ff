"""The keywords about compilation and CUDA graphs, and the keys of `compilation_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_engine.other_engines.rows import Honoured, Nested, Row, choice, only, without_effect

GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
EAGER: Mapping[str, Any] = {"mode": "eager"}


def _graph_mode(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    mode = _name(value).lower()
    if mode not in GRAPH_MODES:
        raise ValueError(f"is {value!r}; allowed: {', '.join(name.upper() for name in GRAPH_MODES)}")
    return {"graph_mode": mode}


def _capture_sizes(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same sizes for batches of decodes and for others, as far as the limits that are given allow them."""
    if not isinstance(value, list | tuple) or not all(isinstance(size, int) for size in value):
        raise ValueError(f"is {value!r}; allowed: a list of integers")
    return {
        "capture_sizes": _at_most(given.get("max_num_seqs"), value),
        "capture_token_sizes": _at_most(given.get("max_num_batched_tokens"), value),
    }


def _cuda_graph_sizes(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM takes several values as the sizes, one as the largest of a pattern, and none as its own default."""
    match value:
        case []:
            return {}
        case [int(largest)]:
            value = [1, 2, 4, *range(8, largest + 1, 8)]
    return _capture_sizes(value, given)


def _at_most(limit: Any, sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in sizes if not isinstance(limit, int) or size <= limit)


def _name(value: Any) -> str:
    """Of a member of an enumeration its name, else the text."""
    return str(getattr(value, "name", value))


LEVELS = choice("`mode`: 0 is eager, 3 the default", {0: EAGER, 3: {}, "NONE": EAGER, "VLLM_COMPILE": {}})
CAPTURE_SIZES = Honoured("`capture_sizes` and `capture_token_sizes`", _capture_sizes)
LARGEST_CAPTURE = only(
    "a largest captured size", "list the sizes in cudagraph_capture_sizes", max_cudagraph_capture_size=()
)

CONFIG_KEYS: dict[str, Row] = {
    "mode": LEVELS,
    "level": LEVELS,
    "cudagraph_mode": Honoured("`graph_mode`", _graph_mode),
    "use_cudagraph": choice("`graph_mode`", {True: {}, False: {"graph_mode": "none"}}),
    "full_cuda_graph": choice("`graph_mode`", {True: {"graph_mode": "full"}, False: {}}),
    "cudagraph_capture_sizes": CAPTURE_SIZES,
    "compile_ranges_endpoints": Honoured("`compile_ranges`", lambda value, given: {"compile_ranges": tuple(value)}),
    "cache_dir": Honoured("`cache_dir`", lambda value, given: {"cache_dir": value} if value else {}),
    **LARGEST_CAPTURE,
    **only("another compiler", "leave it out", backend=("", "inductor")),
    **without_effect(
        {
            "the engine has its own passes: see passes and disable_passes": "pass_config custom_ops splitting_ops "
            "inductor_passes use_inductor_graph_partition ir_enable_torch_wrap",
            "the engine sets the compiler up by itself": "compile_sizes inductor_compile_config use_inductor "
            "dynamic_shapes_config compile_cache_save_format debug_dump_path fast_moe_cold_start",
            "the engine captures graphs in its own way": "cudagraph_num_of_warmups cudagraph_copy_inputs "
            "cudagraph_specialize_lora",
            "models are for text alone": "compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets "
            "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch",
        }
    ),
}

COMPILATION_KEYWORDS: dict[str, Row] = {
    "enforce_eager": choice('`mode="eager"`', {True: EAGER, False: {}}),
    "compilation_config": Nested(CONFIG_KEYS, scalar="mode"),
    "optimization_level": choice("`mode`: 0 is eager, others the default", {0: EAGER, 1: {}, 2: {}, 3: {}}),
    "cudagraph_capture_sizes": CAPTURE_SIZES,
    "cuda_graph_sizes": Honoured(
        "`capture_sizes` and `capture_token_sizes`; one value stands for 1, 2, 4 and the multiples of 8 up to it",
        _cuda_graph_sizes,
    ),
    **LARGEST_CAPTURE,
}
