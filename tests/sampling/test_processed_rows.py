"""Rows of logits processors: which of them see which rows, in which order, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.sampling.logits_processor import ProcessedRows
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice

WHOLE = VocabularySlice.of(2, None)


class Noted:
    """Applies to the rows in `rows`, records its calls, and maps a logit l to `scale` * l + row."""

    def __init__(self, rows: set[int], scale: float, log: list[tuple[Any, ...]]) -> None:
        self.rows, self.scale, self.log = rows, scale, log
        self.answer: Any = None
        self.fails = ""
        self.returned: Any = None

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> Any:
        self.log.append(("add", self.scale, row, params, tuple(token_ids), num_prompt_tokens))
        if self.fails == "add_row":
            raise KeyError("odd")
        return row in self.rows if self.answer is None else self.answer

    def remove_row(self, row: int) -> None:
        self.log.append(("remove", self.scale, row))
        if self.fails == "remove_row":
            raise KeyError("odd")

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> Any:
        self.log.append(("apply", self.scale, row_index_R.tolist(), positions_R.tolist()))
        logits_RV.mul_(self.scale).add_(row_index_R[:, None])
        return self.returned


def made(*of_each: set[int]) -> tuple[ProcessedRows, list[Noted], list[tuple[Any, ...]]]:
    log: list[tuple[Any, ...]] = []
    processors = [Noted(rows, scale, log) for scale, rows in enumerate(of_each, 2)]
    return ProcessedRows(8, processors), processors, log


def add(rows: ProcessedRows, row: int) -> bool:
    return rows.add_row(row, PARAMS, [5, 6, 7], 2)


PARAMS = SamplingParams()


def edited(rows: ProcessedRows, order: list[int]) -> list[float]:
    logits_RV = torch.arange(1.0, len(order) + 1)[:, None].repeat(1, 2)
    index = torch.tensor(order, dtype=torch.int32)
    rows.apply_(logits_RV, np.array(order), index, 10 * torch.arange(len(order)), WHOLE)
    assert (logits_RV[:, 0] == logits_RV[:, 1]).all()
    found: list[float] = logits_RV[:, 0].tolist()
    return found


def test_each_edits_its_rows_one_after_the_other() -> None:
    rows, _, log = made({1, 4}, {4, 6}, set())
    assert [add(rows, row) for row in (1, 2, 4, 6)] == [True, False, True, True]
    assert log[:3] == [("add", scale, 1, PARAMS, (5, 6, 7), 2) for scale in (2, 3, 4)]
    del log[:]
    assert edited(rows, [6, 1, 4]) == [1 * 3 + 6, 2 * 2 + 1, (3 * 2 + 4) * 3 + 4]
    assert log == [("apply", 2, [1, 4], [10, 20]), ("apply", 3, [6, 4], [0, 20])]
    del log[:]
    assert edited(rows, [4, 1]) == [(1 * 2 + 4) * 3 + 4, 2 * 2 + 1]
    assert log == [("apply", 2, [4, 1], [0, 10]), ("apply", 3, [4], [0])]


def test_a_row_is_removed_from_those_that_apply_to_it() -> None:
    rows, _, log = made({1, 4}, {4})
    for row in (1, 4):
        add(rows, row)
    del log[:]
    rows.remove_row(1)
    rows.remove_row(1)
    assert log == [("remove", 2, 1)]
    rows.remove_row(4)
    assert log[1:] == [("remove", 2, 4), ("remove", 3, 4)]
    assert edited(rows, [1, 4]) == [1, 2]


@pytest.mark.parametrize("answer", [None, 1, "yes", "fails"])
def test_a_row_that_one_refuses_is_removed_from_all(answer: Any) -> None:
    rows, processors, log = made({1}, set())
    if answer == "fails":
        processors[1].fails = "add_row"
        message, kind = r"logits processor .*Noted.add_row failed: KeyError: 'odd'", RuntimeError
    else:
        processors[1].answer = answer if answer is not None else np.bool_(True)
        message, kind = r".*Noted.add_row must return True or False, got ", TypeError  # type: ignore[assignment]
    with pytest.raises(kind, match=message):
        add(rows, 1)
    assert log[2:] == [("remove", 2, 1)]
    assert edited(rows, [1]) == [1]


def test_failures_name_the_processor() -> None:
    rows, processors, _ = made({1})
    add(rows, 1)
    processors[0].returned = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Noted.apply must edit in place and return None, got Tensor"):
        edited(rows, [1])
    processors[0].fails = "remove_row"
    with pytest.raises(RuntimeError, match=r"logits processor .*Noted.remove_row failed: KeyError: 'odd'"):
        rows.remove_row(1)
    rows.remove_row(1)  # it is free
