"""Drafts that a test knows to be right or wrong, made where a GPU makes them: after the batch, unknown to the host."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.speculation.step_drafts import StepDrafts


class Oracle:
    """Drafts tokens that follow known prompts, of which the first few are right, as many as is drawn from num_right."""

    def __init__(self, num_right: Sequence[int]) -> None:
        self.num_right = num_right
        self.sequences: list[list[int]] = []  # prompts with their outputs
        self.parts: RunnerParts | None = None  # of the newest runner that has its drafts
        self._draw = random.Random(7)

    def drafts(self, known: list[int], most: int, vocab_size: int) -> list[int]:
        for sequence in self.sequences:
            if sequence[: len(known)] == known:
                following = sequence[len(known) :][:most]
                right = self._draw.choice(self.num_right)
                return following[:right] + [(token + 1) % vocab_size for token in following[right:]]
        return []

    def features(self, parts: RunnerParts) -> list[StepFeature]:
        """Return the features of drafts; takes the place of features.registry.drafting."""
        if not parts.config.speculation.num_tokens:
            return []
        self.parts = parts
        return [StepDrafts(parts, known=False), _OracleDrafts(self, parts)]


class _OracleDrafts(StepFeature):
    def __init__(self, oracle: Oracle, parts: RunnerParts) -> None:
        self._oracle, self._states, self._buffers = oracle, parts.states, parts.buffers
        self._vocab_size = parts.config.model.vocab_size

    def before_inputs(self, batch: InputBatch) -> None:
        states, offsets_R = self._states, self._buffers.offsets_R
        assert states.ahead_SK is not None
        assert offsets_R is not None
        for row, offset in zip(self._buffers.rows_R[: batch.num_rows].tolist(), offsets_R.tolist(), strict=False):
            computed = int(states.num_computed_S[row])
            if row < 0 or offset or computed < int(states.prefill_len_S[row]):
                continue
            known = states.all_token_ids(row)[: computed + 1].tolist()
            drafts = self._oracle.drafts(known, states.ahead_SK.shape[1], self._vocab_size)
            states.ahead_SK[row] = -1
            states.ahead_SK[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
