"""Compiles the Triton kernels of a cold start side by side: a warm-up would compile one after the other.

A step would wait for each of its kernels in turn; here it goes on without them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.collectives.group import stand_in_for
from compiled_engine.config import EngineConfig
from compiled_engine.kernels.compile_ahead import compiled_by
from compiled_engine.kernels.workers import KernelWorkers
from compiled_engine.process.progress import Progress
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import empty_batch, prepare
from compiled_engine.runner.padded_step import PaddedStep
from compiled_engine.runner.warm_up import BatchShape, start_up_batches
from compiled_engine.sampling.kernel_warm_up import ways_of_sampling


def rehearse(config: EngineConfig, step: PaddedStep, workers: KernelWorkers, progress: Progress) -> None:
    """Go through every part of a step once. Raises what a part raises; leaves no trace but compiled kernels."""
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(config.device,)) as threads:
        try:
            with compiled_by(workers, threads) as kernels:
                # Sampling is launched, each way by a thread: it indexes with what its kernels have computed.
                sampling: list[Future[Any]] = []
                if step.samples:  # the other ranks do not rehearse
                    vocabulary = replace(step.sampler.vocabulary, group=stand_in_for(step.sampler.vocabulary.group))
                    ways = ways_of_sampling(vocabulary, config.model.dtype, config.device)
                    sampling = [threads.submit(way) for way in ways]
                for shape in start_up_batches(config)[1:]:  # the first is the largest, but has no kernel of its own
                    _forward(config, step, shape)
                _inputs(config, step)
                jobs = [*sampling, *kernels.load()]
                with progress.stage("compile kernels", total=len(jobs)) as progressed:
                    for job in as_completed(jobs):
                        job.result()
                        progressed(1)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


@torch.inference_mode()
def _forward(config: EngineConfig, step: PaddedStep, shape: BatchShape) -> None:
    """Requests without slots and with empty contexts, on tensors of its own."""
    num_tokens, num_requests, device = shape.num_tokens, shape.num_requests, config.device
    starts_R1 = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * (num_tokens // num_requests)
    inputs = AttentionInputs(
        query_start_loc_R1=starts_R1,
        seq_lens_R=torch.zeros(num_requests, dtype=torch.int32, device=device),
        block_table_RB=torch.zeros_like(step.buffers.block_table_RB[:num_requests]),
        slot_mapping_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        host_3=torch.tensor(shape.host_3, dtype=torch.int32, device="cpu"),
        backend=config.attention_backend,
    )
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    step.model.run(num_tokens, (zeros_T, zeros_T, inputs, step.kv_caches))


@torch.inference_mode()
def _inputs(config: EngineConfig, step: PaddedStep) -> None:
    """The only part that uses the step's rows and buffers."""
    states, buffers = step.states, step.buffers
    for num_tokens in (1, 2) if config.scheduler.max_num_batched_tokens > 1 else (1,):
        batch = empty_batch(buffers, num_tokens, 1, BatchShape(num_tokens, 1, 2).host_3)
        states.writes.apply()
        prepare(batch, states, buffers)
        token_ids_R = torch.zeros(1, dtype=torch.int64, device=config.device)
        for again in (False, True):
            advance(states, buffers, token_ids_R, 1, decodes_only=batch.decodes_only, again=again)
    buffers.forget_staged()  # what was not launched has not arrived
