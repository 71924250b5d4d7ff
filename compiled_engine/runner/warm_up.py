"""Run every kind of batch once before serving: kernels are loaded then, not at the first request; memory is measured.

A warm-up batch is an ordinary batch without slots and with empty contexts, so it leaves no trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.progress import Progress
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import empty_batch, prepare
from compiled_engine.runner.padded_step import sample_and_advance
from compiled_engine.sampling.kernel_warm_up import MOST_MEMORY, sample_once, ways_of_sampling

if TYPE_CHECKING:
    from compiled_engine.runner.model_runner import Runner


def warm_up(runner: Runner, progress: Progress) -> int:
    """Run the largest batch, and one of each kind; returns the peak bytes of a step beyond what was there before."""
    config = runner.config
    on_gpu = config.device.type == "cuda"
    shapes = _shapes(config)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device) if on_gpu else 0
    with progress.stage("warm up", total=len(shapes)) as progressed:
        for shape in shapes:
            _run_empty(runner, *shape)
            progressed(1)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated(config.device) - before
    for sample in ways_of_sampling(config.model.vocab_size, config.model.dtype, config.device):
        sample()
    torch.cuda.empty_cache()
    return peak


def _shapes(config: EngineConfig) -> list[tuple[int, int, int]]:
    """(tokens, requests, bound of the contexts) of each warm-up batch: on a GPU the largest first, then decodes."""
    scheduler = config.scheduler
    max_tokens, max_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    longest = scheduler.max_model_len
    prompts = []
    if max_tokens > 1:
        num_requests = 2 if max_requests > 1 and max_tokens > 2 else 1
        prompts = [(min(max_tokens, 16), num_requests, max_seq_len) for max_seq_len in (1, longest)]
    if config.device.type != "cuda":
        return [(1, 1, longest), *prompts[1:]]
    # Kernels differ by the size of the batch, in steps wider than a factor of two, and by the bound.
    sizes = {max_requests, *(1 << i for i in range(max_requests.bit_length()))}
    return [(max_tokens, max_requests, longest), *((size, size, longest) for size in sorted(sizes)), *prompts]


def _run_empty(runner: Runner, num_tokens: int, num_requests: int, max_seq_len: int) -> None:
    states, buffers = runner.states, runner.buffers
    num_decodes = num_requests if num_tokens == num_requests else 0
    host = (num_decodes, -(-num_tokens // num_requests), max_seq_len)
    batch = empty_batch(buffers, num_tokens, num_requests, host)
    states.writes.apply()
    prepare(batch, states, buffers)
    hidden_TD = runner.padded_step.forward(batch, hidden_wanted=True).tensor
    logits_RV = runner.forward.logits(hidden_TD[buffers.logits_index_R[:num_requests]])
    del hidden_TD
    if runner.forward.ends_at_logits(num_tokens):
        logits_RV = runner.padded_step.forward(batch).tensor[buffers.logits_index_R[:num_requests]]
    sample_and_advance(logits_RV, runner.sampler, states, buffers, batch)
    sampled = sample_once(MOST_MEMORY, logits_RV)
    advance(states, buffers, sampled.token_ids_S, num_requests, decodes_only=batch.decodes_only, again=True)
