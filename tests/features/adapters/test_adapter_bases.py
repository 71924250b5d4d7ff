"""The weight that PEFT saves with an adapter of the output projection is compared with the model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import digest_of
from safetensors.torch import save_file

from compiled_engine.config import AdapterConfig
from compiled_engine.features.adapters import slots as adapter_slots
from compiled_engine.features.adapters.slots import AdapterSlots
from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.parameter import CODES, KEPT, WEIGHT, Parameter
from compiled_engine.passes.linear.adapters import MATRIX_A, MATRIX_B, RANKS

CONFIG = AdapterConfig(max_loras=1, max_lora_rank=2, max_cpu_loras=1)
NAME, ROWS, COLUMNS = "lm_head.weight", 12, 6
WHOLE_NK = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()


def slots(role: str = WEIGHT, rank: int = 0, num_ranks: int = 1) -> AdapterSlots:
    """Slots of an output projection whose rows are divided among the ranks."""
    rows = ROWS // num_ranks
    shard = Shard((ROWS, COLUMNS), 0, (Section(ROWS, num_ranks),)) if num_ranks > 1 else None
    parameters = [
        Parameter(NAME, (rows, COLUMNS), "bfloat16", role, shard=shard),
        Parameter(NAME + MATRIX_A, (1, 2, COLUMNS), "bfloat16", KEPT),
        Parameter(NAME + MATRIX_B, (1, rows, 2), "bfloat16", KEPT),
        Parameter(NAME + RANKS, (1, 1), "int32", KEPT),
    ]
    tensors = {each.name: torch.zeros(each.shape, dtype=each.torch_dtype) for each in parameters}
    tensors[NAME] = WHOLE_NK[rank * rows : (rank + 1) * rows]
    return AdapterSlots(CONFIG, parameters, tensors, rank, num_ranks)


def load(into: AdapterSlots, folder: Path, base_NK: torch.Tensor | None) -> None:
    prefix = "base_model.model.lm_head"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, COLUMNS), f"{prefix}.lora_B.weight": torch.ones(ROWS, 2)}
    if base_NK is not None:
        tensors[f"{prefix}.base_layer.weight"] = base_NK.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2}))
    into.load(str(folder), digest_of(folder))


def changed(row: int, factor: float) -> torch.Tensor:
    weight_NK = WHOLE_NK.float()
    weight_NK[row, row % COLUMNS] *= factor
    return weight_NK


@pytest.mark.parametrize("rows", [1, 5, ROWS], ids="{} rows at once".format)
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)], ids=["alone", "second of two"])
@pytest.mark.parametrize("rounded", [torch.Tensor.float, torch.Tensor.half, lambda weight: changed(7, 1.005)])
def test_the_weight_may_be_stored_in_another_dtype(
    rounded: Callable[[torch.Tensor], torch.Tensor],
    rank: int,
    num_ranks: int,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_slots, "COMPARED_BYTES", rows * COLUMNS * rounded(WHOLE_NK).dtype.itemsize)
    load(slots(rank=rank, num_ranks=num_ranks), tmp_path, rounded(WHOLE_NK))


@pytest.mark.parametrize("rows", [1, 5, ROWS], ids="{} rows at once".format)
@pytest.mark.parametrize("row", [6, 9, 11])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)], ids=["alone", "second of two"])
def test_another_weight_is_refused(
    rank: int, num_ranks: int, row: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_slots, "COMPARED_BYTES", rows * COLUMNS * 4)
    held = slots(rank=rank, num_ranks=num_ranks)
    with pytest.raises(
        ValueError, match=r"lm_head was trained on another weight than the base model's; allowed: merge"
    ):
        load(held, tmp_path, changed(row, 1.02))
    load(held, tmp_path / "other", None)


def test_a_quantised_weight_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"quantised, so they cannot be compared; allowed: an adapter saved with save_"
    ):
        load(slots(CODES), tmp_path, WHOLE_NK)
    load(slots(CODES), tmp_path / "without", None)


@pytest.mark.parametrize("fields", [{"lora_alpha": 1e38}, {"lora_alpha": 8, "use_rslora": True}])
def test_what_overflows_in_the_dtype_of_the_model_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    into = slots()
    load(into, tmp_path, None)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA"} | fields))
    prefix = "base_model.model.lm_head"
    a_RK = torch.full((2, COLUMNS), 1.0 if fields["lora_alpha"] > 8 else 3.4028e38)  # infinite in bfloat16
    tensors = {f"{prefix}.lora_A.weight": a_RK, f"{prefix}.lora_B.weight": torch.full((ROWS, 2), 1e3)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head has values that are not finite in torch.bfloat16, the dtype of the"):
        into.load(str(tmp_path), digest_of(tmp_path))


def test_a_file_that_no_adapter_of_the_model_can_have_is_not_read(tmp_path: Path) -> None:
    into = slots()
    load(into, tmp_path, None)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors must have at most 16,777,\d+ bytes, got"):
        into.load(str(tmp_path), "0" * 64)
