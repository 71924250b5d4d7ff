"""The sampler: per-row state, and the steps from logits to tokens, which stay on the device.

The order is vLLM's: log-probabilities of the raw logits; logit bias, bad words, min_tokens; users' logits processors,
for greedy rows too; penalties; temperature (applied in gumbel.py), min-p, top-k, top-p; Gumbel-max. Allowed tokens and
token masks apply before the penalties, so that no processor can allow a forbidden token. Only steps that some row needs
are computed. The host never waits for the device, and does not need earlier tokens.

With a divided vocabulary each rank samples from its own columns, and ranks exchange a few numbers per row. Whole rows
are gathered for logits processors, and for some filters, see filter_candidates.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from compiled_engine.parallel.group import Group, fake_group_for
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
    """The operations of sampling that exist twice, as Triton kernels and for the CPU, in the order in which they run.

    The arguments are those of the functions in edits.py and of gumbel.sample; `thresholds` takes the logits, the index
    of each row, and the row fields. On the CPU, `choose` also takes a Best, which receives the scores of the chosen
    tokens. On a GPU it takes a VocabularySlice, and combines the choices of all ranks.
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


StepEdits = StepMasks
"""Edits of logits that come with a step. All other edits are known when a row is added."""


class SamplerClass(enum.Enum):
    """The class of a batch, by what the sampling of its rows needs.

    TEMPERATURE_ONLY: all rows need only a temperature, 0 included, and a seed. A CUDA graph may contain the sampling.
    GENERAL: all other batches.
    """

    TEMPERATURE_ONLY = enum.auto()
    GENERAL = enum.auto()


class Sampler:
    """Samples tokens. A row is added for each request and removed at its end; `sample` takes any rows in any order.

    A row's tokens depend only on its own logits, parameters, seed, positions and history, not on other rows.

    rows: store of the rows' parameters, on the device of the logits. rows.triton: use kernels, otherwise numpy.
    processors: the user's logits processors, in calling order.
    group: ranks that divide the vocabulary; None if undivided. The attribute `vocabulary` has this rank's columns.
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
        self.num_exchanges = 0  # exchanges started with the other ranks, except in graphs
        self._operations = sampling_operations(rows.triton)
        max_num_rows = rows.num_rows

        def flags() -> np.ndarray:
            return np.zeros(max_num_rows + 1, dtype=bool)  # the last is for padding, row -1, and stays False

        self._present_N = flags()
        self._filtered_N = flags()
        self._penalised_N = flags()
        self._added_to_N = flags()
        self._processed_N = flags()
        self._limited_N = flags()  # has allowed tokens
        self._edited_N = flags()  # any of the previous four, or a mask that `choose` does not apply
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
        edited_late: bool = False,
    ) -> None:
        """Assign a free row to a request. The row must have been started (`RowFields.start`).

        seed: params.seed, or the seed chosen for the request if that is None; 64 bits, signed or not.
        token_ids: the prompt, num_prompt_tokens long, followed by the tokens generated before a preemption.
        edited_late: the row gets a token mask with each step, see `masks` of `sample`.

        Writes to the device are staged.

        Raises ValueError if the row is taken or out of range. If a logits processor fails, raises RuntimeError or
        TypeError, and the row stays free.
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
        mask_edits = edited_late and (has_filters(params) or not self._rows.triton)
        self._edited_N[row] = edits.penalised or edits.added_to or processed or edits.limited or mask_edits
        self._remembered_N[row] = edits.remembered
        self._num_logprobs_N[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._general_N[row] = has_filters(params) or edited_late or self._edited_N[row]
        self._present_N[row] = True

    def add_processor(self, processor: LogitsProcessor) -> None:
        """Add a feature's logits processor, which is called after the others. No row may be taken."""
        self._processors.add(processor)

    def alone(self) -> Sampler:
        """Return a sampler that shares this one's rows, but exchanges nothing with other ranks.

        So one rank can run the returned sampler alone. Its tokens are right only if there is one rank.
        """
        sampler = copy.copy(self)
        sampler.vocabulary = replace(self.vocabulary, group=fake_group_for(self.vocabulary.group))
        return sampler

    def remove_row(self, row: int) -> None:
        """Free a row. Raises ValueError if it is free already, or out of range.

        Raises RuntimeError, after freeing the row, if a logits processor fails.
        """
        if not 0 <= row < self._num_rows or not self._present_N[row]:
            raise ValueError(f"row must be one that was added, got {row}")
        self._present_N[row] = False
        self._processors.remove_row(row)

    def sampler_class(self, rows: np.ndarray) -> SamplerClass:
        """Return the class of a batch of these rows; -1 is padding."""
        return SamplerClass.GENERAL if self._general_N[rows].any() else SamplerClass.TEMPERATURE_ONLY

    def num_logprobs(self, rows: np.ndarray) -> np.ndarray | None:
        """Return how many log-probabilities each row requests, as batch_logprobs takes them; None if no row does.

        rows: the rows of the batch's requests, on the host; -1 for padding.
        """
        wanted = self._num_logprobs_N[rows]
        return None if (wanted == NO_LOGPROBS).all() else wanted

    def sample_by_temperature(
        self,
        logits_SV: torch.Tensor,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
    ) -> None:
        """Choose the tokens of a TEMPERATURE_ONLY batch, and write them to token_ids_S (int64 [S], on the device).

        The other arguments are those of `sample`.

        Reads only device memory at fixed addresses, so a CUDA graph may capture it. On a CPU the logits must be
        float32. The rows' staged writes must have been applied.
        """
        self._choose_above(None, logits_SV, row_index_S, positions_S, token_ids_S)

    def sample_drafts(
        self,
        logits_SV: torch.Tensor,
        known_ids_V: torch.Tensor | None,
        sharpness_1: torch.Tensor,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
    ) -> None:
        """Choose draft tokens like `sample_by_temperature`, from a draft head's logits times sharpness_1 (float32).

        known_ids_V: for a head whose columns are not divided among ranks, the token id of each column, int64 [V], on
        the device. None: the columns are those of `vocabulary`. A CUDA graph may capture this.
        """
        arguments = row_index_S, positions_S, *self._temperature_and_seed, None, token_ids_S
        if self._rows.triton:
            slice_of_ranks = self.vocabulary if known_ids_V is None else None
            self._operations.choose(
                logits_SV, *arguments, None, slice_of_ranks, known_ids_V=known_ids_V, sharpness_1=sharpness_1
            )
            return
        if known_ids_V is None:
            scaled_SV = logits_SV.float() * sharpness_1
            self._choose_above(None, scaled_SV, row_index_S, positions_S, token_ids_S)
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
        masks: StepEdits | None = None,
        processed_SV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Choose the next token of each row, and add it to the row's history. The host does not wait.

        Returns int64 [S] on the device: a token for each row of logits, or an error code (sampled_tokens.py).

        logits_SV: [S, V], the columns of `vocabulary`, any floating dtype, not changed. rows_S: int [S], on the host:
        logits_SV[i] belongs to rows_S[i]; -1 is padding, whose token is 0. row_index_S: rows_S as int32 on the device.
        positions_S: int64 [S] on the device, the position of each new token in its request. masks: the token masks of
        rows that were added with edited_late. processed_SV: float32 [S, V], receives what `process` writes. A row may
        repeat unless it has penalties or bad words, since its history advances by one token per step.

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
            self._choose(logits_SV, rows_S, row_index_S, positions_S, token_ids_S, masks, processed_SV)
        else:
            edited_E = upload(edited, self._device)
            if len(edited) < num_samples:
                others_S = row_index_S.index_fill(0, edited_E, -1)
                self._choose(logits_SV, rows_S, others_S, positions_S, token_ids_S, masks, processed_SV)
            for chunk in row_chunks(len(edited), self.vocabulary.size):
                index_R = edited_E[chunk]
                part = tuple(each.index_select(0, index_R) for each in (logits_SV, row_index_S, positions_S))
                part_masks = masks.select(index_R) if masks else None
                edited_RV = part[0].float()
                processed_RV = None if processed_SV is None else torch.empty_like(edited_RV)
                rows_R = rows_S[edited[chunk]]
                token_ids_R = self._choose_edited(edited_RV, rows_R, part[1], part[2], part_masks, processed_RV)
                token_ids_S.index_copy_(0, index_R, token_ids_R)
                if processed_SV is not None and processed_RV is not None:
                    processed_SV.index_copy_(0, index_R, processed_RV)
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
        processed_RV: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply penalties, biases and masks to logits_RV in place, choose tokens, and return their ids, int64 [R].

        logits_RV: float32, a copy of the step's logits for the requests that need such edits. rows_R, row_index_R: the
        rows of these requests, on the host and on the device. masks, positions_R, processed_RV: see `sample`.
        """
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
        self._choose(logits_RV, rows_R, row_index_R, positions_R, token_ids_R, processed_SV=processed_RV)
        return token_ids_R

    def _choose(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        row_index_S: torch.Tensor,
        positions_S: torch.Tensor,
        token_ids_S: torch.Tensor,
        masks: StepMasks | None = None,
        processed_SV: torch.Tensor | None = None,
    ) -> None:
        """Compute the thresholds of filters, choose tokens at or above them, and write the tokens to token_ids_S.

        masks: applied here on a GPU. On a CPU the caller has applied the masks. Other arguments: see `sample`.
        """
        threshold_S = None
        if self._filtered_N[rows_S].any():
            filtered = rows_S[self._filtered_N[rows_S]]
            self.num_exchanges += 1
            top_k, top_p = self._top_k_N[filtered], self._top_p_N[filtered]
            candidates_SC = filter_candidates(logits_SV, top_k, top_p, self.vocabulary)
            threshold_S = self._operations.thresholds(candidates_SC, row_index_S, self._rows)
        if processed_SV is not None:
            self.process(logits_SV, row_index_S, processed_SV, threshold_S, masks)
        self.num_exchanges += 1
        self._choose_above(threshold_S, logits_SV, row_index_S, positions_S, token_ids_S, masks)

    def process(
        self,
        logits_SV: torch.Tensor,
        row_index_S: torch.Tensor,
        processed_SV: torch.Tensor,
        threshold_S: torch.Tensor | None = None,
        masks: StepMasks | None = None,
    ) -> None:
        """Write the logits that tokens are drawn from to processed_SV, float32 [S, V].

        These are logits_SV, already edited, divided by the temperature (by 1 in greedy rows), and minus infinity below
        the threshold of filters and where masks forbid a token. Rows of padding get any values.
        """
        processed_SV.copy_(logits_SV)
        if threshold_S is not None:
            processed_SV.masked_fill_(processed_SV < threshold_S[:, None], -torch.inf)
        if masks is not None:
            self._operations.forbid_(processed_SV, masks)
        inverse_N, _ = self._temperature_and_seed
        inverse_S1 = inverse_N[row_index_S.long().clamp(min=0), None]
        processed_SV.mul_(torch.where(inverse_S1 > 0, inverse_S1, 1.0))

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
