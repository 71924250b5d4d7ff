"""What a user asks for becomes a configuration, or an error that names the field, the value and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.config import GraphMode
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.registry import passes_of_quantised, passes_of_ranks, registered_passes
from compiled_engine.resolve.compile import resolve_compile
from compiled_engine.resolve.engine import resolve


def resolved(**options: Any) -> Any:
    return resolve(EngineOptions(**{"device": "cpu"} | options))


def test_defaults_on_a_cpu_have_reasons() -> None:
    config = resolved()
    assert config.device == torch.device("cpu")
    assert config.model.dtype is torch.float32
    assert (config.compile.enabled, config.graph.mode) == (True, GraphMode.RECORDED)
    others = passes_of_ranks() | passes_of_quantised()
    assert config.compile.passes == tuple(each.name for each in registered_passes() if each.name not in others)
    assert config.attention_backend == "cpp"
    for name in ("model.path", "model.dtype", "compile.enabled", "attention_backend", "scheduler.max_num_seqs"):
        assert config.reasons[name]


def test_what_was_given_has_no_reason() -> None:
    config = resolved(mode="eager", max_num_seqs=3, dtype="bfloat16")
    assert not {"compile.enabled", "scheduler.max_num_seqs", "model.dtype"} & set(config.reasons)


def test_passes_are_chosen_by_name_and_run_in_their_own_order() -> None:
    config = resolved(passes=("silu_mul", "merge_linears", "rms_norm"), disable_passes=("rms_norm",))
    assert config.compile.passes == ("merge_linears", "silu_mul")


def test_compile_ranges_follow_one_another() -> None:
    assert resolved().compile.ranges == ((1, 64),)
    assert resolved(dtype="bfloat16").compile.ranges == ()  # there are no kernels for it on a CPU
    assert resolved(compile_ranges=(64, 8)).compile.ranges == ((1, 8), (9, 64))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_kernels_for_small_batches_of_every_type(device: str, dtype: torch.dtype) -> None:
    config, reasons = resolved(), dict[str, str]()
    model = replace(config.model, dtype=dtype)
    found = resolve_compile(EngineOptions(), True, model, config.scheduler, torch.device(device), reasons)
    has_kernels = device == "cuda" or dtype == torch.float32
    assert found.ranges == (((1, 64),) if has_kernels else ())
    assert ("do not serve all of the model" in reasons["compile.ranges"]) != has_kernels


def test_a_limit_that_is_not_given_follows_the_other() -> None:
    scheduler = resolved(max_num_batched_tokens=8).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (8, 8)
    scheduler = resolved(max_num_seqs=4000).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (4000, 4000)


@pytest.mark.parametrize(("most", "ranges"), [(65, ((1, 64),)), (64, ((1, 63),)), (2, ((1, 1),)), (1, ())])
def test_the_range_of_small_batches_ends_below_the_largest(most: int, ranges: tuple[tuple[int, int], ...]) -> None:
    assert resolved(max_num_batched_tokens=most).compile.ranges == ranges


def test_ranks_may_be_several_for_each_kv_head() -> None:
    config = resolved(tensor_parallel_size=4)
    assert config.model.num_kv_heads == 2
    assert config.parallel.tensor_parallel_size == 4
    assert local_model(config).num_kv_heads == 1


def test_without_a_compiler_auto_is_eager_and_compiled_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = resolved()
    assert not config.compile.enabled
    assert "g++" in config.reasons["compile.enabled"]
    with pytest.raises(ValueError, match=r"mode is 'compiled', but compiling on a CPU needs a C\+\+ compiler"):
        resolved(mode="compiled")


def test_with_torch_compile_switched_off_auto_is_eager_and_compiled_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    config = resolved()
    assert not config.compile.enabled
    assert "TORCH_COMPILE_DISABLE is '1'" in config.reasons["compile.enabled"]
    with pytest.raises(ValueError, match="mode is 'compiled', but TORCH_COMPILE_DISABLE is '1'"):
        resolved(mode="compiled")
    assert not resolved(mode="eager").compile.enabled


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"mode": "graphed", "dtype": "bfloat16"},
            ValueError,
            "mode is 'graphed', but no compile range is for small batches; allowed: auto, eager, compiled",
        ),
        ({"mode": "fast"}, ValueError, "mode is 'fast'; allowed: auto, eager, compiled, graphed"),
        ({"device": "tpu"}, ValueError, "device is 'tpu'; allowed: auto, cpu, cuda"),
        ({"dtype": "int8"}, ValueError, "int8"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0; allowed: an integer from 1 to 65535"),
        ({"cache_dir": ""}, ValueError, "cache_dir is ''; allowed: the path of a folder, or None"),
        ({"disable_passes": None, "mode": "compiled"}, TypeError, "disable_passes is None; allowed: a list"),
        ({"max_num_seqs": 2.5}, TypeError, "max_num_seqs is 2.5; allowed: an integer"),
        ({"max_num_seqs": True}, TypeError, "max_num_seqs is True"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            ValueError,
            "max_num_batched_tokens is 4; allowed: at least",
        ),
        ({"max_model_len": 10**9}, ValueError, "max_model_len"),
        ({"block_size": "big"}, ValueError, "block_size is 'big'; allowed: 1 to 65536, or 'auto'"),
        ({"num_blocks": -1}, ValueError, "num_blocks is -1"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization is 1.5; allowed: above 0 and at most 1"),
        ({"gpu_memory_utilization": "all"}, TypeError, "gpu_memory_utilization is 'all'"),
        ({"gpu_memory_utilization": float("nan")}, ValueError, "gpu_memory_utilization is nan"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching is 1; allowed: True or False"),
        ({"scheduling_policy": "lifo"}, ValueError, "scheduling_policy is 'lifo'; allowed: fcfs, priority"),
        ({"seed": "x"}, TypeError, "seed is 'x'; allowed: an integer"),
        ({"seed": 1.5}, TypeError, "seed is 1.5; allowed: an integer"),
        ({"seed": True}, TypeError, "seed is True; allowed: an integer"),
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616; allowed: an integer from -"),
        ({"seed": -(2**63) - 1}, ValueError, "seed is -9223372036854775809; allowed: an integer from -"),
        ({"load_format": "pt"}, ValueError, "load_format"),
        ({"attention_backend": "xformers"}, ValueError, "xformers.*torch, cpp, triton, flash_attn"),
        ({"disable_passes": ("magic",)}, ValueError, "disable_passes is 'magic'; allowed: no_op_elimination"),
        ({"disable_passes": "silu_mul"}, TypeError, "disable_passes is 'silu_mul'; allowed: a list"),
        ({"disable_passes": ("silu_mul",), "mode": "eager"}, ValueError, "the mode is eager: nothing is compiled"),
        ({"passes": ("silu_mul", "magic")}, ValueError, "passes is 'magic'; allowed: no_op_elimination"),
        ({"passes": "silu_mul"}, TypeError, "passes is 'silu_mul'; allowed: a list"),
        ({"passes": ("silu_mul",), "mode": "eager"}, ValueError, "the mode is eager: nothing is compiled"),
        ({"strict_passes": 1}, TypeError, "strict_passes is 1; allowed: True or False"),
        ({"strict_passes": True, "mode": "eager"}, ValueError, "strict_passes is True, but the mode is eager"),
        ({"verify_passes": "yes"}, TypeError, "verify_passes is 'yes'; allowed: True or False"),
        ({"verify_passes": True, "mode": "eager"}, ValueError, "verify_passes is True, but the mode is eager"),
        ({"compile_ranges": 8}, TypeError, "compile_ranges is 8; allowed: a list"),
        ({"compile_ranges": (0,)}, ValueError, "compile_ranges has 0; allowed: integers of at least 1"),
        (
            {"compile_ranges": (8, 128), "max_num_batched_tokens": 64},
            ValueError,
            r"compile_ranges has 128; allowed: less than max_num_batched_tokens \(64\)",
        ),
        ({"compile_ranges": (8,), "mode": "eager"}, ValueError, r"compile_ranges is \(8,\), but the mode is eager"),
        ({"compile_workers": -1}, ValueError, "compile_workers is -1; allowed: an integer of at least 0"),
        ({"compile_workers": True}, TypeError, "compile_workers is True; allowed: an integer of at least 0"),
        ({"compile_workers": 2, "mode": "eager"}, ValueError, "compile_workers is 2, but the mode is eager"),
        ({"capture_sizes": 8}, TypeError, "capture_sizes is 8; allowed: a list"),
        ({"capture_sizes": (8,)}, ValueError, "the mode captures no CUDA graphs"),
        ({"cache_dir": "/tmp/x", "compile_cache": False}, ValueError, "compile_cache is False"),
        ({"cache_dir": "/tmp/x", "mode": "eager"}, ValueError, "cache_dir is '/tmp/x', but the mode is eager"),
        ({"generation_config": "best"}, ValueError, "generation_config is 'best'; allowed: auto, none"),
        ({"model": 3}, TypeError, "model is 3; allowed: the path of a folder, org/name of the"),
        ({"cache_dir": 5}, TypeError, "cache_dir is 5; allowed: the path of a folder"),
        ({"block_size": True}, ValueError, "block_size is True"),
        ({"device": "cpu:1"}, ValueError, "device is 'cpu:1'"),
        ({"device": "cuda:300"}, ValueError, "device is 'cuda:300'; allowed: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:" + "9" * 20}, ValueError, "device is 'cuda:9999.*; allowed: auto, cpu, cuda, cuda:N"),
        ({"model": "/nowhere/at/all"}, ValueError, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        resolved(**options)
