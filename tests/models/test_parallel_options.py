"""What is said of several devices before any process starts: errors, and what each rank will hold."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from mtp_layers import QWEN_VISION, write_mtp_checkpoint
from typer.testing import CliRunner

from compiled_engine.bench.shapes import write_shape
from compiled_engine.cli.app import app
from compiled_engine.models.checkpoint.build_model import shards_of
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.models.checkpoint.staged_copy import CHUNK_BYTES, chunks_of
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import gpus_of_replica
from compiled_engine.resolve.engine import resolve

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; allowed: an integer from 1"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0; allowed: an integer from 1"),
        ({"data_parallel_size": 2, "logits_processors": (print,)}, "cannot be given to another process"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, which does not divide the model's 640 rows"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size is 8, which does not divide the model's 4 attention heads"),
        ({"tensor_parallel_size": 2, "distributed_executor": "in_process"}, "distributed_executor is 'in_process'"),
        ({"passes": ("all_reduce_residual_rms_norm",)}, "there is nothing to sum"),
        ({"sequence_parallel": True}, "sequence_parallel is True, but tensor_parallel_size is 1; allowed: False"),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "mode": "eager"},
            "sequence_parallel is True, but the mode is eager",
        ),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "disable_passes": ("sequence_parallel",)},
            "disable_passes has 'sequence_parallel', but sequence_parallel is True; allowed: others",
        ),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "disable_passes": ("residual_rms_norm",)},
            "disable_passes has 'residual_rms_norm', but sequence_parallel is True",
        ),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2, "passes": ()},
            r"passes is \[\], but sequence_parallel is True; allowed: with 'residual_rms_norm', or None",
        ),
        ({"collectives": "mpi"}, "collectives is 'mpi'; allowed: auto, nccl"),
        ({"collectives": "nccl"}, "collectives is 'nccl', but tensor_parallel_size is 1"),
        ({"collectives": "nccl", "tensor_parallel_size": 2}, "collectives is 'nccl', but a CPU's go through gloo"),
        ({"distributed_executor": "mpi"}, "distributed_executor is 'mpi'; allowed: auto, in_process, multiprocess"),
        ({"tensor_parallel_size": 2, "logits_processors": (print,)}, "cannot be given to another process"),
        (
            {"pipeline_parallel_size": 7},
            "pipeline_parallel_size is 7, but the model has 6 layers; allowed: 1, or at most 6",
        ),
        ({"pipeline_parallel_size": 17}, "pipeline_parallel_size is 17; allowed: an integer from 1 to 16"),
        ({"pipeline_parallel_size": 2, "mode": "eager"}, "pipeline_parallel_size is 2, but mode is 'eager'"),
        ({"pipeline_parallel_size": 2, "distributed_executor": "in_process"}, "but pipeline_parallel_size is 2"),
    ],
)
def test_what_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(device="cpu", **options))


def test_sequence_parallelism_adds_its_pass_to_those_that_are_given() -> None:
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, "sequence_parallel": True}
    config = resolve(EngineOptions(passes=("residual_rms_norm",), **options))
    assert config.compile.passes == ("residual_rms_norm", "sequence_parallel")


@pytest.mark.parametrize(("stages", "ahead", "steps"), [(1, False, 1), (1, True, 2), (2, False, 2), (2, True, 3)])
def test_steps_in_flight(stages: int, ahead: bool, steps: int) -> None:
    config = resolve(EngineOptions(device="cpu", pipeline_parallel_size=stages, async_scheduling=ahead))
    assert config.steps_in_flight == steps


def test_a_model_that_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("olmo2"))
    with pytest.raises(ValueError, match="models of Olmo2ForCausalLM with the code of transformers cannot be divided"):
        resolve(EngineOptions(model=tmp_path, device="cpu", tensor_parallel_size=2))


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    folder = write_shape(tmp_path, "qwen3-30b-a3b")
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "tensor_parallel_size": 2}
    resolve(EngineOptions(model=folder, **options))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_intermediate_size": 767}))
    with pytest.raises(ValueError, match="does not divide the model's 767 rows of the experts"):
        resolve(EngineOptions(model=folder, **options))


@pytest.mark.parametrize(
    ("num_gpus", "has_nccl", "device", "message"),
    [
        (1, True, "cuda", "tensor_parallel_size is 2, but 1 GPUs are visible"),
        (2, False, "cuda", "no NCCL"),
        (2, True, "cuda:1", "rank i runs on the i-th visible GPU"),
    ],
)
def test_gpus_that_do_not_suffice(
    num_gpus: int, has_nccl: bool, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, found in (("is_available", True), ("device_count", num_gpus), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(device=device, tensor_parallel_size=2, mode="eager", attention_backend="torch"))


def test_gpus_are_divided_among_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("is_available", True), ("device_count", 5), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0")
    config = resolve(EngineOptions(device="cpu", tensor_parallel_size=2, data_parallel_size=2))
    on_gpus = replace(config, device=torch.device("cuda", 0))
    assert [gpus_of_replica(on_gpus, number) for number in (0, 1)] == [["7", "5"], ["3", "1"]]
    with pytest.raises(ValueError, match=r"data_parallel_size is 3, with 2 GPUs .* visible; allowed: at most 2"):
        resolve(EngineOptions(device="cuda", tensor_parallel_size=2, data_parallel_size=3))


def test_replicas_are_shown() -> None:
    arguments = ["config", "--device", "cpu", "--data-parallel-size", "2"]
    shown = CliRunner().invoke(app, arguments)
    assert "2 replicas, each in processes of its own: replica 0 on the CPU; replica 1 on the CPU" in shown.stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["replicas"] == [["the CPU"]] * 2


def test_stages_on_gpus_that_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("is_available", True), ("device_count", 3), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    message = "tensor_parallel_size is 2 and pipeline_parallel_size is 2, which takes 4 GPUs, but 3 GPUs are visible"
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2))


def test_stages_are_shown() -> None:
    """Together the stages hold the model, the tied embedding twice; each layer is in one of them."""
    arguments = ["config", "--device", "cpu", "--pipeline-parallel-size", "3", "--tensor-parallel-size", "2"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "3 stages" in shown
    assert "attention and KV cache of layers" in shown
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    stages, whole = data["stages"], data["ranks"]["weight_bytes"]
    assert [layer for stage in stages for layer in stage["layers"]] == list(range(6))
    assert [stage["ranks"] for stage in stages] == [[0, 1], [2, 3], [4, 5]]
    assert "stage 1 has layers" in data["reasons"]["parallel.stage_layers"]
    table_bytes = data["model"]["vocab_size"] // 2 * data["model"]["hidden_size"] * 4
    assert sum(stage["weight_bytes"] for stage in stages) == whole + table_bytes


def test_the_plan_is_shown() -> None:
    arguments = ["config", "--device", "cpu", "--tensor-parallel-size", "2"]
    shown = CliRunner().invoke(app, arguments)
    assert "2 ranks (multiprocess)" in shown.stdout
    assert "256 x 640" in shown.stdout
    plan = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["ranks"]
    assert plan["collectives_a_step"] == 2 * 6 + 2
    slices = {entry["name"]: entry for entry in plan["slices"]}
    assert slices["model.layers.*.mlp.down_proj.weight"]["rank"] == [256, 320]
    assert plan["whole_weight_bytes"] < 2 * plan["weight_bytes"] < 1.01 * plan["whole_weight_bytes"]


def test_config_shows_what_a_draft_model_takes_of_a_rank(bundled_model_path: Path) -> None:
    drafts = {"method": "draft_model", "model": str(bundled_model_path), "num_speculative_tokens": 3}
    arguments = ["config", "--device", "cpu", "--tensor-parallel-size", "2", "--json"]
    found = []
    for more in ([], ["--speculative-config", json.dumps(drafts)]):
        run = CliRunner().invoke(app, [*arguments, *more])
        assert run.exit_code == 0, run.output
        found.append(json.loads(run.stdout)["ranks"])
    assert found[0]["draft_weight_bytes"] == 0
    assert found[1]["draft_weight_bytes"] == found[1]["weight_bytes"] == found[0]["weight_bytes"]
    assert found[1]["block_bytes"] == 2 * found[0]["block_bytes"]


def test_the_plan_counts_shared_parameters_once_and_has_recurrent_states(tmp_path: Path) -> None:
    """With drafts an MTP layer adds its own parameters alone."""
    case = replace(QWEN_VISION, family=QWEN_VISION.family.to_divide())
    written = write_mtp_checkpoint(tmp_path, case)
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    arguments = ["config", "--model", str(tmp_path), "--device", "cpu", "--mode", "eager", "--max-num-seqs", "4"]
    arguments += ["--num-state-snapshots", "3", "--tensor-parallel-size", "2", "--dtype", "float32"]
    plain, drafted = (
        json.loads(CliRunner().invoke(app, [*arguments, *more, "--json"]).stdout)
        for more in ([], ["--speculative-config", drafts])
    )
    layer_bytes = sum(tensor.nbytes for tensor in written.tensors.values())
    own = drafted["ranks"]["draft_weight_bytes"]
    assert layer_bytes / 2 <= own < 0.75 * layer_bytes  # norms and the projection are whole in each rank
    assert drafted["ranks"]["weight_bytes"] == plain["ranks"]["weight_bytes"]
    assert 0 < plain["ranks"]["state_bytes"] < drafted["ranks"]["state_bytes"]
    row_bytes = sum(
        prod(state["shape"]) * {"float32": 4, "bfloat16": 2}[state["dtype"]]
        for state in plain["model"]["recurrences"]["states"]
    )
    assert plain["ranks"]["state_bytes"] == 7 * row_bytes / 2
    assert "GiB of recurrent states; KV cache" in " ".join(CliRunner().invoke(app, arguments).stdout.split())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_reads_its_share_and_no_more(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank copies its slices out of the mapped files; together they are the checkpoint."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 132, "attention_bias": True}
    make_checkpoint(tmp_path, "llama", **shape)
    options = {"device": "cpu", "mode": "eager", "tensor_parallel_size": num_ranks}
    config = resolve(EngineOptions(model=tmp_path, **options))
    whole = map_tensors(tmp_path)
    total = sum(tensor.nbytes for tensor in whole.values())
    read: list[int] = []
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    shards = shards_of(config)
    for rank in range(num_ranks):
        model = build_model(local_model(config))
        weights = materialize(model, parameters_of(model, shards), CPU)
        load_weights(weights, build_model(config.model), config.model, SilentProgress(), rank, num_ranks)
        own = (shards[name].of(tensor, rank, num_ranks) if shards else tensor for name, tensor in whole.items())
        read.append(sum(tensor.nbytes for tensor in own))
        for name, parameter in model.named_parameters():
            parts[name].append(parameter)
    assert max(read) < total / num_ranks + 0.05 * total
    for name, tensor in whole.items():
        shard = shards.get(name)
        if shard is None or shard.dim is None:
            found = sum(parts[name]) if shard is not None and shard.first_only else parts[name][0]
        else:
            found = torch.cat(parts[name], shard.dim)
        assert torch.equal(found.to(tensor.dtype), tensor), name


@pytest.mark.parametrize("shape", [(7,), (5, 6), (40, 3)])
def test_chunks_of_columns_are_views(shape: tuple[int, ...]) -> None:
    """Nothing is copied into memory before it is copied to the device."""
    whole = torch.arange(2 * torch.Size(shape).numel()).view(*shape[:-1], 2 * shape[-1])
    source, target = whole[..., : shape[-1]], torch.empty(shape, dtype=torch.int64)
    for chunk in chunks_of(source, target, 48):
        assert chunk.source.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert chunk.source.nbytes <= max(48, source[0].nbytes) <= CHUNK_BYTES
        chunk.target.copy_(chunk.source)
    assert torch.equal(target, source)
