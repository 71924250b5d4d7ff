"""The runner: loads and compiles the model, owns the KV cache and the request rows, and executes steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler import CompiledModel, compile_model
from compiled_engine.graphs.cuda_graphs import CudaGraphManager
from compiled_engine.graphs.dispatcher import Dispatcher
from compiled_engine.graphs.graph_capture import CudaCapture
from compiled_engine.graphs.graph_counters import Fallback, GraphCounters
from compiled_engine.graphs.graph_key import GraphKey, GraphKind
from compiled_engine.models.loader import load_weights
from compiled_engine.models.parameters import materialize
from compiled_engine.models.registry import build_model
from compiled_engine.parameter_layout import ParameterLayout
from compiled_engine.progress import Progress
from compiled_engine.runner import kv_cache
from compiled_engine.runner.advance import advance
from compiled_engine.runner.cpu_threads import threads_for_step
from compiled_engine.runner.input_batch import InputBatch, attention_inputs, make_batch, prepare
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.kernel_cache import kernel_folder, kernels_in
from compiled_engine.runner.kernel_workers import KernelWorkers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.padded_step import PaddedStep, sample_and_advance
from compiled_engine.runner.pending_steps import PendingStep, PendingSteps, PromptLogprobs
from compiled_engine.runner.prompt_logprobs import launch_prompt_logprobs, owes_prompt_logprobs
from compiled_engine.runner.rehearsal import rehearse
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.runner_metrics import runner_metrics
from compiled_engine.runner.warm_up import warm_up
from compiled_engine.sampling.history import penalty_bytes
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory, build_processors
from compiled_engine.sampling.logprobs import BatchLogprobs
from compiled_engine.sampling.sampler import Sampler, SamplerClass
from compiled_engine.sampling.step_masks import StepMasks
from compiled_engine.sampling.transfer import upload
from compiled_engine.scheduling.step import NewRequest, SchedulerOutput
from compiled_engine.step_clock import StepClock
from compiled_engine.timeline import Timeline


class Runner:
    """Everything on the device. `submit` is the only way in once it stands; it is not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress,
        timeline: Timeline,
        clock: StepClock,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory] = (),
    ):
        """Load, compile, size the KV cache, capture.

        Raises what build_processors, the loader, the compiler and kv_cache.count_blocks raise.
        """
        self.config = config
        self.timeline = timeline
        on_gpu = config.device.type == "cuda"
        kernels = kernel_folder(config.compile.cache_dir) if on_gpu else None
        with KernelWorkers(config.compile.workers if on_gpu else 0, kernels) as workers:
            if kernels is not None and not any(kernels.iterdir()):
                workers.start()
            self._load(progress, clock, logits_processors, workers)
            with kernels_in(kernels):
                self._start(progress, workers)

    def _load(
        self,
        progress: Progress,
        clock: StepClock,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory],
        workers: KernelWorkers,
    ) -> None:
        config, timeline, scheduler = self.config, self.timeline, self.config.scheduler
        processors = build_processors(logits_processors, scheduler.max_num_seqs, config.model.vocab_size, config.device)

        def model_to_trace() -> nn.Module:
            workers.start()  # what is new to the compile cache has kernels that are new
            return build_model(config.model)

        self.compiled: CompiledModel | None = None
        layout = ParameterLayout()
        if config.compile.enabled:
            self.compiled = compile_model(config, model_to_trace, progress, timeline)
            layout = self.compiled.layout
        with timeline.span("load weights"):
            model = build_model(config.model)
            parameters = materialize(model, layout, config.device)
            load_weights(model, config.model, progress)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        # A version may take a parameter alone that another takes packed: the model's own are views.
        named = dict(model.named_parameters(remove_duplicate=False)) | parameters
        self.forward = ModelForward(model, self.compiled, named, self._on_attention)

        self.sampler = Sampler(scheduler.max_num_seqs, config.model.vocab_size, config.device, processors=processors)
        self.states = RequestStates(
            scheduler.max_num_seqs, scheduler.max_model_len, config.cache.block_size, config.device
        )
        self.buffers = InputBuffers(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs + 1,  # padding tokens belong to a row of their own
            self.states.block_table_SB.shape[1],
            self.states.writes,
            config.device,
        )
        self._clock = clock
        self.pending = PendingSteps(self.buffers, config.device, clock)
        self.kv_caches = kv_cache.allocate(config, 1)
        self.dispatcher = Dispatcher(config.graph, scheduler)
        self.counters = GraphCounters(self.dispatcher)
        self.padded_step = PaddedStep(
            self.forward,
            self.sampler,
            self.states,
            self.buffers,
            self.kv_caches,
            config.attention_backend,
            scheduler.max_model_len,
        )
        keys = self.dispatcher.keys
        self.graphs = None
        if keys:
            capture = CudaCapture(config.device)
            self.graphs = CudaGraphManager(keys, capture, self.padded_step, decodes_first=config.graph.background)

    @torch.inference_mode()
    def _start(self, progress: Progress, workers: KernelWorkers) -> None:
        if workers.started and self.config.device.type == "cuda":
            with self.timeline.span("compile kernels"):
                rehearse(self, workers, progress)
        workers.close()
        with self.timeline.span("warm up"):
            activation_bytes = warm_up(self, progress)
        with self.timeline.span("predict graph memory"):
            self.predicted_graph_bytes = self.graphs.predict() if self.graphs else 0
        # What the first request with penalties allocates is set aside for it.
        set_aside = penalty_bytes(self.config.scheduler.max_num_seqs, self.config.model.vocab_size)
        self.num_blocks = kv_cache.count_blocks(self.config, activation_bytes + set_aside, self.predicted_graph_bytes)
        self.kv_caches[:] = kv_cache.allocate(self.config, self.num_blocks)
        if self.graphs and not self.config.graph.background:
            with self.timeline.span("capture"):
                self.graphs.capture_all(progress)

    def _on_attention(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        assert self.graphs is not None
        self.graphs.on_attention(function, arguments)

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step: update the rows, prepare the inputs, run the model, sample. Nothing waits for the device."""
        self.states.writes.discard()  # left over from a step that failed
        self.pending.catch_up()
        try:
            self._update_rows(step)
            with threads_for_step(step.num_tokens, self._num_parameters, self.config.device):
                pending = self._launch(step)
            if self.graphs and not self.graphs.complete and self.graphs.capture_in_background():
                self.pending.lose_count()
        except BaseException:
            self.buffers.forget_staged()
            self.pending.lose_count()  # it may have been interrupted just after a launch
            raise
        return pending

    def _launch(self, step: SchedulerOutput) -> PendingStep:
        hidden_wanted = owes_prompt_logprobs(step, self.states)
        key = self._graph_for(step.num_tokens, len(step.request_ids), hidden_wanted)
        batch = make_batch(step, self.states, self.buffers, key)
        self._clock.lap("prepare")
        self._clock.device_begins()
        pending = self._run(batch, hidden_wanted)
        self._clock.device_ends()
        return pending

    def _run(self, batch: InputBatch, hidden_wanted: bool) -> PendingStep:
        self.states.writes.apply()
        self.sampler.publish()
        prompt: dict[str, PromptLogprobs] = {}
        if batch.key is not None and batch.key.is_decode:
            logits_RV = self._replay(batch).tensor
        else:
            prepare(batch, self.states, self.buffers)
            if batch.key is None:
                output = self.padded_step.forward(batch, hidden_wanted=hidden_wanted)
            else:
                output = self._replay(batch)
            if hidden_wanted:
                prompt = launch_prompt_logprobs(batch, output.tensor, self.states, self.forward)
            if not batch.samples.any():
                nobody_R = self.buffers.sample_positions_R
                advance(self.states, self.buffers, nobody_R, batch.num_rows, decodes_only=batch.decodes_only)
                self.pending.launched()
                return self.pending.step(batch, None, prompt)
            wanted = output.tensor[self.buffers.logits_index_R[: batch.num_rows]]
            logits_RV = wanted if output.is_logits else self.forward.logits(wanted)
            sample_and_advance(logits_RV, self.sampler, self.states, self.buffers, batch)
        self.pending.launched()
        return self.pending.step(batch, self._sample_generally(batch, logits_RV), prompt)

    def _replay(self, batch: InputBatch) -> ForwardOutput:
        assert self.graphs is not None
        assert batch.key is not None
        inputs = None  # attention is in a full graph
        if batch.key.kind is not GraphKind.FULL:
            inputs = attention_inputs(batch, self.buffers, self.config.attention_backend)
        output = self.padded_step.output(batch.key, self.graphs.replay(batch.key, inputs))
        self.counters.replay(batch.key, batch.num_tokens)
        return output

    def _sample_generally(self, batch: InputBatch, logits_RV: torch.Tensor) -> BatchLogprobs | None:
        """Where a row asks for more than temperature and seed: other tokens for those that sample, and the
        log-probabilities that were asked for."""
        rows_R = np.where(batch.samples, batch.rows, -1)
        if self.sampler.sampler_class(rows_R) is SamplerClass.PLAIN:
            return None
        count = batch.num_requests
        row_index_R = upload(rows_R.astype(np.int32), self.config.device)
        positions_R = self.buffers.sample_positions_R[:count]
        masks = None
        if batch.token_masks:
            masks = StepMasks.of([batch.token_masks.get(i) for i in batch.request_ids], self.config.device)
        sampled = self.sampler.sample(logits_RV[:count], rows_R, row_index_R, positions_R, masks)
        advance(
            self.states,
            self.buffers,
            sampled.token_ids_S,
            batch.num_rows,
            decodes_only=batch.decodes_only,
            again=True,
        )
        self.pending.launched()
        return sampled.logprobs

    def _graph_for(self, num_tokens: int, num_requests: int, hidden_wanted: bool) -> GraphKey | None:
        """The graph to replay for a batch; why there is none is counted."""
        decodes_only = num_tokens == num_requests
        self.counters.batch(num_tokens, decodes_only)
        key = self.dispatcher.dispatch(num_tokens, num_requests, 1 if decodes_only else None)
        if key is None:
            self.counters.no_key(num_tokens, decodes_only)
            return None
        assert self.graphs is not None
        if hidden_wanted and (key.is_decode or self.forward.ends_at_logits(key.num_tokens)):
            reason = Fallback.PROMPT_LOGPROBS
        elif self.graphs.has(key):
            return key
        else:
            reason = Fallback.LOST if self.graphs.is_lost(key) else Fallback.NOT_YET
        self.counters.fallback(reason, key.name)
        return None

    def _update_rows(self, step: SchedulerOutput) -> None:
        for request_id in step.removed:
            row = self.states.remove(request_id)
            if row is not None:
                self.sampler.remove_row(row)
        if step.new:
            starts = dict(zip(step.request_ids, step.starts, strict=True))
            for request in step.new:
                self._add_row(request, starts[request.request_id])
        for request_id, block_ids in step.new_block_ids.items():
            self.states.append_blocks(self.states.row(request_id), block_ids)

    def _add_row(self, request: NewRequest, num_computed: int) -> None:
        """A row in the states and in the sampler, or in neither."""
        row = self.states.add(request, num_computed)
        params = request.sampling_params
        assert params.seed is not None  # the engine core fills it in
        try:
            self.sampler.add_row(
                row, params, params.seed, request.token_ids, request.num_prompt_tokens, request.eos_token_ids
            )
        except BaseException:
            self.states.remove(request.request_id)
            raise

    def metrics(self) -> dict[str, Any]:
        """See runner_metrics."""
        return runner_metrics(self.compiled, self.graphs, self.counters, self.predicted_graph_bytes, self.timeline)

    def close(self) -> None:
        """Give the device's memory back."""
        if self.graphs:
            self.graphs.close()
        self.kv_caches.clear()
        self.forward.close()
        self.compiled = None
        if self.config.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
