"""Gives each request of a step a row for its newest token and one for each draft, and chooses what makes the drafts:
n-grams, a draft model or a draft head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add

import torch

from compiled_engine.engine.input_batch import InputBatch, make_batch
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import FeatureGraphs, RunnerParts, StepFeature, StepLayout
from compiled_engine.features.speculation.draft_head import DraftHead
from compiled_engine.features.speculation.draft_model import DraftModel
from compiled_engine.features.speculation.draft_rows import DraftedSteps, StepRows
from compiled_engine.features.speculation.graph_keys import StepKeys
from compiled_engine.features.speculation.ngram import Ngrams, NgramsOnHost
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey


def drafting(parts: RunnerParts) -> list[StepFeature]:
    """Return the features that lay out drafts and make them; [] for an engine without drafts.

    Drafts are made on the device, so a request has a row for each draft that it may have. n-grams on a CPU without
    captured graphs are the exception: they are found before a step's batch is made, and only existing drafts have rows.
    This saves work, since many requests have no drafts.
    """
    config = parts.config
    if not config.speculation.num_tokens:
        return []
    if (draft := config.draft) is None:
        known = config.device.type != "cuda" and not config.graph.captures
        ngrams = NgramsOnHost if known else Ngrams
        return [StepDrafts(parts, known=known), ngrams(config.speculation, parts.states, parts.buffers)]
    with parts.timeline.span("draft model"):
        drafter = DraftModel(draft, parts) if draft.model.head is None else DraftHead(draft, parts)
    return [StepDrafts(parts, known=False), drafter]


class StepDrafts(StepFeature):
    """Lays out steps with drafts: a request has a row for its newest token and one for each draft.

    `known`: the host knows the drafts when it makes a batch; otherwise there is a row for each draft that a request may
    have.
    """

    def __init__(self, parts: RunnerParts, *, known: bool) -> None:
        config = parts.config
        self._config, self._states, self._buffers = config, parts.states, parts.buffers
        self._steps = DraftedSteps(self._states, self._buffers, config.speculation.query_lens, known=known)
        self._keys = StepKeys.of((), config.scheduler.max_model_len)

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        """Return the graphs to capture. If steps may skip the head, they include graphs for both kinds of steps."""
        config = self._config
        self._keys = StepKeys.of(keys, config.scheduler.max_model_len, config.speculation.sizes_read)
        return FeatureGraphs(self._keys.captured, {})

    def lay_out(self, step: SchedulerOutput) -> StepLayout:
        if step.single:  # the step has no drafts, and no head reads it
            longest = max(step.starts, default=0) + 1
            return StepLayout(step.num_tokens, longest, None, partial(self._make_unread, step))
        rows, longest = self._steps.rows(step), max(map(add, step.starts, step.counts), default=0)
        return StepLayout(rows.num_tokens, longest, rows.query_len, partial(self._make_drafted, step, rows))

    def _make_unread(self, step: SchedulerOutput, key: GraphKey | None) -> InputBatch:
        return make_batch(step, self._states, self._buffers, None if key is None else self._keys.unread[key])

    def _make_drafted(self, step: SchedulerOutput, rows: StepRows, key: GraphKey | None) -> InputBatch:
        return self._steps.make_batch(step, rows, None if key is None else self._keys.read[key])
