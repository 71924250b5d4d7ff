"""What ranks, processes and compiler workers come to; all is pure."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.config import ModelConfig, ParallelConfig, TransformersModel
from compiled_engine.options import EngineOptions
from compiled_engine.resolve import parallel
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.parallel import check_model, resolve_parallel

CPU = torch.device("cpu")


def resolved(options: dict[str, Any], **model: Any) -> tuple[ParallelConfig, dict[str, str]]:
    reasons: dict[str, str] = {}
    config = replace(tiny_config(num_layers=4).model, **model)
    return resolve_parallel(EngineOptions(device="cpu", **options), config, CPU, reasons), reasons


@pytest.mark.parametrize(
    ("options", "executor", "reason"),
    [
        ({}, "in_process", "one device"),
        ({"data_parallel_size": 2}, "in_process", "one device"),
        ({"tensor_parallel_size": 2}, "multiprocess", "one process for each of 2 devices"),
        ({"pipeline_parallel_size": 2}, "multiprocess", "one process for each of 2 devices"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "multiprocess", "one process for each of 4 devices"),
        ({"distributed_executor": "multiprocess"}, "multiprocess", None),
    ],
)
def test_who_runs_the_devices(options: dict[str, Any], executor: str, reason: str | None) -> None:
    found, reasons = resolved(options, vocab_size=100)
    assert (found.executor, reasons.get("parallel.executor")) == (executor, reason)
    assert found.tensor_parallel_size == options.get("tensor_parallel_size", 1)
    assert found.num_stages == options.get("pipeline_parallel_size", 1)
    assert found.data_parallel_size == options.get("data_parallel_size", 1)


@pytest.mark.parametrize(("vocab_size", "is_whole"), [(100, False), (101, True)])
def test_a_vocabulary_that_ranks_do_not_divide_is_whole_in_each(vocab_size: int, is_whole: bool) -> None:
    _, reasons = resolved({"tensor_parallel_size": 2}, vocab_size=vocab_size)
    assert reasons.get("parallel.tensor_parallel_size") == (
        "every rank has the whole vocabulary: 2 does not divide it" if is_whole else None
    )
    assert "parallel.tensor_parallel_size" not in resolved({}, vocab_size=vocab_size)[1]


@pytest.mark.parametrize("installed", [False, True])
def test_ray_is_needed_for_ray_alone(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "find_spec", lambda name: object() if installed and name == "ray" else None)
    assert resolved({"distributed_executor": "multiprocess"})[0].executor == "multiprocess"
    if installed:
        assert resolved({"distributed_executor": "ray"})[0].executor == "ray"
        return
    with pytest.raises(ValueError, match=r"is 'ray', but the package ray is not installed: .*; allowed without it"):
        resolved({"distributed_executor": "ray"})


def model_of(architecture: str, foreign: bool, **changes: Any) -> ModelConfig:
    code = TransformersModel("5", "{}") if foreign else None
    return replace(tiny_config().model, architecture=architecture, transformers=code, **changes)


@pytest.mark.parametrize(
    ("architecture", "foreign", "divisible"),
    [
        ("LlamaForCausalLM", False, True),
        ("LlamaForCausalLM", True, True),
        ("OlmoForCausalLM", True, True),
        ("OlmoForCausalLM", False, False),
        ("Olmo2ForCausalLM", True, False),
    ],
)
def test_models_that_ranks_divide_depend_on_their_code(architecture: str, foreign: bool, divisible: bool) -> None:
    check_model(model_of(architecture, foreign), 1)
    if divisible:
        check_model(model_of(architecture, foreign), 2)
        return
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2, but models of {architecture} with the code of"):
        check_model(model_of(architecture, foreign), 2)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (4, {"num_heads": 8, "num_kv_heads": 2}, None),
        (2, {"num_heads": 8, "num_kv_heads": 4}, None),
        (6, {"num_heads": 12, "num_kv_heads": 4}, "allowed: a divisor or a multiple of the model's 4 KV heads"),
        (3, {"num_heads": 4, "num_kv_heads": 3}, "which does not divide the model's 4 attention heads"),
        (5, {}, "which does not divide the model's 96 rows of the MLP"),
    ],
)
def test_heads_that_ranks_divide_or_share(size: int, changes: dict[str, Any], message: str | None) -> None:
    model = model_of("LlamaForCausalLM", False, **changes)
    if message is None:
        check_model(model, size)
        return
    with pytest.raises(ValueError, match=message):
        check_model(model, size)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (3, 0), (4, 2), (5, 2), (16, 8), (64, 8)])
def test_workers_that_compile_are_half_of_the_cores(cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    config = resolve(EngineOptions(device="cpu", mode="compiled"))
    assert config.compile.workers == workers
    assert config.reasons["compile.workers"].startswith(f"{cores} cores")
    given = resolve(EngineOptions(device="cpu", mode="compiled", compile_workers=3))
    assert given.compile.workers == 3
    assert "compile.workers" not in given.reasons


def test_options_of_the_compiler_reach_its_configuration() -> None:
    asked = resolve(EngineOptions(device="cpu", mode="compiled", strict_passes=True, verify_passes=False)).compile
    assert (asked.enabled, asked.strict, asked.verify) == (True, True, False)
    asked = resolve(EngineOptions(device="cpu", mode="compiled", verify_passes=True)).compile
    assert (asked.strict, asked.verify) == (False, True)
    eager = resolve(EngineOptions(device="cpu", mode="eager")).compile
    assert (eager.enabled, eager.passes, eager.ranges) == (False, (), ())
    assert (eager.strict, eager.verify, eager.workers) == (False, False, 0)
