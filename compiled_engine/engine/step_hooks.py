"""Hooks of features around a step on the device, and the tail that follows the forward.

A feature overrides the methods of `StepFeature` that it needs. The runner collects the overrides once (`StepHooks`), so
a hook that no feature overrides costs nothing. A runner has one `Tail`, which processes the forward's output.

The order of the hooks in a step:

    removed, added               requests lose and get rows
    begin                        the rows are assigned, and nothing of the step is launched
    wants_hidden, variant        choose whether the forward returns hidden states or logits, and which forward runs
    lay_out                      lays out the batch's rows
    receive                      the staged writes are launched; the inputs and the forward are not
    before_inputs, in_forward    launches before the inputs and after the forward; CUDA graphs may hold them
    read_hidden                  launches that read hidden states, in steps for which a feature wants them; not captured
    edits                        the step's late inputs have arrived, and are not used yet
    after_sample                 the step's tokens are in the states; skipped if nothing samples
    after_step                   launches that the host does not wait for; called in every step
    end                          the step is launched, except for sampling that awaits late inputs: then `end` comes
                                 before `edits`

`start_up`, `compile_kernels`, `graphs` and `allocate` are called when the engine starts. The features of a runner are
listed in features/registry.py.
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
from compiled_engine.engine.load_model import EagerFeature, RankWeights
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.rank_memory import RankMemory
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import Advance, Deferred
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.graphs.cuda_graphs.manager import Capturable
from compiled_engine.parallel.group import Group
from compiled_engine.process.overriding import by_name, having, overriding, sole, sole_overriding
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampler import Sampler, StepEdits


class Tail(Protocol):
    """The part of a step that follows the forward: sampling, pooling, or sending activations to the next stage."""

    advance: Advance

    def launch_first(self, batch: InputBatch, output: ForwardOutput, num_rows: int) -> torch.Tensor:
        """Launch the part of the tail that a decode graph holds, for the first `num_rows` rows, and return its result.

        A decode graph is a CUDA graph of a whole step of decodes. If a batch has none, `launch_rest` includes this
        part. By default, it advances the rows' states, and the result is the forward's output tensor.
        """
        self.advance(batch, None, num_rows)
        return output.tensor

    def launch_rest(
        self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]
    ) -> torch.Tensor | None:
        """Launch the rest of the tail, except for sampling that may await inputs from the host (LateInputs).

        Returns the logits [R, V] of the batch's rows; None if no row samples. Other results are put into `results`, by
        feature name.
        """
        ...


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner that its features are made from."""

    config: EngineConfig
    group: Group
    compiled: CompiledModel | None
    module: nn.Module  # the model, which runs if `compiled` is None
    tensors: dict[str, torch.Tensor]  # parameters by name, packed ones included
    weights: RankWeights
    memory: RankMemory
    model: ModelForward
    states: RequestStates
    buffers: InputBuffers
    vocabulary: VocabularySlice
    sampler: Sampler  # its rows are those of the states if the runner samples
    trace: Callable[[ModelConfig], nn.Module]  # makes the model from which a missing cache entry is traced
    on_attention: OnAttention | None  # see ModelForward
    progress: Progress
    timeline: Timeline


@dataclass(frozen=True)
class StepLayout:
    """The rows of a step's batch, if a request may have several: one for its newest token, one for each guess."""

    num_tokens: int
    longest: int  # bound of the contexts
    query_len: int | None  # rows per request if it is uniform and each row has one token; otherwise None
    # Makes the batch, padded to a graph's key (None: no graph), and stages it, like input_batch.make_batch.
    make_batch: Callable[[GraphKey | None], InputBatch]


@dataclass(frozen=True)
class FeatureGraphs:
    """The result of StepFeature.graphs: the CUDA graphs to capture in an engine with a feature."""

    of_steps: Sequence[GraphKey]  # keys of steps
    own: Mapping[GraphKey, Capturable]  # the feature's graphs, with the work that each captures


class FeatureModel(NamedTuple):
    """A model that a feature runs besides the engine's, such as a draft model."""

    name: str  # prefix of its names in reports, such as "draft "
    compiled: CompiledModel | None  # None if the model runs eagerly
    forward: ModelForward


class StepFeature:
    """The part of a feature on a rank's device. Its methods are hooks, which do nothing unless overridden."""

    name = ""  # of its results in RunnerOutput, and of its data in messages' extras
    calls: tuple[str, ...] = ()  # names of the methods that serve control calls
    # Rows of the requests that use the feature, kept up to date by `added` and `removed`. While it is empty, `variant`
    # and `wants_hidden` are not called. None if the feature does not keep it.
    rows: Collection[int] | None = None

    @property
    def models(self) -> tuple[FeatureModel, ...]:
        """The models that the feature runs besides the engine's."""
        return ()

    def start_up(self, progress: Progress) -> int:
        """Run every kind of batch of the feature once, without side effects; return its peak memory in bytes."""
        return 0

    def compile_kernels(self) -> None:
        """Dry-run the feature's launches. Their kernels are collected and compiled in parallel."""

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        """Return the graphs to capture: those of the steps, and the feature's own.

        keys: the keys of the steps' graphs, from the dispatcher or the previous feature. replay: replays a captured
        graph for a number of tokens; for use once the graphs are captured.
        """
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> None:
        """Allocate tensors with as many blocks as the KV cache; called before graphs are captured."""

    def added(self, row: int, request: NewRequest) -> None:
        """Handle a request that got a row of the states."""

    def removed(self, row: int) -> None:
        """Forget the request of this row."""

    def begin(self, step: SchedulerOutput) -> None:
        """Launch work that precedes everything else of the step.

        The step's requests have their rows, but row fields written by `added` are only on the device from `receive` on.
        """

    def variant(self, step: SchedulerOutput) -> str:
        """Return the variant of the forward that the step needs, "" for the usual one.

        The step gets the first variant that a feature names, in the order of features.
        """
        return ""

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether `read_hidden` needs hidden states, so that the forward must return them, not logits."""
        return False

    def lay_out(self, step: SchedulerOutput) -> StepLayout:
        """Return the rows of the step's batch, for a feature with which a request may have several.

        At most one feature overrides this; if none does, each request has one row.
        """
        raise NotImplementedError

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Launch work that reads staged writes of this step and comes before the forward.

        hidden_wanted: whether the step returns hidden states.
        """

    def before_inputs(self, batch: InputBatch) -> None:
        """Launch work that the step's inputs depend on. May be captured."""

    def in_forward(self, batch: InputBatch, output: ForwardOutput) -> None:
        """Launch work that directly follows the forward of every step. A CUDA graph may hold it with the forward.

        If `output` has logits, hidden states are not available.
        """

    def read_hidden(self, batch: InputBatch, output: ForwardOutput) -> Deferred | None:
        """Launch work that reads hidden states, in steps for which `wants_hidden` returns True. Not captured.

        Returns the feature's result for the step; None if there is none. Copies to the host
        (rows/staged_writes.download) may only be launched here; they are read when the step ends.
        """
        return None

    def edits(self, batch: InputBatch, late: Any) -> StepEdits | None:
        """Return edits to apply to a step's logits before sampling, such as masks of forbidden tokens.

        late: the feature's entry of LateInputs.extras, computed while the step ran. At most one feature overrides this.
        """
        return None

    def after_sample(self, batch: InputBatch) -> None:
        """Launch work that reads the step's tokens from the states."""

    def after_step(self, batch: InputBatch) -> None:
        """Launch work that reads the step's tokens from the states, and that the host does not wait for."""

    def end(self, step: SchedulerOutput) -> None:
        """Launch work that follows the step, after everything else that `submit` launches."""

    def failed(self) -> None:
        """Drop the data that was staged for a step which has failed. The data has not reached the device."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the runner, under names that no other part uses."""
        return {}

    def close(self) -> None:
        """Wait for background work, and drop references to device memory."""


class RunnerFeatures(NamedTuple):
    """The features of a runner."""

    features: Sequence[StepFeature]
    tail: Tail | None  # None: the runner samples
    advance: Advance  # the tail's, and that of sampling


@dataclass(frozen=True)
class MakeFeatures:
    """Makes the features of a runner."""

    # The parts of features in the model, if it runs eagerly; made before the model is loaded.
    of_eager_model: Callable[[EngineConfig], Sequence[EagerFeature]]
    of_runner: Callable[[RunnerParts], RunnerFeatures]  # all others
    # Returns the part of the compiled model that the runner executes.
    own_part: Callable[[EngineConfig, CompiledModel], CompiledModel] = lambda config, compiled: compiled
    # Returns where the runner's weights and KV cache are allocated.
    memory: Callable[[EngineConfig], RankMemory] = lambda config: RankMemory()


class StepHooks:
    """The overridden hooks of a runner's features, each a list in the order of features.

    A hook that at most one feature may override is a method or None. reading_hidden, wanting_hidden, choosing_variant
    and editing have the features that override `read_hidden`, `wants_hidden`, `variant` and `edits`.

    Raises ValueError if several features override such a hook or have the same name, or if a feature with results has
    no name.
    """

    def __init__(self, features: Sequence[StepFeature]) -> None:
        self.features = tuple(features)
        by_name((each.name, each) for each in features if each.name)
        self.reading_hidden = having(features, StepFeature.read_hidden)
        if nameless := [type(each).__name__ for each in self.reading_hidden if not each.name]:
            raise ValueError(f"{nameless[0]} has results, so it must have a name; allowed: any but ''")
        self.added = overriding(features, StepFeature.added)
        self.removed = overriding(features, StepFeature.removed)
        self.begin = overriding(features, StepFeature.begin)
        self.choosing_variant = having(features, StepFeature.variant)
        self.wanting_hidden = having(features, StepFeature.wants_hidden)
        self.receive = overriding(features, StepFeature.receive)
        self.before_inputs = overriding(features, StepFeature.before_inputs)
        self.in_forward = overriding(features, StepFeature.in_forward)
        self.editing = sole(features, StepFeature.edits)
        self.after_sample = overriding(features, StepFeature.after_sample)
        self.after_step = overriding(features, StepFeature.after_step)
        self.end = overriding(features, StepFeature.end)
        self.failed = overriding(features, StepFeature.failed)
        self.lay_out = sole_overriding(features, StepFeature.lay_out)
        self.graphs = overriding(features, StepFeature.graphs)
        self.models = tuple(model for each in features for model in each.models)


NO_HOOKS = StepHooks(())
