"""The runner: loads and compiles the model, owns the KV cache and the request rows, and executes steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler import CompiledModel, Forwards, compile_model
from compiled_engine.graphs.cuda_graphs import CudaGraphManager
from compiled_engine.graphs.dispatcher import Dispatcher, GraphKey
from compiled_engine.models.loader import load_weights
from compiled_engine.models.parameters import materialize
from compiled_engine.models.registry import build_model
from compiled_engine.parameter_layout import ParameterLayout
from compiled_engine.progress import Progress
from compiled_engine.runner import kv_cache
from compiled_engine.runner.cpu_threads import threads_for_step
from compiled_engine.runner.input_batch import InputBatch, attention_inputs, empty_batch, gather_batch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.kernel_cache import kernel_cache
from compiled_engine.runner.rehearsal import rehearsal
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.warm_up import graph_bytes_estimate, warm_up
from compiled_engine.sampling.prompt_logprobs import prompt_logprobs
from compiled_engine.sampling.sampler import Sampler
from compiled_engine.sampling.transfer import upload
from compiled_engine.scheduling.step import NewRequest, RunnerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from compiled_engine.timeline import Timeline

PROMPT_LOGPROBS_CHUNK = 256


class Runner:
    """Everything on the device. `execute` is the only way in once it stands; it is not thread-safe."""

    def __init__(self, config: EngineConfig, progress: Progress, timeline: Timeline):
        """Load, compile, size the KV cache, capture.

        Raises what the loader, the compiler and kv_cache.count_blocks raise.
        """
        self.config = config
        self.timeline = timeline
        self.compiled: CompiledModel | None = None
        layout = ParameterLayout()
        if config.compile.enabled:
            self.compiled = compile_model(config, lambda: build_model(config.model), progress, timeline)
            layout = self.compiled.layout
        with timeline.span("load weights"):
            model = build_model(config.model)
            parameters = materialize(model, layout, config.device)
            load_weights(model, config.model, progress)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        # A version may take a parameter alone that another takes packed: the model's own are views.
        named = dict(model.named_parameters(remove_duplicate=False)) | parameters
        self.forwards = self.compiled.bind(named) if self.compiled else Forwards(model)
        self.logits: Callable[[torch.Tensor], torch.Tensor] = model.logits

        scheduler = config.scheduler
        self.states = RequestStates(scheduler.max_num_seqs, scheduler.max_model_len, config.cache.block_size)
        self.buffers = InputBuffers(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            self.states.block_table.shape[1],
            config.device,
        )
        self.sampler = Sampler(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len, config.device)
        self.dispatcher = Dispatcher(config.graph.mode, config.graph.capture_sizes, scheduler.max_model_len)
        self.graphs = CudaGraphManager()
        self.graph_replays = 0
        self.graph_fallbacks = 0  # decode batches larger than every captured graph
        self.kv_caches = kv_cache.allocate(config, 1)
        with kernel_cache(config.compile.cache_dir if config.device.type == "cuda" else None):
            self._start(progress)

    @torch.inference_mode()
    def _start(self, progress: Progress) -> None:
        with self.timeline.span("warm up"):
            if self.compiled and self.compiled.counts.compiles and self.config.device.type == "cuda":
                # Kernels were never compiled: memory is measured after this, undisturbed.
                with rehearsal(self.compiled, self.compiled.lookup.work.path, self.config.device):
                    warm_up(self, progress)
            activation_bytes = warm_up(self, progress)
        self.predicted_graph_bytes = graph_bytes_estimate(self.config, self.dispatcher.keys)
        self.num_blocks = kv_cache.count_blocks(self.config, activation_bytes, self.predicted_graph_bytes)
        self.kv_caches = kv_cache.allocate(self.config, self.num_blocks)
        if self.dispatcher.keys:
            with self.timeline.span("capture"):
                empty_batch(self.buffers, self.dispatcher.keys[-1].num_tokens, self.dispatcher.keys[-1].num_requests)
                self.graphs.capture(self.dispatcher.keys, self._decode_step, progress)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        """Run one step: update the rows, gather the inputs, run the model, sample."""
        self._update_rows(step)
        if not step.scheduled:
            return RunnerOutput({})
        with threads_for_step(step.num_tokens, self._num_parameters, self.config.device):
            return self._run(step)

    def _run(self, step: SchedulerOutput) -> RunnerOutput:
        decodes_only = all(request.num_tokens == 1 for request in step.scheduled)
        # Decode graphs and small versions end at the logits; prompt log-probabilities need every token's hidden state.
        owes_prompt_logprobs = any(map(self._owes_prompt_logprobs, step.scheduled))
        uniform = 1 if decodes_only and not owes_prompt_logprobs else None
        key = self.dispatcher.dispatch(step.num_tokens, len(step.scheduled), uniform)
        if uniform and key is None and self.dispatcher.keys:
            self.graph_fallbacks += 1
        batch = gather_batch(step.scheduled, self.states, self.buffers, self.config.attention_backend, key)
        prompt = None
        if key is not None:
            logits_PV = self.graphs.replay(key)
            self.graph_replays += 1
            logits_RV = logits_PV[: batch.num_requests]
            if batch.logits_rows_R is not None:
                logits_RV = logits_RV[batch.logits_rows_R]
        elif (small := self.forwards.for_logits(batch.num_tokens)) and not owes_prompt_logprobs:
            logits_TV = small(batch.input_ids_T, batch.positions_T, batch.attention_inputs, self.kv_caches)
            logits_RV = logits_TV if batch.logits_rows_R is None else logits_TV[batch.logits_rows_R]
        else:
            hidden_TD = self.forwards.hidden(
                batch.input_ids_T, batch.positions_T, batch.attention_inputs, self.kv_caches
            )
            prompt = self._prompt_logprobs(batch, hidden_TD)
            wanted_RD = hidden_TD if batch.logits_rows_R is None else hidden_TD[batch.logits_rows_R]
            logits_RV = self.logits(wanted_RD)
        return self._sample(batch, logits_RV, prompt or {})

    def _owes_prompt_logprobs(self, request: ScheduledRequest) -> bool:
        row = self.states.row(request.request_id)
        params = self.states.sampling_params[row]
        assert params is not None
        before_last_prompt_token = request.num_computed_tokens < self.states.num_prompt_tokens[row] - 1
        return params.prompt_logprobs is not None and bool(before_last_prompt_token)

    def _update_rows(self, step: SchedulerOutput) -> None:
        for request_id in step.removed:
            row = self.states.remove(request_id)
            if row is not None:
                self.sampler.remove_row(row)
        for request in step.new:
            self._add_row(request)
        for scheduled in step.scheduled:
            if scheduled.new_block_ids:
                self.states.append_blocks(self.states.row(scheduled.request_id), scheduled.new_block_ids)

    def _add_row(self, request: NewRequest) -> None:
        """A row in the states and in the sampler, or in neither."""
        row = self.states.add(request)
        params = request.sampling_params
        assert params.seed is not None  # the engine core fills it in
        try:
            self.sampler.add_row(
                row, params, params.seed, request.token_ids, request.num_prompt_tokens, request.eos_token_ids
            )
        except BaseException:
            self.states.remove(request.request_id)
            raise

    def _sample(
        self, batch: InputBatch, logits_RV: torch.Tensor, prompt: dict[str, tuple[int, list[TokenLogprobs]]]
    ) -> RunnerOutput:
        if not batch.sampling_ids:
            return RunnerOutput({}, prompt_logprobs=prompt)
        row_index_R = upload(batch.sampling_rows.astype(np.int32), self.config.device)
        positions_R = upload(batch.sampling_positions, self.config.device)
        sampled = self.sampler.sample(logits_RV, batch.sampling_rows, row_index_R, positions_R)
        entries = sampled.logprobs.read() if sampled.logprobs else [None] * len(batch.sampling_ids)
        sampled_ids = sampled.token_ids_S.tolist()
        for row, token_id in zip(batch.sampling_rows.tolist(), sampled_ids, strict=True):
            self.states.append_token(row, token_id)
        token_ids = dict(zip(batch.sampling_ids, sampled_ids, strict=True))
        with_ids = zip(batch.sampling_ids, entries, strict=True)
        logprobs = {request_id: entry for request_id, entry in with_ids if entry is not None}
        return RunnerOutput(token_ids, logprobs, prompt)

    def _prompt_logprobs(
        self, batch: InputBatch, hidden_TD: torch.Tensor
    ) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """For the requests that want them and are in their prompt: the tokens after those of this step."""
        found: dict[str, tuple[int, list[TokenLogprobs]]] = {}
        for i, request_id in enumerate(batch.request_ids):
            row = int(batch.rows[i])
            params = self.states.sampling_params[row]
            assert params is not None
            first = int(batch.num_computed[i])
            end = batch.query_starts[i + 1] if i + 1 < batch.num_requests else batch.num_tokens
            count = min(int(end - batch.query_starts[i]), int(self.states.num_prompt_tokens[row]) - 1 - first)
            if params.prompt_logprobs is None or count <= 0:
                continue
            start = int(batch.query_starts[i])
            targets_T = torch.from_numpy(self.states.token_ids[row, first + 1 : first + 1 + count])
            entries: list[TokenLogprobs] = []
            for chunk in range(0, count, PROMPT_LOGPROBS_CHUNK):
                chunk_end = min(count, chunk + PROMPT_LOGPROBS_CHUNK)
                logits_TV = self.logits(hidden_TD[start + chunk : start + chunk_end])
                targets = targets_T[chunk:chunk_end].to(self.config.device)
                read = prompt_logprobs(logits_TV, targets, params.prompt_logprobs).read()
                entries += [entry for entry in read if entry is not None]
            found[request_id] = (first + 1, entries)
        return found

    def _decode_step(self, key: GraphKey) -> torch.Tensor:
        """Forward and logits of the padded batch in the buffers: what a decode graph captures."""
        host = (key.num_requests, key.query_len, key.max_seq_len)
        inputs = attention_inputs(self.buffers, key.num_tokens, key.num_requests, host, self.config.attention_backend)
        arguments = (
            self.buffers.input_ids_T.device[: key.num_tokens],
            self.buffers.positions_T.device[: key.num_tokens],
            inputs,
            self.kv_caches,
        )
        small = self.forwards.for_logits(key.num_tokens)
        return small(*arguments) if small else self.logits(self.forwards.hidden(*arguments))

    def metrics(self) -> dict[str, Any]:
        """Counts of traces, compiles, captures and replays, cache status, start-up seconds, graph memory."""
        counts = self.compiled.counts if self.compiled else None
        return {
            "traces": counts.traces if counts else 0,
            "compiles": counts.compiles if counts else 0,
            "captures": self.graphs.num_captures,
            "cache": self.compiled.lookup.status if self.compiled else "off",
            "cache_entry": str(self.compiled.lookup.folder) if self.compiled else None,
            "passes": self._pass_counts(),
            "graph_replays": self.graph_replays,
            "graph_fallbacks": self.graph_fallbacks,
            "graph_bytes_predicted": self.predicted_graph_bytes,
            "graph_bytes_used": self.graphs.bytes_used,
            "capture_bytes": dict(self.graphs.capture_bytes),
            "start_up_seconds": self.timeline.seconds(),
            "start_up": self.timeline.as_records(),
        }

    def _pass_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """By range and pass name: how often it matched, and had to."""
        if self.compiled is None:
            return {}
        return {
            version.compile_range.name: {
                report.name: {"matches": report.matches, "contract": report.contract}
                for report in version.passes
                if report.applied
            }
            for version in self.compiled.versions
        }

    def close(self) -> None:
        """Give the device's memory back."""
        self.graphs.close()
        self.kv_caches = []
        self.forwards, self.logits = Forwards(nn.Identity()), nn.Identity()  # the last references to the weights
        self.compiled = None
        if self.config.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
