"""Run every kind of batch once before serving: kernels are loaded then, not at the first request; memory is measured.

A warm-up batch is an ordinary batch without slots and with empty contexts, so it leaves no trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.dispatcher import GraphKey
from compiled_engine.progress import Progress
from compiled_engine.runner.input_batch import attention_inputs, empty_batch
from compiled_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from compiled_engine.runner.model_runner import Runner

# One of each kind of sampling, but for penalties and bad words, whose state is allocated when they are first used.
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(top_k=20, top_p=0.9, logit_bias={0: 0.0}, logprobs=1),
)
# A captured kernel launch takes about this much device memory (measured on an H200, driver 580, CUDA 13).
BYTES_PER_CAPTURED_LAYER = 160 << 10


def warm_up(runner: Runner, progress: Progress) -> int:
    """Run the largest batch, and one of each kind; returns the peak bytes of a step beyond what was there before."""
    config = runner.config
    on_gpu = config.device.type == "cuda"
    shapes = _shapes(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs, on_gpu)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device) if on_gpu else 0
    with progress.stage("warm up", total=len(shapes)) as advance:
        for num_tokens, num_requests in shapes:
            _run_empty(runner, num_tokens, num_requests)
            advance(1)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated(config.device) - before
    torch.cuda.empty_cache()
    return peak


def _shapes(max_tokens: int, max_requests: int, on_gpu: bool) -> list[tuple[int, int]]:
    """(tokens, requests) of each warm-up batch: on a GPU the largest first, then decodes, then a mixed batch."""
    mixed = [(min(max_tokens, 16), 2)] if max_requests > 1 and max_tokens > 2 else []
    if not on_gpu:
        return [(1, 1), *mixed]
    return [
        (max_tokens, max_requests),
        *((size, size) for size in sorted({1, min(2, max_requests), max_requests})),
        *mixed,
    ]


def _run_empty(runner: Runner, num_tokens: int, num_requests: int) -> None:
    buffers = runner.buffers
    empty_batch(buffers, num_tokens, num_requests)
    lens = buffers.query_start_loc_R1.host[1 : num_requests + 1] - buffers.query_start_loc_R1.host[:num_requests]
    num_decodes = num_requests if num_tokens == num_requests else 0
    host = (num_decodes, int(lens.max()), runner.config.scheduler.max_model_len)
    inputs = attention_inputs(buffers, num_tokens, num_requests, host, runner.config.attention_backend)
    arguments = (
        buffers.input_ids_T.device[:num_tokens],
        buffers.positions_T.device[:num_tokens],
        inputs,
        runner.kv_caches,
    )
    rows_R = buffers.logits_rows_R.device[:num_requests]
    logits_RV = runner.logits(runner.forwards.hidden(*arguments)[rows_R])
    small = runner.forwards.for_logits(num_tokens)
    if small is not None:
        logits_RV = small(*arguments)[rows_R]
    for params in SAMPLING:
        for row in range(num_requests):
            runner.sampler.add_row(row, params, 0, (0,), 1, frozenset())
        row_index_R = torch.arange(num_requests, dtype=torch.int32, device=runner.config.device)
        runner.sampler.sample(logits_RV, np.arange(num_requests), row_index_R, torch.ones_like(row_index_R).long())
        for row in range(num_requests):
            runner.sampler.remove_row(row)


def graph_bytes_estimate(config: EngineConfig, keys: tuple[GraphKey, ...]) -> int:
    """Device memory that capturing `keys` will take: the largest batch's activations, and each graph's launches."""
    if not keys:
        return 0
    model = config.model
    widest = max(model.intermediate_size * 3, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * 3)
    largest = max(key.num_tokens for key in keys)
    activations = largest * (8 * model.hidden_size + widest + 2 * model.vocab_size) * model.dtype.itemsize
    return activations + len(keys) * model.num_layers * BYTES_PER_CAPTURED_LAYER
