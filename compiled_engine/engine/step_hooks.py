"""Hooks of features around a step on the device, and the tail that follows the forward.

A feature overrides the methods of `StepFeature` that it needs. The runner collects the overrides once (`StepHooks`), so
a hook that no feature overrides costs nothing. A runner has one `Tail`, which processes the forward's output.

The order of a step:

    added, removed           requests get and lose rows
    begin                    rows are up to date; nothing of the step is launched
    variant, wants_hidden    which forward computes the step, and what it returns
    lay_out          which rows the batch has
    receive          the inputs are staged; launches of the feature come before the forward
    before_inputs, in_forward    launches that a CUDA graph may hold with the forward
    after_forward    launches that read hidden states
    after_sample     the tokens of the step are in the states, after masks where there are any
    after_step       the host waits for nothing that is launched from here on
    end              all of the step is launched, but for sampling that awaits masks

`start_up`, `compile_kernels`, `graphs` and `allocate` belong to the start of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import InputBatch, InputBuffers
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import Deferred, StepAdvance
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.graphs.cuda_graphs.manager import Capturable
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.stages import StageLink
from compiled_engine.process.overriding import by_name, having, overriding, sole, sole_overriding
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampler import Sampler


class Tail(Protocol):
    """Launches what follows the forward."""

    advance: StepAdvance  # takes the results into the states

    def launch_captured(self, output: ForwardOutput, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Launch the part that a graph of decodes holds; returns the graph's result."""
        ...

    def launch_rest(
        self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]
    ) -> torch.Tensor | None:
        """Launch the rest, except for what may await masks.

        Returns the logits [R, V] of rows that sample, or None. Further results go into `results`, by feature name.
        """
        ...


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner that its features are made from. module: the model, which runs if `compiled` is None.
    tensors: parameters by name, packed ones included. link: None without stages. sampler: its rows are those of the
    states if the runner samples. trace: makes the model that a missing cache entry is traced from. on_attention: see
    ModelForward. progress, timeline: of the start."""

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
    sampler: Sampler
    trace: Callable[[ModelConfig], nn.Module]
    on_attention: OnAttention | None
    progress: Progress
    timeline: Timeline


@dataclass(frozen=True)
class StepLayout:
    """How the rows of a step lie in its batch, where a request may have several.

    longest: bound of the contexts. query_len: rows of each request, if all have as many, of a token each; else None.
    make_batch: pads to a graph's key (None: no graph) and stages, as input_batch.make_batch does.
    """

    num_tokens: int
    longest: int
    query_len: int | None
    make_batch: Callable[[GraphKey | None], InputBatch]


@dataclass(frozen=True)
class FeatureGraphs:
    """The keys of the graphs of the engine's steps, and a feature's further graphs, each with what it holds."""

    of_steps: Sequence[GraphKey]
    own: Mapping[GraphKey, Capturable]


class ModelBeside(NamedTuple):
    """A model that a feature runs beside the engine's. name: before the names of its parts in reports. compiled: None
    if the model runs eagerly."""

    name: str
    compiled: CompiledModel | None
    forward: ModelForward


class StepFeature:
    """The part of a feature on a rank's device. Methods do nothing unless overridden."""

    name = ""  # of its results in RunnerOutput, and of its part of messages' extras
    calls: tuple[str, ...] = ()  # names of the methods that serve control calls
    # Rows of requests that ask for something of the feature, which it keeps in `added` and `removed`: `variant` and
    # `wants_hidden` are not called while there are none. None if the feature keeps no such rows.
    rows: Collection[int] | None = None

    @property
    def models(self) -> tuple[ModelBeside, ...]:
        """The models that the feature runs beside the engine's."""
        return ()

    def start_up(self, progress: Progress) -> int:
        """Run every kind of batch of the feature once, without a trace; return the peak of its memory, in bytes."""
        return 0

    def compile_kernels(self) -> None:
        """Go through the launches of the feature: launched kernels are collected, to be compiled side by side."""

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        """Return the graphs to capture.

        keys: of the engine's steps, from the dispatcher or the feature before. replay: replays a captured graph, for a
        number of tokens; may be called once they are captured.
        """
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> None:
        """Replace what has as many blocks as the KV cache; called before graphs are captured."""

    def added(self, row: int, request: NewRequest) -> None:
        """Note a request that got a row of the states."""

    def removed(self, row: int) -> None:
        """Forget the request of this row."""

    def begin(self, step: SchedulerOutput) -> None:
        """Launch what precedes everything else of the step.

        Its requests have their rows; row fields set by `added` are on the device from `receive` on.
        """

    def variant(self, step: SchedulerOutput) -> str:
        """Return the variant of the forward that the step needs, "" for the usual one. Only one feature may override
        this."""
        return ""

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether `after_forward` needs hidden states, so that the forward must not end at logits."""
        return False

    def lay_out(self, step: SchedulerOutput) -> StepLayout:
        """Return the rows of a step; without this hook each request has one. At most one feature may override it."""
        raise NotImplementedError

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Launch what comes between the staged writes and the forward."""

    def before_inputs(self, batch: InputBatch) -> None:
        """Launch what comes before the step's inputs are made. May be captured."""

    def in_forward(self, batch: InputBatch, output: ForwardOutput) -> None:
        """Launch what comes with the forward. May be captured."""

    def after_forward(self, batch: InputBatch, output: ForwardOutput) -> Deferred | None:
        """Launch what reads hidden states, in steps for which a feature wanted them.

        Only here are copies to the host launched (rows/staged_writes.download); they are read once the step has ended.
        """
        return None

    def after_sample(self, batch: InputBatch) -> None:
        """Launch what reads the step's tokens from the states."""

    def after_step(self, batch: InputBatch) -> None:
        """Launch what reads the step's tokens from the states and need not end before the host has them."""

    def end(self, step: SchedulerOutput) -> None:
        """Launch what follows the step."""

    def failed(self) -> None:
        """Forget what was staged: a step has failed, and it did not reach the device."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the runner, under names that no other part uses."""
        return {}

    def close(self) -> None:
        """Wait for background work, and drop references to device memory."""


MakeFeatures = Callable[[RunnerParts], tuple[Sequence[StepFeature], Tail | None]]
"""Makes the features of a runner, and its tail; None if the runner samples."""


class StepHooks:
    """The overridden hooks of a runner's features, each a list in the order of features.

    reading_hidden, wanting_hidden, choosing_variant: the features that override `after_forward`, `wants_hidden` and
    `variant`. A hook that one feature may have is its method or None.

    Raises ValueError if several features override such a hook or have the same name, or if one with results has none.
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
        self.before_inputs = overriding(features, StepFeature.before_inputs)
        self.in_forward = overriding(features, StepFeature.in_forward)
        self.after_sample = overriding(features, StepFeature.after_sample)
        self.after_step = overriding(features, StepFeature.after_step)
        self.end = overriding(features, StepFeature.end)
        self.failed = overriding(features, StepFeature.failed)
        self.lay_out = sole_overriding(features, StepFeature.lay_out)
        self.graphs = overriding(features, StepFeature.graphs)
        self.models = tuple(model for each in features for model in each.models)


NO_HOOKS = StepHooks(())
