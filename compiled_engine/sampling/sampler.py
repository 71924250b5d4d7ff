"""The sampler: what persists for each row, and the way from logits to tokens.

The order is that of vLLM: log-probabilities of the raw logits; logit bias, bad words, min_tokens; penalties;
temperature, min-p, top-k, top-p; Gumbel-max. Only what some row of the batch asks for is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling import gumbel
from compiled_engine.sampling.bad_words import BadWords
from compiled_engine.sampling.filters import Filters, thresholds
from compiled_engine.sampling.logit_additions import LogitAdder, add_
from compiled_engine.sampling.logit_bias import LogitBias
from compiled_engine.sampling.logprobs import PendingLogprobs
from compiled_engine.sampling.min_tokens import MinTokens
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.penalties import RowPenalties, penalise_, row_penalties
from compiled_engine.sampling.selection import argmax
from compiled_engine.scheduling.step import TokenLogprobs

# -1 asks for the whole vocabulary.
NO_LOGPROBS = -2


@dataclass(frozen=True)
class SampledRows:
    """A token for each row, int64 [R] on the device, and the log-probabilities that were asked for, to be fetched."""

    token_ids_R: torch.Tensor
    _wanted: tuple[int, ...]
    _pending: PendingLogprobs | None

    def logprobs(self) -> list[TokenLogprobs | None]:
        """By row, None where the request did not ask. Waits for the device."""
        found: list[TokenLogprobs | None] = [None] * len(self.token_ids_R)
        if self._pending is not None:
            for row, entry in zip(self._wanted, self._pending.entries(), strict=True):
                found[row] = entry
        return found


class Sampler:
    """Rows are added and removed as requests come and go; `sample` serves any subset of them in any order.

    A row's tokens depend on its own logits, parameters, seed and positions alone. `device` is where the logits
    are; max_model_len bounds a request's tokens.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, max_model_len: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._max_different_tokens = min(vocab_size, max_model_len + 1)
        self._sample_tokens = _sample_tokens(self._device.type)
        self._present_R = np.zeros(max_num_rows, dtype=bool)
        self._seeds_R = np.zeros(max_num_rows, dtype=np.uint64)
        self._num_logprobs_R = np.full(max_num_rows, NO_LOGPROBS)
        self._filters = Filters.for_rows(max_num_rows)
        self._adders: dict[int, list[LogitAdder]] = {}
        self._output_ids: dict[int, list[int]] = {}
        self._penalties: dict[int, RowPenalties] = {}
        # Rows that ask for more than temperature and seed: sample_plain does not do for them.
        self.general_rows: set[int] = set()

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        """Give a free row to a request.

        seed: params.seed, or the one chosen for the request if that is None; 64 bits, signed or not.
        token_ids: the prompt, num_prompt_tokens long, and what was generated before (a preempted request).
        Raises ValueError if the row is taken or out of range.
        """
        if not 0 <= row < len(self._present_R) or self._present_R[row]:
            raise ValueError(f"row must be a free one from 0 to {len(self._present_R) - 1}, got {row}")
        self._present_R[row] = True
        self._seeds_R[row] = int(seed) % 2**64
        self._num_logprobs_R[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._filters.set_row(row, params)
        prompt_ids, output_ids = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        penalties = row_penalties(params, prompt_ids, output_ids, self._max_different_tokens)
        if penalties:
            self._penalties[row] = penalties
        adders = self._adders_for(params, eos_token_ids)
        if adders:
            self._adders[row] = adders
            self._output_ids[row] = list(output_ids)
        filtered = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        if penalties or adders or filtered or params.logprobs is not None:
            self.general_rows.add(row)

    def remove_row(self, row: int) -> None:
        """Free a row. Raises ValueError if it is free."""
        if not 0 <= row < len(self._present_R) or not self._present_R[row]:
            raise ValueError(f"row must be one that was added, got {row}")
        self._present_R[row] = False
        self.general_rows.discard(row)
        self._penalties.pop(row, None)
        self._adders.pop(row, None)
        self._output_ids.pop(row, None)

    @property
    def keeps_history(self) -> bool:
        """Whether any row does."""
        return bool(self._penalties or self._output_ids)

    def needs_history(self, rows: np.ndarray) -> bool:
        """Whether what these rows may sample depends on the tokens that they sampled before."""
        return any(row in self._penalties or row in self._output_ids for row in rows.tolist())

    def sample(self, logits_RV: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> SampledRows:
        """Choose the next token of each of these rows; `record` takes it into their history.

        logits_RV: [R, V], of any floating dtype, left as they are. rows: int [R], all different; logits_RV[i]
        belongs to rows[i]. positions: int [R], the position that each token will have in its request.
        Raises ValueError if the shapes disagree.
        """
        if logits_RV.shape != (len(rows), self._vocab_size) or len(positions) != len(rows):
            raise ValueError(
                f"logits_RV must be [{len(rows)}, {self._vocab_size}] for as many rows and positions, "
                f"got {list(logits_RV.shape)} and {len(positions)} positions"
            )
        logits_RV = logits_RV.float().contiguous()
        token_ids_R = self._choose(self._edited(logits_RV, rows), rows, positions)
        wanted = np.flatnonzero(self._num_logprobs_R[rows] != NO_LOGPROBS)
        pending = None
        if len(wanted) > 0:
            index = self._on_device(wanted)
            counts = self._num_logprobs_R[rows][wanted].tolist()
            pending = PendingLogprobs(logits_RV[index], token_ids_R[index], counts)
        return SampledRows(token_ids_R, tuple(wanted.tolist()), pending)

    def record(self, rows: np.ndarray, samples: np.ndarray, token_ids: list[int]) -> None:
        """Take in the tokens of a step's rows, of those with `samples`; a row that was removed since is skipped."""
        if not self.keeps_history:
            return
        for row, sampled, token_id in zip(rows.tolist(), samples.tolist(), token_ids, strict=True):
            if sampled and row in self._penalties:
                self._penalties[row].tokens.add(token_id)
            if sampled and row in self._output_ids:
                self._output_ids[row].append(token_id)

    def _edited(self, logits_RV: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """The logits with bias, bans and penalties: a copy if there are any."""
        if not self._adders and not self._penalties:
            return logits_RV
        row_list = rows.tolist()
        additions = [
            (index, addition)
            for index, row in enumerate(row_list)
            for adder in self._adders.get(row, ())
            if (addition := adder.additions(self._output_ids[row])) is not None
        ]
        penalties = [(index, self._penalties[row]) for index, row in enumerate(row_list) if row in self._penalties]
        if additions or penalties:
            logits_RV = logits_RV.clone()
        if additions:
            add_(logits_RV, additions)
        if penalties:
            penalise_(logits_RV, penalties)
        return logits_RV

    def _choose(self, logits_RV: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        filters = self._filters.of(rows)
        if not filters.inverse_temperature.any():
            return argmax(logits_RV)
        return self._sample_tokens(
            logits_RV,
            self._on_device(filters.inverse_temperature),
            self._on_device(self._seeds_R[rows].view(np.int64)),
            self._on_device(positions.astype(np.int64)),
            thresholds(logits_RV, filters),
        )

    def _adders_for(self, params: SamplingParams, eos_token_ids: Iterable[int]) -> list[LogitAdder]:
        adders: list[LogitAdder] = []
        if params.logit_bias:
            adders.append(LogitBias(params.logit_bias))
        if params.bad_words_token_ids:
            adders.append(BadWords(params.bad_words_token_ids))
        if params.min_tokens > 0:
            ending_ids = {*eos_token_ids, *(params.stop_token_ids or ())}
            adders.append(MinTokens(params.min_tokens, [i for i in ending_ids if i < self._vocab_size]))
        return adders

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _sample_tokens(device_type: str) -> Callable[..., torch.Tensor]:
    if device_type != "cuda":
        return gumbel.sample_tokens
    # Triton is not installed everywhere.
    from compiled_engine.sampling import gumbel_triton

    return gumbel_triton.sample_tokens
