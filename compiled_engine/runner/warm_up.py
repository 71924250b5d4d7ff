"""Run every kind of batch once before serving: kernels are loaded then, not at the first request; memory is measured.

A warm-up batch is an ordinary batch without slots and with empty contexts, so it leaves no trace.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.kernels.gpu_ahead import triton_digests
from compiled_engine.passes.registry import kernel_token_counts
from compiled_engine.process.progress import Progress
from compiled_engine.runner.input_batch import empty_batch, prepare
from compiled_engine.runner.model_forward import ForwardOutput
from compiled_engine.runner.padded_step import PaddedStep
from compiled_engine.sampling.kernel_warm_up import MOST_MEMORY, sample_once, ways_of_sampling

PROMPT_TOKENS = 16


class BatchShape(NamedTuple):
    """Requests that share `num_tokens`, see `padding_starts`; `max_seq_len` bounds their contexts."""

    num_tokens: int
    num_requests: int
    max_seq_len: int

    @property
    def host_3(self) -> tuple[int, int, int]:
        """See AttentionInputs."""
        if self.num_tokens == self.num_requests:
            return self.num_requests, 1, self.max_seq_len
        return 0, max(2, self.num_tokens // self.num_requests), self.max_seq_len


def start_up_batches(config: EngineConfig) -> list[BatchShape]:
    """Batches in which every kernel of a step runs: the largest, then prompts, then, on a GPU, decodes of many sizes.

    Attention's kernels differ by the number of decodes, in steps wider than a factor of two, by the bound of the
    contexts, and between few and many tokens of prompts; those of passes where the passes say so.
    """
    scheduler, graph = config.scheduler, config.graph
    max_tokens, max_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    longest = scheduler.max_model_len
    num_requests = 2 if max_requests > 1 and max_tokens > 2 else 1
    if config.device.type != "cuda":
        prompts = [BatchShape(min(max_tokens, PROMPT_TOKENS), num_requests, longest)] if max_tokens > 1 else []
        return [BatchShape(1, 1, longest), *prompts]
    counts = kernel_token_counts(config.compile.passes)
    num_tokens = min(max_tokens, 2 * max(counts, default=PROMPT_TOKENS))
    few_tokens = min(max_tokens, PROMPT_TOKENS)
    more_counts = [(count, longest) for count in counts if max_requests < count < num_tokens]
    prompts = [
        BatchShape(count, num_requests, bound)
        for count, bound in ((num_tokens, 1), (num_tokens, longest), (few_tokens, longest), *more_counts)
        if max_tokens > 1
    ]
    sizes = sorted({max_requests, *(1 << i for i in range(max_requests.bit_length())), *counts})
    sizes = [size for size in sizes if size <= max_requests]
    decodes = [BatchShape(size, size, longest) for size in sizes]
    short = [BatchShape(size, size, context) for size, context in graph.short_decodes]
    # Without a graph the bound is the longest context itself; kernels follow from it, and the splits of a few requests.
    bounds = [] if graph.mode.captures_decodes else [1 << i for i in range(5, longest.bit_length())]
    few = sorted({1, min(4, max_requests)})
    shapes = [*product(few, bounds), *product(sizes, bounds[:1])]
    of_any_length = [BatchShape(size, size, bound) for size, bound in shapes if bound < longest]
    return [BatchShape(max_tokens, max_requests, longest), *prompts, *decodes, *short, *of_any_length]


def warm_up(config: EngineConfig, step: PaddedStep, progress: Progress) -> int:
    """Run the start-up batches; returns the peak bytes of a step beyond what was there before."""
    on_gpu = config.device.type == "cuda"
    shapes = start_up_batches(config)
    if on_gpu:
        triton_digests(config.device).result()
        torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device) if on_gpu else 0
    with progress.stage("warm up", total=len(shapes)) as progressed:
        for shape in shapes:
            # On a GPU the first is the largest, whose peak is measured.
            _run_empty(step, shape, distinct=shape != shapes[0])
            progressed(1)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated(config.device) - before
    if step.samples:
        for sample in ways_of_sampling(step.sampling.sampler.vocabulary, config.model.dtype, config.device):
            sample()
    torch.cuda.empty_cache()
    return peak


def _run_empty(step: PaddedStep, shape: BatchShape, *, distinct: bool) -> None:
    states, buffers, sampling = step.states, step.buffers, step.sampling
    num_tokens, num_requests = shape.num_tokens, shape.num_requests
    batch = empty_batch(buffers, num_tokens, num_requests, shape.host_3)
    states.writes.apply()
    prepare(batch, states, buffers)
    hidden_TD = step.forward(batch, hidden_wanted=True, distinct=distinct).tensor
    if not step.samples:
        step.forward(batch, distinct=distinct)
        sampling.without_tokens(batch, num_requests)
        return
    logits_RV = step.model.logits(hidden_TD[buffers.logits_index_R[:num_requests]])
    del hidden_TD
    if step.model.ends_at_logits(num_tokens):
        logits_RV = step.forward(batch, distinct=distinct).tensor[buffers.logits_index_R[:num_requests]]
    sampling.every_row(ForwardOutput(logits_RV, is_logits=True), batch, num_requests)
    token_ids_R = sample_once(MOST_MEMORY, logits_RV, sampling.sampler.vocabulary)
    sampling.again(batch, token_ids_R, num_requests)
