"""Compiles the Triton kernels of a cold start side by side: a warm-up would compile one after the other.

A step would wait for each of its kernels in turn; here it goes on without them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.passes.silu_mul import FEW_TOKENS
from compiled_engine.passes.small_batch_linear_launch import TOKEN_BUCKETS
from compiled_engine.progress import Progress
from compiled_engine.runner.advance import advance
from compiled_engine.runner.compile_ahead import compiled_by
from compiled_engine.runner.input_batch import empty_batch, prepare
from compiled_engine.runner.kernel_workers import KernelWorkers
from compiled_engine.sampling.kernel_warm_up import ways_of_sampling

if TYPE_CHECKING:
    from compiled_engine.runner.model_runner import Runner


def rehearse(runner: Runner, workers: KernelWorkers, progress: Progress) -> None:
    """Go through every part of a step once. Raises what a part raises; leaves no trace but compiled kernels."""
    model, device = runner.config.model, runner.config.device
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        try:
            with compiled_by(workers, threads) as kernels:
                # Sampling is launched, each way by a thread: it indexes with what its kernels have computed.
                ways = ways_of_sampling(model.vocab_size, model.dtype, device)
                sampling: list[Future[Any]] = [threads.submit(way) for way in ways]
                _go_through(runner)
                jobs = [*sampling, *kernels.load()]
                with progress.stage("compile kernels", total=len(jobs)) as progressed:
                    for job in as_completed(jobs):
                        job.result()
                        progressed(1)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _go_through(runner: Runner) -> None:
    scheduler = runner.config.scheduler
    max_tokens, max_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    # Kernels differ by these sizes; above the last of them they do not. Those of prompts take the longest to compile.
    for size, max_seq_len in ((2 * TOKEN_BUCKETS[-1], 1), (2 * FEW_TOKENS, scheduler.max_model_len)):
        if max_tokens > 1:
            _forward(runner, min(max_tokens, size), 1, max_seq_len)
    for size in sorted({min(size, max_requests) for size in (*TOKEN_BUCKETS, 2 * FEW_TOKENS, max_requests)}):
        _forward(runner, size, size, scheduler.max_model_len)
    _inputs(runner)


@torch.inference_mode()
def _forward(runner: Runner, num_tokens: int, num_requests: int, max_seq_len: int) -> None:
    """Requests without slots and with empty contexts, on tensors of its own."""
    config, device = runner.config, runner.config.device
    decodes = num_requests if num_tokens == num_requests else 0
    starts_R1 = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * (num_tokens // num_requests)
    host = (decodes, num_tokens // num_requests, max_seq_len)
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
    buffers.forget_staged()  # what was not launched has not arrived
