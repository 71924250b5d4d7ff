"""Compiles the Triton kernels of a cold start side by side: a warm-up would compile one after the other.

Compiling a kernel takes a third of a second, nine tenths of it outside of Python, so threads help. Each runs padding
through a part of the engine: the inputs of a step, a forward of one size, a way of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.passes.small_batch_linear_launch import TOKEN_BUCKETS
from compiled_engine.progress import Progress
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import empty_batch, prepare
from compiled_engine.sampling.kernel_warm_up import WAYS, sample_once

if TYPE_CHECKING:
    from compiled_engine.runner.model_runner import Runner

Job = Callable[[], object]


def rehearse(runner: Runner, progress: Progress) -> None:
    """Run every part once, all at the same time. Raises what a part raises; leaves no trace."""
    device = runner.config.device
    jobs = list(_jobs(runner))
    with (
        progress.stage("compile kernels", total=len(jobs)) as progressed,
        ThreadPoolExecutor(len(jobs), initializer=_use, initargs=(device,)) as threads,
    ):
        for future in as_completed([threads.submit(job) for job in jobs]):
            future.result()
            progressed(1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # one of each thread, kept until then


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _jobs(runner: Runner) -> Iterator[Job]:
    """The longest first."""
    config = runner.config
    max_tokens, max_requests = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    # Kernels differ by these sizes; above the last of them they do not.
    for size in sorted({min(size, max_requests) for size in (*TOKEN_BUCKETS, max_requests)}, reverse=True):
        yield partial(_forward, runner, size, size)
    if max_tokens > 1:
        yield partial(_forward, runner, min(max_tokens, 2 * TOKEN_BUCKETS[-1]), 1)
    for params in WAYS:
        logits_1V = torch.zeros(1, config.model.vocab_size, dtype=config.model.dtype, device=config.device)
        yield partial(sample_once, params, logits_1V)
    yield partial(_inputs, runner)


@torch.inference_mode()
def _forward(runner: Runner, num_tokens: int, num_requests: int) -> None:
    """Requests without slots and with empty contexts, on tensors that no other thread writes to."""
    config, device = runner.config, runner.config.device
    decodes = num_requests if num_tokens == num_requests else 0
    starts_R1 = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * (num_tokens // num_requests)
    host = (decodes, num_tokens // num_requests, config.scheduler.max_model_len)
    inputs = AttentionInputs(
        query_start_loc_R1=starts_R1,
        seq_lens_R=torch.zeros(num_requests, dtype=torch.int32, device=device),
        block_table_RB=torch.zeros_like(runner.buffers.block_table_RB[:num_requests]),
        slot_mapping_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        host_3=torch.tensor(host, dtype=torch.int32, device="cpu"),
        backend=config.attention_backend,
    )
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    runner.forward.run(num_tokens, (zeros_T, zeros_T, inputs, runner.kv_caches))


@torch.inference_mode()
def _inputs(runner: Runner) -> None:
    """The only part that uses the runner's rows and buffers."""
    states, buffers = runner.states, runner.buffers
    for num_tokens in (1, 2) if runner.config.scheduler.max_num_batched_tokens > 1 else (1,):
        batch = empty_batch(buffers, num_tokens, 1, (2 - num_tokens, num_tokens, 2))
        states.writes.apply()
        prepare(batch, states, buffers)
        token_ids_R = torch.zeros(1, dtype=torch.int64, device=runner.config.device)
        for again in (False, True):
            advance(states, buffers, token_ids_R, 1, decodes_only=batch.decodes_only, again=again)
