"""The runner: loads and compiles a rank's model, owns its KV cache and the rows of requests, and executes steps.

`submit` executes a step: it updates the rows (`update_rows`), chooses the graph and makes the batch (`_launch`), and
launches the model and the sampling (`run`). None of these waits for the device. If a step's sampling awaits inputs that
the host still computes (`samples_late`), such as token masks, it is launched afterwards, by `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiled_engine.config import PROCESSED, EngineConfig, ModelConfig
from compiled_engine.engine import cache_memory
from compiled_engine.engine.forward import ModelForward
from compiled_engine.engine.input_batch import InputBatch, InputBuffers, make_batch
from compiled_engine.engine.load_model import compile_in_turn, load_model
from compiled_engine.engine.messages import LateInputs, NewRequest, SchedulerOutput
from compiled_engine.engine.rank_memory import RankMemory
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_graphs import ModelStep, StepGraphs, affordable
from compiled_engine.engine.step_hooks import (
    FeatureModel,
    MakeFeatures,
    RunnerFeatures,
    RunnerParts,
    StepHooks,
    StepLayout,
)
from compiled_engine.engine.step_sampling import (
    Deferred,
    LateStep,
    PendingStep,
    StepSampling,
    TokenRing,
)
from compiled_engine.engine.warm_up import compile_kernels, compile_kernels_ahead, stamp_of_start, warm_up, write_stamp
from compiled_engine.graphs.compiler.signature import extra_step_tensors
from compiled_engine.graphs.cuda_graphs.capture import CudaCapture
from compiled_engine.graphs.cuda_graphs.memory import predicted_bytes
from compiled_engine.kernels.cache_folder import kernel_folder, kernels_in
from compiled_engine.kernels.compile_ahead import KernelWorkers
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.group import FakeGroup, Group, fake_group_for, in_group
from compiled_engine.parallel.rank_share import LayerShare, local_model
from compiled_engine.process.in_background import InBackground
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.edits import penalty_bytes
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory, build_processors
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampler import Sampler, StepEdits


class Runner:
    """Executes steps on a rank's device (`submit`, `sample`), and serves control calls (`calls`). Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress,
        timeline: Timeline,
        clock: StepClock,
        make_features: MakeFeatures,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory] = (),
        group: Group | None = None,
        share: LayerShare | None = None,
    ):
        """Load and compile the model, size the KV cache, and capture the graphs.

        All ranks construct their runners at the same time, and submit the same steps. make_features: makes the
        features' parts on the device, and the tail, which follows the forward (step_hooks.Tail). group: the
        tensor-parallel ranks, which must be the caller's current group; None: a single rank. share: this rank's layers;
        None: all. Raises what build_processors, the loader, the compiler and size_cache raise.
        """
        self._config, self._timeline, self._clock = config, timeline, clock
        self._group: Group = group or FakeGroup()
        self._make_features = make_features
        self._share = share or LayerShare(range(config.model.num_layers))
        self._late: LateStep | None = None  # the last step, if it awaits its late inputs
        self._ahead: InBackground[None] | None = None
        # Model runs, collectives included, that were begun and completely launched.
        self.runs_begun = self.runs_ended = 0
        on_gpu = config.device.type == "cuda"
        kernels = kernel_folder(config.compile.cache_dir) if on_gpu else None
        with KernelWorkers(config.compile.workers if on_gpu else 0, kernels, (compile_kernels.__module__,)) as workers:
            is_first = self._group.rank == 0
            if is_first and kernels is not None and not any(kernels.iterdir()):
                workers.start()
            with kernels_in(kernels):
                self._load(progress, logits_processors, workers)
                stamp = self._stamp(kernels) if is_first and kernels is not None else None
                # The first rank compiles kernels that are new to any rank; the others then find them.
                if not self._group.all_reduce_min(not self._is_new) and is_first:
                    workers.start()
                if stamp is not None and not stamp.exists():
                    workers.start()
                self._start(progress, workers)
            if stamp is not None:
                write_stamp(stamp)

    def _load(
        self,
        progress: Progress,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory],
        workers: KernelWorkers,
    ) -> None:
        """Load the model, and make everything that a step uses except the KV cache and the graphs."""
        config, timeline, group = self._config, self._timeline, self._group
        self._is_new, on_gpu = False, config.device.type == "cuda"
        samples = self._share.is_last and config.model.yields_tokens
        # Refuse invalid logits processors before loading the model.
        given, vocab_size = logits_processors if samples else (), config.model.vocab_size
        processors = build_processors(given, config.max_running, vocab_size, config.device)

        def model_to_trace(model: ModelConfig) -> nn.Module:
            self._is_new = True
            if group.rank == 0:
                workers.start()  # a model that is new to the compile cache has new kernels
                if on_gpu and self._ahead is None:
                    self._ahead = InBackground(lambda: compile_kernels_ahead(config, group, workers))
            return build_model(model)

        self._compiled = compile_in_turn(config, group, model_to_trace, progress, timeline)
        if self._compiled is not None:
            self._compiled = self._make_features.own_part(config, self._compiled)
        self._memory = memory = self._make_features.memory(config)
        with timeline.span("load weights"):
            eager = () if self._compiled is not None else self._make_features.of_eager_model(config)
            loaded = load_model(config, self._compiled, group, progress, features=eager, memory=memory.weights)
        self._capture = capture = CudaCapture(config.device) if config.graph.captures else None
        on_attention = capture.on_attention if capture else None
        self.model = ModelForward(config, loaded, on_attention, self._share.layers)
        # The replay of a graph computes nothing on the CPU.
        self._threads: Callable[[int], AbstractContextManager[object]] = nullcontext if capture else self.model.threads
        self._make_rows()
        divided = group if local_model(config).vocab_size != vocab_size else None
        # Without sampling, the sampler's row fields are not those of the states, which are written for each request.
        sampled_rows = self.states.fields if samples else RowFields(1, config.device)
        self.sampler = Sampler(sampled_rows, vocab_size, processors=processors, group=divided)
        parts = RunnerParts(
            config=config,
            group=group,
            compiled=self._compiled,
            module=loaded.module,
            tensors=loaded.tensors,
            weights=loaded.weights,
            memory=memory,
            model=self.model,
            states=self.states,
            buffers=self.buffers,
            vocabulary=VocabularySlice.of(vocab_size, divided),
            sampler=self.sampler,
            trace=model_to_trace,
            on_attention=on_attention,
            progress=progress,
            timeline=timeline,
        )
        self._make_step(self._make_features.of_runner(parts))

    def _make_rows(self) -> None:
        """Make the states of requests and the input buffers."""
        config, scheduler = self._config, self._config.scheduler
        self.states = RequestStates(
            config.max_running,
            scheduler.max_model_len,
            config.cache.block_size,
            config.device,
            self._share.count + 1,
            config.num_ahead,
            has_history=config.num_ahead > 0 and config.device.type == "cuda",
        )
        most_tokens = scheduler.max_num_batched_tokens
        most_rows = scheduler.max_num_seqs * config.max_new_tokens_per_step + 1  # padding tokens have a separate row
        self.buffers = InputBuffers(
            most_tokens,
            most_rows,
            self.states.block_table_SB.shape[1],
            self.states.writes,
            config.device,
            self.model.work_length(most_tokens, most_rows),
            extra_step_tensors(config),
            has_offsets=True in config.offset_choices,
        )

    def _make_step(self, made: RunnerFeatures) -> None:
        """Make what launches a step: hooks, the ring buffer of tokens, the tail, and the ModelStep that calls them.

        The tail follows the forward. made: the features' parts. If they have no tail, the runner samples
        (StepSampling).
        """
        self._hooks = StepHooks(made.features)
        self.ring = TokenRing(self.buffers, self._config.device, self._clock)
        self._sampling: StepSampling | None = None
        tail = made.tail
        if tail is None:
            processed = self._config.logprobs_mode == PROCESSED
            tail = StepSampling(self.model, self.sampler, self.buffers, self.ring, made.advance, processed=processed)
            self._sampling = tail
        self._tail = tail
        length = self._config.scheduler.max_model_len
        self.step = ModelStep(self.model, self.buffers, tail, self.states, length, self._hooks)

    def _stamp(self, kernels: Path) -> Path | None:
        """Return the path of this start's stamp file, see `stamp_of_start`; None if no compile cache has the model."""
        if self._compiled is None or self._compiled.lookup.status == "off":
            return None
        return stamp_of_start(kernels, self._compiled.lookup.key, self._config, self._share.index)

    @torch.inference_mode()
    def _start(self, progress: Progress, workers: KernelWorkers) -> None:
        if workers.started and self._config.device.type == "cuda":
            with self._timeline.span("compile kernels"), in_group(fake_group_for(self._group)):
                if self._ahead is not None:
                    self._ahead.result()
                compile_kernels(self._config, self.step, workers, progress, self._hooks.features)
        workers.close()
        self._group.all_reduce_min(1)  # all ranks wait for the kernels
        with self._timeline.span("warm up"):
            activation_bytes = warm_up(self._config, self.step, progress)
            for feature in self._hooks.features:
                activation_bytes = max(activation_bytes, feature.start_up(progress))
        # Memory that the first request with penalties allocates is reserved.
        reserved = 0
        if self._sampling is not None:
            reserved = penalty_bytes(self._config.max_running, self.sampler.vocabulary.size)
            if self._config.logprobs_mode == PROCESSED:
                most_rows = self._config.scheduler.max_num_seqs * self._config.max_new_tokens_per_step
                reserved += most_rows * self.sampler.vocabulary.size * torch.float32.itemsize
        token_sizes = affordable(
            self._config, activation_bytes, cache_memory.bytes_left(self._config), self._group.all_reduce_min
        )
        self.step_graphs = StepGraphs(self._config, token_sizes, self.step, self._capture, self._hooks)
        graphs, graph_bytes = self.step_graphs.graphs, 0
        if graphs:
            with self._timeline.span("predict graph memory"):
                lookup = self._compiled.lookup if self._compiled else None
                graph_bytes = predicted_bytes(
                    self._config, lookup, graphs, self._group.all_reduce_min, self._share.index
                )
        self._cache_size = cache_memory.size_cache(
            self._config, activation_bytes, graph_bytes, reserved, self._share.layers
        )
        self.num_blocks = self._group.all_reduce_min(self._cache_size.num_blocks)
        self.model.allocate(self.num_blocks, self._memory.kv_cache)
        for feature in self._hooks.features:
            feature.allocate(self.num_blocks)
        if graphs:
            with self._timeline.span("capture"):
                graphs.capture_all(progress)
        self.states.writes.discard()  # batches of padding, staged by dry runs

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> PendingStep | LateStep:
        """Launch a step without waiting for the device: update the rows, prepare the inputs, run the model, sample.

        Returns the pending step. If the step's final sampling awaits inputs from the host (`samples_late`), `sample`
        must be called before the next `submit`.
        """
        if self._late is not None:  # its late inputs did not come: the step failed
            self._late = None
            self.ring.lose_count()
        self.ring.catch_up()
        try:
            update_rows(step, self.states, self.sampler if self._sampling else None, self._hooks)
            if self._hooks.begin:
                self.runs_begun += 1  # a feature may run a model
                for begin in self._hooks.begin:
                    begin(step)
                self.runs_ended += 1
            pending = self._launch(step)
            for end in self._hooks.end:
                end(step)
        except BaseException:
            self._fail()
            raise
        return pending

    @torch.inference_mode()
    def sample(self, late: LateInputs) -> None:
        """Launch the sampling of the last submitted step, which has waited for these inputs (`samples_late` was set).

        Does not wait for the device.
        """
        step, self._late = self._late, None
        assert step is not None
        try:
            with self._threads(step.batch.num_tokens):
                edits, editing = None, self._hooks.editing
                if editing is not None and editing.name in late.extras:
                    edits = editing.edits(step.batch, late.extras[editing.name])
                step.sampled = self._sample(step.batch, step.logits_RV, step.results, edits)
            if self._hooks.after_step:
                self._after_step(step.batch)
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        self.states.writes.discard()
        self.buffers.forget_staged()
        for failed in self._hooks.failed:
            failed()
        self.ring.lose_count()  # it may have been interrupted just after a launch

    def _launch(self, step: SchedulerOutput) -> PendingStep | LateStep:
        hidden_wanted, variant = False, ""
        for feature in self._hooks.wanting_hidden:
            if feature.rows is None or feature.rows:
                hidden_wanted |= feature.wants_hidden(step)
        for feature in self._hooks.choosing_variant:
            if not variant and (feature.rows is None or feature.rows):
                variant = feature.variant(step)
        num_requests, graph_for = len(step.request_ids), self.step_graphs.graph_for
        if self._hooks.lay_out is None:
            longest = max(step.starts, default=0) + 1  # of decodes; unused for others
            key = graph_for(step.num_tokens, num_requests, longest, hidden_wanted, variant=variant)
            batch = make_batch(step, self.states, self.buffers, key)
        else:
            rows: StepLayout = self._hooks.lay_out(step)
            key = graph_for(
                rows.num_tokens, num_requests, rows.longest, hidden_wanted, variant=variant, query_len=rows.query_len
            )
            batch = rows.make_batch(key)
        if variant:
            batch = replace(batch, variant=variant)
        self._clock.lap("prepare")
        self._clock.device_begins()
        with self._threads(batch.num_tokens):
            pending = self.run(batch, hidden_wanted, samples_late=step.samples_late)
        self._clock.device_ends()
        return pending

    def run(self, batch: InputBatch, hidden_wanted: bool, *, samples_late: bool = False) -> PendingStep | LateStep:
        """Launch a step's work on the device: staged writes, forward and sampling. Returns the pending step.

        If any row samples, each row first gets a token by temperature and seed. Rows with further parameters are then
        sampled again (step_sampling.py), so that the same decode graphs serve all requests. hidden_wanted: the forward
        returns hidden states, for features that read them. samples_late: do not sample again yet, since that awaits
        inputs from the host; return a LateStep, for which `sample` does it.
        """
        self.runs_begun += 1
        self.states.writes.apply()
        for receive in self._hooks.receive:
            receive(batch, hidden_wanted)
        output = self.step_graphs.run(batch, hidden_wanted)
        results: dict[str, Deferred] = {}
        if hidden_wanted:
            for feature in self._hooks.reading_hidden:
                if (found := feature.read_hidden(batch, output)) is not None:
                    results[feature.name] = found
        logits_RV = self._tail.launch_rest(batch, output, results)  # samples, unless a decode graph has sampled
        self.ring.launched()
        self.runs_ended += 1
        if logits_RV is None:
            pending = self.ring.pending_step(batch, None, results)
        elif samples_late:
            self._late = LateStep(batch, logits_RV, results)
            return self._late
        else:
            pending = self._sample(batch, logits_RV, results)
        if self._hooks.after_step:
            self._after_step(batch)
        return pending

    def _sample(
        self, batch: InputBatch, logits_RV: torch.Tensor, results: dict[str, Deferred], edits: StepEdits | None = None
    ) -> PendingStep:
        """Sample again the rows with more parameters than temperature and seed, and compute log-probabilities.

        These are parts 2 and 3 of step_sampling.py. Returns the pending step. edits: see StepFeature.edits.
        """
        assert self._sampling is not None
        logprobs = self._sampling.complete(batch, logits_RV, edits)
        for after_sample in self._hooks.after_sample:
            after_sample(batch)
        return self.ring.pending_step(batch, logprobs, results)

    def _after_step(self, batch: InputBatch) -> None:
        self.runs_begun += 1  # a feature may run a model
        for after_step in self._hooks.after_step:
            after_step(batch)
        self.runs_ended += 1

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """The functions that serve control calls, by name: `metrics`, and features' ones such as `adapters.load`."""
        own: dict[str, Callable[..., Any]] = {"metrics": self.metrics}
        return own | {
            f"{each.name}.{call}": getattr(each, call) for each in self._hooks.features for call in each.calls
        }

    def metrics(self) -> dict[str, Any]:
        """Return the runner's metrics by name.

        They are counts of traces, compilations, captures and replays, the status of the compile cache, times of the
        start-up, memory use, and the features' metrics.
        """
        compiled, step_graphs, cache_size = self._compiled, self.step_graphs, self._cache_size
        graphs, models = step_graphs.graphs, (FeatureModel("", compiled, self.model), *self._hooks.models)
        counts = [each.compiled.counts for each in models if each.compiled]
        recordings = [counts for each in models for counts in each.forward.recording_counts()]
        return {
            "traces": sum(each.traces for each in counts),
            "compiles": sum(each.compiles for each in counts),
            "captures": graphs.num_captures if graphs else 0,
            "cache": compiled.lookup.status if compiled else "off",
            "cache_why": compiled.lookup.why if compiled else "nothing is compiled",
            "cache_key": compiled.lookup.key if compiled else None,
            "cache_entry": str(compiled.lookup.folder) if compiled else None,
            **{
                f"{each.name.strip()}_cache_entry": str(each.compiled.lookup.folder) if each.compiled else None
                for each in self._hooks.models
            },
            "passes": {name: count for each in models for name, count in _pass_counts(each).items()},
            **step_graphs.counters.metrics(),
            **cache_size.metrics(graphs.bytes_used if graphs else 0),
            **{name: value for each in self._hooks.features for name, value in each.metrics().items()},
            "graph_bytes_predicted": cache_size.graph_bytes,
            "graph_bytes_used": graphs.bytes_used if graphs else 0,
            "graph_bytes_by_key": {name: r._asdict() for name, r in graphs.memory_by_key.items()} if graphs else {},
            "capture_seconds": graphs.capture_seconds if graphs else 0.0,
            "recordings": sum(counts.recordings for counts in recordings),
            "recorded_kernels": max((counts.kernels for counts in recordings), default=0),
            "recorded_replays": sum(counts.replays for counts in recordings),
            "start_up_seconds": self._timeline.seconds(),
            "start_up": self._timeline.as_records(),
        }

    def close(self) -> None:
        """Wait for the device, and free the device memory that the runner uses."""
        for feature in self._hooks.features:
            feature.close()
        if self.step_graphs.graphs:
            self.step_graphs.graphs.close()
        self._hooks = StepHooks(())
        self.model.close()
        self._compiled, self._memory = None, RankMemory()
        if self._config.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def update_rows(step: SchedulerOutput, states: RequestStates, sampler: Sampler | None, hooks: StepHooks) -> None:
    """Free the rows of removed requests, assign rows to new ones, and append new blocks to the block tables.

    The changes are staged, see RowFields. sampler: None in a runner that does not sample. Raises what Sampler.add_row
    raises.
    """
    for request_id in step.removed:
        row = states.remove(request_id)
        if row is None:
            continue
        if sampler is not None:
            sampler.remove_row(row)
        for removed in hooks.removed:
            removed(row)
    if step.new:
        starts = dict(zip(step.request_ids, step.starts, strict=True))
        for request in step.new:
            row = _add_row(request, starts[request.request_id], states, sampler)
            for added in hooks.added:
                added(row, request)
    for request_id, (block_ids,) in step.new_block_ids.items():
        states.append_blocks(states.row(request_id), block_ids)


def _add_row(request: NewRequest, num_computed: int, states: RequestStates, sampler: Sampler | None) -> int:
    """Assign a row to a request in the states and the sampler, and return it. After an error, neither has it."""
    row = states.add(request, num_computed)
    if sampler is None:
        return row
    params = request.sampling_params
    assert params.seed is not None  # the engine core fills it in
    try:
        sampler.add_row(
            row,
            params,
            params.seed,
            request.token_ids,
            request.num_prompt_tokens,
            request.eos_token_ids,
            edited_late=request.samples_late,
        )
    except BaseException:
        states.remove(request.request_id)
        raise
    return row


def _pass_counts(model: FeatureModel) -> dict[str, dict[str, dict[str, int]]]:
    """Return how often each pass matched ("matches"), and how often it had to ("contract"), by compiled range and pass.

    The name of a range begins with the model's name.
    """
    if model.compiled is None:
        return {}
    return {
        model.name + compiled_range.name: {
            report.name: {"matches": report.matches, "contract": report.contract}
            for report in compiled_range.passes
            if report.applied
        }
        for compiled_range in model.compiled.ranges
        if compiled_range.passes
    }
