"""Experts that run through transformers' code: in codes in every format, named as their families' checkpoints do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, family, write_checkpoint
from nvfp4_checkpoints import COMPRESSED, MODELOPT, write_nvfp4
from packed_checkpoints import PACKINGS, Packing, write_packed
from quantised_checkpoints import LAYOUTS, Layout, compressed
from test_packed_experts import matched, nearest
from test_quantised_engine import IDS, compare
from test_quantised_experts import ALONE, write_experts

WITHIN = "model.layers.{}.block_sparse_moe"


def of_layers(name: str, num_layers: int, **changes: Any) -> Family:
    case = family(name)
    return replace(case, changes={**case.changes, "num_hidden_layers": num_layers, **changes})


def alone(layout: str, strategy: str, of: str = "float", **weights: Any) -> Layout:
    """Return a layout without rounded inputs, so that the oracle is exact."""
    return replace(LAYOUTS[layout], config=compressed(strategy, None, of, **weights), inputs=None)


CASES: dict[str, str | Packing | tuple[Layout, str]] = {
    **{form: form for form in (COMPRESSED, MODELOPT)},
    **{name: PACKINGS[name] for name in ("gptq, zero points", "awq", "compressed-tensors, groups")},
    "compressed-tensors, 8 bits": PACKINGS["compressed-tensors, 8 bits"],
    "fp8, rows": (LAYOUTS[ALONE], "e4m3 1x*"),
    "fp8, blocks": (alone("compressed-tensors, block", "block", block_structure=[128, 128]), "e4m3 128x128"),
    "int8, rows": (alone("compressed-tensors, int8, channel and token", "channel", "int"), "int8 1x*"),
}


# One case is drawn: the codes of each are compared with textbook models, and read in the same way. Two ranks divide
# what one has whole, which runs in NVFP4.
ONE_RANK = pytest.mark.shown_by(
    "engine/test_foreign_experts.py::test_every_format_stays_in_codes_but_in_a_layer_that_the_checkpoint_ignores",
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=ONE_RANK), 2])
@pytest.mark.parametrize("case", CASES)
def test_every_format_stays_in_codes_but_in_a_layer_that_the_checkpoint_ignores(
    case: str, num_ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rules name experts and routers as the checkpoint does, and not as the model. Shares of two ranks, 96 columns,
    end inside groups and blocks of 128."""
    source, folder, written = tmp_path / "plain", tmp_path / "codes", CASES[case]
    write_checkpoint(source, of_layers("mixtral", 2, intermediate_size=192))
    experts = [f"{WITHIN.format(1)}.experts.{n}.{part}" for n in range(6) for part in ("w1", "w2", "w3")]
    ignored = [*experts, *(f"{WITHIN.format(layer)}.gate" for layer in range(2))]
    if isinstance(written, str):
        oracle = write_nvfp4(source, folder, written, ["lm_head", *ignored])
    elif isinstance(written, Packing):
        oracle = write_packed(source, folder, written, ["lm_head", *ignored])
    else:
        oracle = write_experts(source, folder, *written, ignored=ignored)
    metrics = compare(folder, oracle, IDS, exact=True, compile_ranges=(), tensor_parallel_size=num_ranks)
    assert set(matched(metrics)) == {2}
    assert "are decoded" not in caplog.text  # the checkpoint has the others in 32 bits


# Matrices that are stored by rows are quantised like those of the textbook.
BY_ROWS = pytest.mark.shown_by(
    "engine/test_packed_experts.py::test_experts_are_quantised_to_four_bits_while_they_are_loaded"
)


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=BY_ROWS)])
def test_experts_are_quantised_while_they_are_loaded(name: str, tmp_path: Path) -> None:
    """Those of GPT-OSS are stored by columns, and gate and up alternate."""
    oracle: Any = write_checkpoint(tmp_path / "plain", of_layers(name, 1))
    experts = oracle.model.layers[0].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        rows: torch.Tensor = weight.mT if name == "gpt_oss" else weight
        rows.copy_(nearest(rows.contiguous()))
    others = ("lm_head", r"re:.*\.(gate|router)$", "re:.*self_attn.*")
    options = {"quantization": "int4", "quantization_ignore": others, "compile_ranges": ()}
    assert set(matched(compare(tmp_path / "plain", oracle, IDS, exact=True, **options))) == {2}
