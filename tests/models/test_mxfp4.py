"""Experts in MXFP4: parts of them are decoded, and tensors that contradict each other are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mxfp4_checkpoint import decoded

from compiled_engine.models.checkpoint.mxfp4 import decode_mxfp4
from compiled_engine.models.checkpoint.weight_formats import read_weights
from compiled_engine.models.foreign.placement import Placement
from compiled_engine.quantisation import Quantisation
from compiled_engine.quantisation_names import MXFP4

NAME = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES = f"{NAME}_blocks", f"{NAME}_scales"
RULES = Quantisation(MXFP4, (), ())
Tensors = dict[str, torch.Tensor]


def stored() -> Tensors:
    blocks = torch.zeros(2, 6, 3, 16, dtype=torch.uint8)
    return {BLOCKS: blocks, SCALES: torch.full((2, 6, 3), 127, dtype=torch.uint8)}


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return apply


def with_nan(scales: torch.Tensor) -> torch.Tensor:
    scales[1, 2, 0] = 255
    return scales


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(SCALES), f"{SCALES} is missing"),
        (lambda tensors: tensors.pop(BLOCKS), f"{BLOCKS} is missing"),
        (edit(SCALES, lambda t: t.float()), f"{SCALES} must be torch.uint8, got torch.float32"),
        (edit(BLOCKS, lambda t: t.view(torch.int8)), f"{BLOCKS} must be torch.uint8, got torch.int8"),
        (edit(BLOCKS, lambda t: t.flatten(2)), f"{BLOCKS} must have four dimensions, the last of 16, got [2, 6, 48]"),
        (edit(SCALES, lambda t: t[:1]), f"{SCALES} must be [2, 6, 3], got [1, 6, 3]"),
        (edit(SCALES, with_nan), f"{SCALES} must hold scales up to 254, got 255, which is NaN"),
        (lambda tensors: tensors.update({NAME: torch.zeros(2, 96, 6)}), f"{NAME} is a second copy of {BLOCKS}"),
    ],
    ids=lambda value: value.removeprefix(NAME) if isinstance(value, str) else "",
)
def test_what_contradicts_itself_is_one_line(change: Callable[[Tensors], None], expected: str) -> None:
    tensors = stored()
    assert read_weights(tensors, RULES, Path("folder")) == (tensors, {})
    change(tensors)
    with pytest.raises(ValueError, match="the tensors in folder do not fit quantization_config: ") as caught:
        read_weights(tensors, RULES, Path("folder"))
    assert str(caught.value).endswith(expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_that_end_inside_of_blocks_are_decoded(num_ranks: int, transposed: bool) -> None:
    """Each rank of four has 24 of 96 columns; rows are divided as well."""
    generator = torch.Generator().manual_seed(num_ranks)
    blocks = torch.randint(256, (2, 8, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 8, 3), generator=generator, dtype=torch.uint8)
    expected_EKR = decoded(blocks, scales)
    rows, columns = 8 // num_ranks, 96 // num_ranks
    for rank in range(num_ranks):
        of_rows, of_columns = (rank * rows, (rank + 1) * rows), (rank * columns, (rank + 1) * columns)
        wanted = expected_EKR[:, slice(*of_columns), slice(*of_rows)].mT
        taken = (0, 2), of_rows, of_columns
        wanted = wanted.mT if transposed else wanted
        target = torch.full_like(wanted.contiguous(), torch.nan)
        decode_mxfp4(Placement(BLOCKS, taken, NAME, taken, transposed), (blocks, scales), target)
        assert torch.equal(target, wanted)
