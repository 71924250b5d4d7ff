"""The sampler: the state of each row, and the steps from logits to tokens, which stay on the device.

The order is that of vLLM: log-probabilities of the raw logits; logit bias, bad words, min_tokens; the user's logits
processors, which greedy rows have as well; penalties; temperature, min-p, top-k, top-p; Gumbel-max. Allowed tokens and
token masks come before the penalties, so that no processor can allow forbidden tokens. Only steps that some row of the
batch needs are computed. The host never waits for the device, and does not need earlier tokens.

With a divided vocabulary each rank does all of this with its own columns, and ranks exchange a few numbers per row.
Whole rows are gathered for logits processors, and for the thresholds of top-p without a top-k.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from compiled_engine.parallel.group import Group
from compiled_engine.rows.row_fields import RowField, RowFields
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling import edits, filters
from compiled_engine.sampling.edits import EditedRows, StepMasks
from compiled_engine.sampling.filters import ROW_FIELDS, filter_fields, has_filters
from compiled_engine.sampling.gumbel import fastest_sample
from compiled_engine.sampling.logits_processor import LogitsProcessor, ProcessedRows
from compiled_engine.sampling.logprobs import NO_LOGPROBS
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice, choose_of_ranks, filter_candidates, row_chunks


@dataclass(frozen=True)
class SamplingOperations:
    """The operations that exist twice, as Triton kernels and for the CPU, in the order of sampling.

    Arguments are those of edits.py and gumbel.sample; `choose` may take a Best as well on the CPU, and a
    VocabularySlice on a GPU, where it ends with the choice of all ranks.
    """

    add_: Callable[..., None]
    forbid_: Callable[..., None]
    penalise_: Callable[..., None]
    thresholds: Callable[[torch.Tensor, torch.Tensor, RowFields], torch.Tensor]
    choose: Callable[..., None]
    record_: Callable[..., None]


def sampling_operations(triton: bool) -> SamplingOperations:
    if not triton:
        return SamplingOperations(
            edits.add_,
            edits.forbid_,
            edits.penalise_,
            _thresholds_on_cpu,
            fastest_sample(),
            edits.record_,
        )
    # Triton is not installed everywhere.
    from compiled_engine.sampling import edits_triton, filters_triton, gumbel_triton

    def thresholds(logits_SV: torch.Tensor, row_index_S: torch.Tensor, rows: RowFields) -> torch.Tensor:
        return filters_triton.thresholds(logits_SV, row_index_S, *(rows[name] for name in filters.FIELDS))

    return SamplingOperations(
        edits_triton.add_,
        edits_triton.forbid_,
        edits_triton.penalise_,
        thresholds,
        gumbel_triton.sample,
        edits_triton.record_,
    )


def _thresholds_on_cpu(logits_SV: torch.Tensor, row_index_S: torch.Tensor, rows: RowFields) -> torch.Tensor:
    row_index = row_index_S.numpy()
    fields = {name: rows[name].numpy() for name in filters.FIELDS}
    present = np.flatnonzero(row_index >= 0)
    if len(present) == len(row_index):
        return filters.thresholds(logits_SV, filters.Filters.from_fields(fields, row_index))
    threshold_S = torch.full((len(row_index),), -torch.inf)
    of_rows = filters.Filters.from_fields(fields, row_index[present])
    threshold_S[present] = filters.thresholds(logits_SV[present], of_rows)
    return threshold_S


class SamplerClass(enum.Enum):
    """The kinds of batches.

    TEMPERATURE_ONLY: temperature and seed, greedy included; may be sampled in a CUDA graph.
    """

    TEMPERATURE_ONLY = enum.auto()
    GENERAL = enum.auto()


class Sampler:
    """Rows are added and removed with requests; `sample` serves any subset of them in any order.

    A row's tokens depend only on its own logits, parameters, seed and positions. rows: the store of the rows'
    parameters, on the logits' device, which determines whether kernels or numpy are used. processors: the user's, in
    the order of their calls. group: the ranks among which the vocabulary is divided; None if it is not. `vocabulary`:
    the columns of this rank.
    """

    def __init__(
        self,
        rows: RowFields,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        group: Group | None = None,
    ) -> None:
        self._rows, self._device, self._num_rows = rows, rows.device, rows.num_rows
        self.vocabulary = VocabularySlice.of(vocab_size, group)
        self.num_exchanges = 0  # exchanges begun with the other ranks, except in graphs
        self._operations = sampling_operations(rows.triton)
        max_num_rows = rows.num_rows

        def flags() -> np.ndarray:
            return np.zeros(max_num_rows + 1, dtype=bool)  # the last is that of padding, row -1, and stays False

        self._present_N = flags()
        self._filtered_N = flags()
        self._penalised_N = flags()
        self._added_to_N = flags()
        self._processed_N = flags()
        self._limited_N = flags()  # has allowed tokens
        self._edited_N = flags()  # any of the four, or a mask that is not applied while tokens are chosen
        self._general_N = flags()  # anything beyond temperature and seed
        self._remembered_N = flags()
        self._num_logprobs_N = np.full(max_num_rows + 1, NO_LOGPROBS)
        self._top_k_N = np.zeros(max_num_rows + 1, np.int32)
        self._top_p_N = np.ones(max_num_rows + 1, np.float32)
        rows.declare(RowField("seed", torch.int64), *ROW_FIELDS)
        self._temperature_and_seed = rows["inverse_temperature"], rows["seed"]
        self._edits = EditedRows(rows, self.vocabulary)
        self._processors = ProcessedRows(max_num_rows, processors)

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: Iterable[int],
        *,
        masked: bool = False,
    ) -> None:
        """Give a free row, just started (`RowFields.start`), to a request; `masked`: it is sampled with a mask, see
        `sample`.

        What it writes to the device is staged. seed: params.seed, or the one chosen for the request if that is None; 64
        bits, signed or not. token_ids: the prompt, num_prompt_tokens long, and what was generated before (a preempted
        request); all of it has to be known. Raises ValueError if the row is taken or out of range, RuntimeError or
        TypeError if a logits processor fails; the row is free then.
        """
        if not 0 <= row < self._num_rows or self._present_N[row]:
            raise ValueError(f"row must be a free one from 0 to {self._num_rows - 1}, got {row}")
        edits = self._edits.add_row(row, params, token_ids, num_prompt_tokens, eos_token_ids)
        signed_seed = (int(seed) + 2**63) % 2**64 - 2**63
        filters = filter_fields(params)
        self._rows.set(row, seed=signed_seed, **filters)
        processed = self._processors.add_row(row, params, token_ids, num_prompt_tokens)
        self._top_k_N[row], self._top_p_N[row] = filters["top_k"], filters["top_p"]
        self._filtered_N[row] = has_filters(params)
        self._penalised_N[row] = edits.penalised
        self._added_to_N[row] = edits.added_to
        self._processed_N[row] = processed
        self._limited_N[row] = edits.limited
        mask_edits = masked and (has_filters(params) or not self._rows.triton)
        self._edited_N[row] = edits.penalised or edits.added_to or processed or edits.limited or mask_edits
        self._remembered_N[row] = edits.remembered
        self._num_logprobs_N[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._general_N[row] = has_filters(params) or masked or self._edited_N[row]
        self._present_N[row] = True

    def remove_row(self, row: int) -> None:
        """Free a row. Raises ValueError if it is free; RuntimeError, when it is freed, if a logits processor fails."""
        if not 0 <= row < self._num_rows or not self._present_N[row]:
            raise ValueError(f"row must be one that was added, got {row}")
        self._present_N[row] = False
        self._processors.remove_row(row)

    def sampler_class(self, rows: np.ndarray) -> SamplerClass:
        """Return what these rows need together; -1 is padding and needs nothing."""
        return SamplerClass.GENERAL if self._general_N[rows].any() else SamplerClass.TEMPERATURE_ONLY

    def num_logprobs(self, rows: np.ndarray) -> np.ndarray | None:
        """Number of log-probabilities per row, for batch_logprobs, if any row has them; -1 is padding and has none."""
        wanted = self._num_logprobs_N[rows]
        return None if (wanted == NO_LOGPROBS).all() else wanted

    def sample_by_temperature(
        self,
        logits_SV: torch.Tensor,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
    ) -> None:
        """Choose tokens for rows that are TEMPERATURE_ONLY, into token_ids_S (int64 [S], device).

        Other arguments: see sample. Reads device memory alone, always at the same addresses, so on a GPU it may be
        captured; on a CPU the logits have to be float32. The rows' staged writes have to be made before.
        """
        self._choose_above(None, logits_SV, row_index_S, positions_S, token_ids_S)

    def sample_drafts(
        self,
        logits_SV: torch.Tensor,
        known_ids_V: torch.Tensor,
        sharpness_1: torch.Tensor,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
    ) -> None:
        """Choose drafts as `sample_by_temperature` chooses tokens, from a head's logits times sharpness_1 (float32).

        logits_SV: of the tokens known_ids_V (int64 [V], device), all of them on each rank. May be captured.
        """
        arguments = row_index_S, positions_S, *self._temperature_and_seed, None, token_ids_S
        if self._rows.triton:
            self._operations.choose(logits_SV, *arguments, known_ids_V=known_ids_V, sharpness_1=sharpness_1)
            return
        whole_SV = torch.full((len(logits_SV), self.vocabulary.whole_size), -torch.inf)
        whole_SV[:, known_ids_V] = logits_SV.float() * sharpness_1
        self._operations.choose(whole_SV, *arguments)

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        masks: StepMasks | None = None,
    ) -> torch.Tensor:
        """Choose the next token of each of these rows, and add it to their history. The host does not wait.

        Returns int64 [S] on the device, a token for each row of logits, or why there is none (sampled_tokens.py).

        logits_SV: [S, V], the columns of `vocabulary`, of any floating dtype, not changed. rows_S: int [S], on the
        host: logits_SV[i] belongs to rows_S[i]; -1 is padding, whose token is 0. row_index_S: the same as int32 on the
        device. positions_S: int64 [S] on the device, the position of each new token in its request. masks: for masked
        rows. A row may occur repeatedly unless it has penalties or bad words, whose history takes one token a step.
        Raises ValueError if the shapes disagree, RuntimeError if a logits processor fails.
        """
        num_samples = len(rows_S)
        lengths = (len(row_index_S), len(positions_S))
        if logits_SV.shape != (num_samples, self.vocabulary.size) or lengths != (num_samples, num_samples):
            raise ValueError(
                f"logits_SV must be [{num_samples}, {self.vocabulary.size}] for as many rows and positions, "
                f"got {list(logits_SV.shape)}, {lengths[0]} row indices and {lengths[1]} positions"
            )
        self._rows.writes.apply()
        if not self._rows.triton:
            logits_SV = logits_SV.float().contiguous()
        token_ids_S = torch.empty(num_samples, dtype=torch.int64, device=self._device)
        edited = np.flatnonzero(self._edited_N[rows_S])
        if len(edited) == 0:
            self._choose(logits_SV, rows_S, row_index_S, positions_S, token_ids_S, masks)
        else:
            edited_E = upload(edited, self._device)
            if len(edited) < num_samples:
                others_S = row_index_S.index_fill(0, edited_E, -1)
                self._choose(logits_SV, rows_S, others_S, positions_S, token_ids_S, masks)
            for chunk in row_chunks(len(edited), self.vocabulary.size):
                index_R = edited_E[chunk]
                part = tuple(each.index_select(0, index_R) for each in (logits_SV, row_index_S, positions_S))
                part_masks = masks.select(index_R) if masks else None
                token_ids_R = self._choose_edited(part[0].float(), rows_S[edited[chunk]], part[1], part[2], part_masks)
                token_ids_S.index_copy_(0, index_R, token_ids_R)
        if self._remembered_N[rows_S].any():
            self._operations.record_(row_index_S, token_ids_S, self._rows, self.vocabulary.first)
        return token_ids_S

    def _choose_edited(
        self,
        logits_RV: torch.Tensor,
        rows_R: np.ndarray,
        row_index_R: torch.Tensor,
        positions_R: torch.Tensor,
        masks: StepMasks | None,
    ) -> torch.Tensor:
        """Token ids, int64 [R], after all edits: in place, so logits_RV is a copy (float32, a chunk)."""
        if self._added_to_N[rows_R].any():
            self._operations.add_(logits_RV, row_index_R, positions_R, self._rows)
        if self._processed_N[rows_R].any():
            self.num_exchanges += 1
            self._processors.apply_(logits_RV, rows_R, row_index_R, positions_R, self.vocabulary)
        if self._limited_N[rows_R].any():
            self._operations.forbid_(logits_RV, self._edits.allowed(row_index_R))
        if masks is not None:
            self._operations.forbid_(logits_RV, masks)
        if self._penalised_N[rows_R].any():
            self._operations.penalise_(logits_RV, row_index_R, self._rows)
        token_ids_R = torch.empty(len(rows_R), dtype=torch.int64, device=self._device)
        self._choose(logits_RV, rows_R, row_index_R, positions_R, token_ids_R)
        return token_ids_R

    def _choose(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
        masks: StepMasks | None = None,
    ) -> None:
        """masks: applied here on a GPU; already applied on a CPU."""
        threshold_S = None
        if self._filtered_N[rows_S].any():
            filtered = rows_S[self._filtered_N[rows_S]]
            self.num_exchanges += 1
            top_k, top_p = self._top_k_N[filtered], self._top_p_N[filtered]
            candidates_SC = filter_candidates(logits_SV, top_k, top_p, self.vocabulary)
            threshold_S = self._operations.thresholds(candidates_SC, row_index_S, self._rows)
        self.num_exchanges += 1
        self._choose_above(threshold_S, logits_SV, row_index_S, positions_S, token_ids_S, masks)

    def _choose_above(
        self,
        threshold_S: torch.Tensor | None,
        logits_SV: torch.Tensor,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
        masks: StepMasks | None = None,
    ) -> None:
        arguments = (logits_SV, row_index_S, positions_S, *self._temperature_and_seed, threshold_S, token_ids_S)
        if self._rows.triton:
            self._operations.choose(*arguments, masks, self.vocabulary)
        elif self.vocabulary.is_divided:
            choose = partial(self._operations.choose, *arguments)
            choose_of_ranks(choose, self.vocabulary, row_index_S, token_ids_S)
        else:
            self._operations.choose(*arguments)
