"""Gives the sampler the token masks of a step, which the host computes while the step runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.structured.extras import NAME, TokenMasks, masks_in
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.ranks import VocabularySlice


class MaskedSteps(StepFeature):
    """Uploads each step's masks of the tokens that requests' grammars allow next.

    vocabulary: the slice of the vocabulary whose logits this rank computes.
    """

    name = NAME

    def __init__(self, vocabulary: VocabularySlice, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device

    def edits(self, batch: InputBatch, late: Any) -> StepMasks | None:
        masks = masks_in(late)
        if not masks.request_ids:
            return None
        words_MW, index_R = masks_of_batch(masks, batch.request_of_row)
        return StepMasks.of(self._vocabulary.own_words(words_MW), index_R, self._device)


def masks_of_batch(masks: TokenMasks, request_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks, int32 [M, W] with M at least 1, and each request's mask index, int32 [R], -1 for none."""
    place = {request_id: index for index, request_id in enumerate(masks.request_ids)}
    index_R = np.fromiter((place.get(request_id, -1) for request_id in request_ids), np.int32, len(request_ids))
    return np.frombuffer(masks.words, np.int32).reshape(len(place), -1), index_R
