"""Hooks of features around a step on the device, and the tail that follows the forward.

A feature overrides the methods of `StepFeature` that it needs. The runner collects the overrides once (`StepHooks`), so
a hook that no feature overrides costs nothing. A runner has one `Tail`, which processes the forward's output.

The order of a step:

    added, removed           requests get and lose rows
    begin                    rows are up to date; nothing of the step is launched
    variant, wants_hidden    which forward computes the step, and what it returns
    receive                  inputs are staged; the feature's launches precede the forward
    after_forward            launches that read hidden states
    after_sample             the states have the step's tokens, masks applied
    end                      the step is launched, except for sampling that awaits masks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.stages import StageLink
from compiled_engine.process.overriding import overriding
from compiled_engine.runner.input_batch import InputBatch, InputBuffers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.pending_steps import Deferred
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.step_sampling import StepAdvance
from compiled_engine.sampling.ranks import VocabularySlice


class Tail(Protocol):
    """Launches what follows the forward."""

    advance: StepAdvance  # takes the results into the states

    def graphed(self, output: ForwardOutput, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Launch the part that a graph of decodes holds; returns the graph's result."""
        ...

    def take(self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]) -> torch.Tensor | None:
        """Launch the rest, except for what may await masks.

        Returns the logits [R, V] of rows that sample, or None. Further results go into `results`, by feature name.
        """
        ...


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner that its features are made from."""

    config: EngineConfig
    group: Group
    link: StageLink | None  # None without pipeline stages
    compiled: CompiledModel | None
    module: nn.Module  # the model, which runs if `compiled` is None
    tensors: dict[str, torch.Tensor]  # parameters by name, packed ones included
    model: ModelForward
    states: RequestStates
    buffers: InputBuffers
    advance: StepAdvance
    vocabulary: VocabularySlice


class StepFeature:
    """The part of a feature on a rank's device. Methods do nothing unless overridden."""

    name = ""  # of its results in RunnerOutput, and of its part of messages' extras
    calls: tuple[str, ...] = ()  # names of the methods that serve control calls

    def added(self, row: int, request: NewRequest) -> None:
        """Note a request that got a row of the states."""

    def removed(self, row: int) -> None:
        """Forget the request of this row."""

    def begin(self, step: SchedulerOutput) -> None:
        """Launch what precedes everything else of the step.

        Its requests have their rows; row fields set by `added` are on the device from `receive` on.
        """

    def variant(self, step: SchedulerOutput) -> str:
        """Return the variant of the forward that the step needs, "" for the usual one."""
        return ""

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether `after_forward` needs hidden states, so that the forward must not end at logits."""
        return False

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Launch what comes between the staged writes and the forward."""

    def after_forward(self, batch: InputBatch, output: ForwardOutput) -> Deferred | None:
        """Launch what reads hidden states, in steps for which a feature wanted them.

        Only here are copies to the host launched (rows/staged_writes.download); they are read once the step has ended.
        """
        return None

    def after_sample(self, batch: InputBatch) -> None:
        """Launch what reads the step's tokens from the states."""

    def end(self, step: SchedulerOutput) -> None:
        """Launch what follows the step."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the runner, under names that no other part uses."""
        return {}

    def close(self) -> None:
        """Wait for background work, and drop references to device memory."""


MakeFeatures = Callable[[RunnerParts], tuple[Sequence[StepFeature], Tail | None]]
"""Makes the features of a runner, and its tail; None if the runner samples."""


class StepHooks:
    """The overridden hooks of a runner's features, each a list in the order of features."""

    def __init__(self, features: Sequence[StepFeature]) -> None:
        self.features = tuple(features)
        self.reading_hidden = tuple(each for each in features if overriding((each,), StepFeature.after_forward))
        if nameless := [type(each).__name__ for each in self.reading_hidden if not each.name]:
            raise ValueError(f"{nameless[0]} has results, so it must have a name; allowed: any but ''")
        self.added = overriding(features, StepFeature.added)
        self.removed = overriding(features, StepFeature.removed)
        self.begin = overriding(features, StepFeature.begin)
        self.variant = overriding(features, StepFeature.variant)
        self.wants_hidden = overriding(features, StepFeature.wants_hidden)
        self.receive = overriding(features, StepFeature.receive)
        self.after_sample = overriding(features, StepFeature.after_sample)
        self.end = overriding(features, StepFeature.end)
