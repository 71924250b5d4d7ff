"""The user's logits processors, and which rows each of them applies to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from compiled_engine.rows.async_copies import upload
from compiled_engine.sampling.logits_processor import LogitsProcessor, processor_name
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice


class ProcessedRows:
    """Processors are called in the order in which they were given."""

    def __init__(self, num_rows: int, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = [(each, np.zeros(num_rows, dtype=bool)) for each in processors]

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Whether some processor applies to the row. If one fails, none knows of the row any more."""
        try:
            for processor, applies_N in self._processors:
                answer = _call(processor, "add_row", row, params, token_ids, num_prompt_tokens)
                if not isinstance(answer, bool):
                    raise TypeError(f"{processor_name(processor)}.add_row must return True or False, got {answer!r}")
                applies_N[row] = answer
        except BaseException:
            self.remove_row(row)
            raise
        return any(applies_N[row] for _, applies_N in self._processors)

    def remove_row(self, row: int) -> None:
        """Tell those that the row concerns, all of them even if one fails."""
        failure = None
        for processor, applies_N in self._processors:
            if applies_N[row]:
                applies_N[row] = False
                try:
                    _call(processor, "remove_row", row)
                except RuntimeError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def apply_(
        self,
        logits_RV: torch.Tensor,
        rows_R: np.ndarray,
        row_index_R: torch.Tensor,
        positions_R: torch.Tensor,
        vocabulary: VocabularySlice,
    ) -> None:
        """Have the logits of each row edited in place; arguments are those of Sampler.sample, without padding.

        vocabulary: whose columns these are. Processors edit whole rows, which are gathered for them.
        """
        if vocabulary.is_divided:
            whole_RV = vocabulary.gathered(logits_RV)
            self._apply(whole_RV, rows_R, row_index_R, positions_R)
            logits_RV.copy_(vocabulary.of_whole(whole_RV))
        else:
            self._apply(logits_RV, rows_R, row_index_R, positions_R)

    def _apply(
        self, logits_RV: torch.Tensor, rows_R: np.ndarray, row_index_R: torch.Tensor, positions_R: torch.Tensor
    ) -> None:
        for processor, applies_N in self._processors:
            chosen = np.flatnonzero(applies_N[rows_R])
            if len(chosen) == len(rows_R):
                _apply(processor, logits_RV, row_index_R, positions_R)
            elif len(chosen) > 0:
                index = upload(chosen, logits_RV.device)
                part_RV, *rest = (each.index_select(0, index) for each in (logits_RV, row_index_R, positions_R))
                _apply(processor, part_RV, *rest)
                logits_RV.index_copy_(0, index, part_RV)


def _apply(processor: LogitsProcessor, *arguments: torch.Tensor) -> None:
    returned = _call(processor, "apply", *arguments)
    if returned is not None:
        name = f"{processor_name(processor)}.apply"
        raise RuntimeError(f"logits processor {name} must edit in place and return None, got {type(returned).__name__}")


def _call(processor: LogitsProcessor, method: str, *arguments: Any) -> Any:
    """Raises RuntimeError, naming the processor, for whatever it raises."""
    try:
        return getattr(processor, method)(*arguments)
    except Exception as error:
        name = f"{processor_name(processor)}.{method}"
        raise RuntimeError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
