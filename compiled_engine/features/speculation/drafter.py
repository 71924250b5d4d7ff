"""Provides the base class of draft models and draft heads, which make a step's drafts in several passes.

All passes of a step are one CUDA graph if the batch has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.forward import ModelForward
from compiled_engine.engine.input_batch import InputBatch, InputBuffers
from compiled_engine.engine.step_hooks import FeatureModel, StepFeature
from compiled_engine.engine.warm_up import BatchShape, compile_forward, not_captured, start_up_batches
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.process.progress import Progress

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Drafting:
    """The work of a draft model, or draft head, in a step."""

    rows: np.ndarray  # int32 [R], rows of the requests that have sampled, by descending room for drafts
    num_drafting: Sequence[int]  # number of requests with room for each draft
    longest: int  # upper bound of the contexts
    key: GraphKey | None  # the graph to replay; None: no graph
    prompts: InputBatch | None  # the prompt tokens to compute; None if there are none
    num_tokens: int  # tokens of the first pass


def single_tokens(num_rows: int, query_len: int, longest: int) -> InputBatch:
    """Return a batch of num_rows rows of one token each, in which `query_len` consecutive rows share a request.

    longest: upper bound of the contexts.
    """
    nothing = np.empty(0, np.int32)
    host = num_rows, query_len, longest
    return InputBatch(
        [], nothing, nothing, [], nothing > 0, num_rows, None, True, num_rows, num_rows, host, has_offsets=True
    )


class Drafter(StepFeature, ABC):
    """Makes drafts with passes of a draft model or draft head. `begin` stores the step's inputs in `_drafting`."""

    config: EngineConfig  # of the draft model or head
    query_lens: tuple[int, ...]  # numbers of rows that a request may have in a pass, besides one
    prompts: InputBuffers  # of the pass over prompts, whose kernels the other passes use too
    compiled: CompiledModel | None
    model: ModelForward
    _replay: Callable[[GraphKey, int], torch.Tensor]  # replays a graph for a number of tokens; set by `graphs`
    _drafting: Drafting | None = None  # of the step that is being launched

    @property
    def models(self) -> tuple[FeatureModel, ...]:
        return (FeatureModel("draft ", self.compiled, self.model),)

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Make the step's drafts, with a graph if there is one. A draft model then also computes the step's prompts."""
        drafting, self._drafting = self._drafting, None
        if drafting is None:
            return
        if drafting.key is None:
            self.draft(drafting)
        else:
            self._replay(drafting.key, drafting.num_tokens)
        self.read_prompts(drafting)

    @abstractmethod
    def draft(self, drafting: Drafting) -> None:
        """Launch the passes that make the drafts, without a graph."""

    def read_prompts(self, drafting: Drafting) -> None:
        """Launch a pass over the step's prompts. Does nothing for a draft head, which reads prompts after the step."""

    def check_weights(self, tensors: dict[str, torch.Tensor], source: Path) -> CheckedWeights | None:
        """Check the tensors of a checkpoint that belong to the draft model or head, as RankWeights.check does.

        Returns None if none does, as here: only the drafters of MTP layers have tensors in the model's checkpoint.
        source: the checkpoint's path.
        """
        return None

    @abstractmethod
    def launch_inputs(self, *, alone: bool) -> None:
        """Launch the kernels of a pass over padding, except those of the draft model or head.

        alone: only this rank calls this, as in a dry run, so it must not wait for other ranks.
        """

    @abstractmethod
    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Run passes over padding, without side effects.

        See AttentionInputs for `host_3`, and ModelForward.run for `distinct`.
        """

    def _batches(self) -> list[BatchShape]:
        """Return the shapes of the start-up batches: for the first pass, further passes, and prompts."""
        most = self.config.scheduler.max_num_seqs
        shapes = start_up_batches(self.config, self.query_lens)
        return [
            shape if shape.query_len > 1 else shape._replace(num_requests=min(shape.num_requests, most))
            for shape in shapes
        ]

    def compile_kernels(self) -> None:
        for shape in self._batches()[1:]:
            compile_forward(self.config, self.model, self.prompts, shape)
        self.launch_inputs(alone=True)

    def start_up(self, progress: Progress) -> int:
        device, shapes = self.config.device, not_captured(self.config, self._batches())
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        self.launch_inputs(alone=False)
        with progress.stage("warm up draft model", total=len(shapes)) as progressed:
            for shape in shapes:
                self.run_empty(shape.num_tokens, shape.num_requests, shape.host_3, distinct=shape != shapes[0])
                progressed(1)
        if not on_gpu:
            return 0
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak
