"""The seams of the runner: what features do around a step on the device, and what follows the forward.

A feature overrides the methods of `StepFeature` that it needs. The runner collects them once (`StepHooks`), and calls
those alone: a hook that no feature has costs a step no call. `Tail` is what becomes of a
forward's output; a runner has one.

The order of a step:

    added, removed   rows of requests come and go
    begin            the rows are right; nothing of the step is launched
    variant, wants_hidden    which forward computes the step, and what it returns
    receive          the inputs are staged; launches of the feature come before the forward
    after_forward    launches that read hidden states
    after_sample     the tokens of the step are in the states, after masks where there are any
    end              all of the step is launched, but for sampling that awaits masks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.stages import StageLink
from compiled_engine.process.overriding import by_name, having, overriding, sole
from compiled_engine.runner.input_batch import InputBatch, InputBuffers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.pending_steps import Deferred
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.step_sampling import StepAdvance
from compiled_engine.sampling.ranks import VocabularySlice


class Tail(Protocol):
    """Launches what follows the forward. advance: takes what comes of it into the states."""

    advance: StepAdvance

    def launch_captured(self, output: ForwardOutput, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Launch the part that the graph of a batch of decodes holds, and return what a replay of it leaves."""
        ...

    def launch_rest(
        self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]
    ) -> torch.Tensor | None:
        """Launch the rest, but what may await masks. Returns the logits [R, V] of rows that sample, if any do. Results
        other than tokens are put into `results`, by the feature's name."""
        ...


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner that its features are made from. module: the model, which runs if `compiled` is None.
    tensors: parameters by name, packed ones included. link: None without stages."""

    config: EngineConfig
    group: Group
    link: StageLink | None
    compiled: CompiledModel | None
    module: nn.Module
    tensors: dict[str, torch.Tensor]
    model: ModelForward
    states: RequestStates
    buffers: InputBuffers
    advance: StepAdvance
    vocabulary: VocabularySlice


class StepFeature:
    """The part of a feature on a rank's device. No method does anything unless it is overridden.

    name: of its results in RunnerOutput, and of its part of messages' extras. calls: names of methods that answer
    control calls. rows: of requests that ask for something of the feature, which it keeps in `added` and `removed`:
    `variant` and `wants_hidden` are not called while there are none; None if the feature keeps no such rows.
    """

    name = ""
    calls: tuple[str, ...] = ()
    rows: Collection[int] | None = None

    def added(self, row: int, request: NewRequest) -> None:
        """Note a request that has got a row of the states."""

    def removed(self, row: int) -> None:
        """Forget the request that had the row."""

    def begin(self, step: SchedulerOutput) -> None:
        """Launch what comes before everything else of the step. Its requests have their rows; row fields that `added`
        has set are on the device from `receive` on."""

    def variant(self, step: SchedulerOutput) -> str:
        """Return the variant of the forward that the step needs, "" for the usual one. Only one feature may override
        this."""
        return ""

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether `after_forward` needs hidden states, so that the forward may not end at logits."""
        return False

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Launch what comes between the staged writes and the forward."""

    def after_forward(self, batch: InputBatch, output: ForwardOutput) -> Deferred | None:
        """Launch what reads hidden states; called for steps of which a feature wanted them. The only hook with a
        result: copies to the host are launched here (rows/staged_writes.download), and read when the step has ended."""
        return None

    def after_sample(self, batch: InputBatch) -> None:
        """Launch what reads the step's tokens from the states."""

    def end(self, step: SchedulerOutput) -> None:
        """Launch what comes after the step."""

    def metrics(self) -> dict[str, Any]:
        """Return figures for the runner's metrics, by names that no other part uses."""
        return {}

    def close(self) -> None:
        """Wait for what is under way, and drop references to the device's memory."""


MakeFeatures = Callable[[RunnerParts], tuple[Sequence[StepFeature], Tail | None]]
"""Makes the features of a runner, and its tail; None for one that samples."""


class StepHooks:
    """The hooks of a runner's features, each in the order of the features.

    reading_hidden, wanting_hidden, choosing_variant: the features that override `after_forward`, `wants_hidden` and
    `variant`; of the last there is one at most.

    Raises ValueError if several features override `variant` or have the same name, or if one that has results has none.
    """

    def __init__(self, features: Sequence[StepFeature]) -> None:
        self.features = tuple(features)
        by_name((each.name, each) for each in features if each.name)
        self.reading_hidden = having(features, StepFeature.after_forward)
        if nameless := [type(each).__name__ for each in self.reading_hidden if not each.name]:
            raise ValueError(f"{nameless[0]} has results, so it must have a name; allowed: any but ''")
        self.added = overriding(features, StepFeature.added)
        self.removed = overriding(features, StepFeature.removed)
        self.begin = overriding(features, StepFeature.begin)
        self.choosing_variant = sole(features, StepFeature.variant)
        self.wanting_hidden = having(features, StepFeature.wants_hidden)
        self.receive = overriding(features, StepFeature.receive)
        self.after_sample = overriding(features, StepFeature.after_sample)
        self.end = overriding(features, StepFeature.end)
