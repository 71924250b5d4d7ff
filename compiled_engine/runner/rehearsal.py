"""Compiles the Triton kernels of a cold start side by side: a warm-up would compile one after the other.

A step would wait for each of its kernels in turn; here it goes on without them. Kernels that no model's code has a part
in are compiled while that is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from compiled_engine.attention.case import cases_of
from compiled_engine.attention.inputs import Scoring
from compiled_engine.attention.registry import get_backend
from compiled_engine.attention.step_tensors import (
    STEP_TENSORS,
    StepTensor,
    arguments_of,
    attention_inputs_of,
    padding_of,
)
from compiled_engine.config import EngineConfig
from compiled_engine.kernels.compile_ahead import AskedKernels, compiled_by
from compiled_engine.kernels.workers import KernelWorkers
from compiled_engine.parallel.group import Group, stand_in_for
from compiled_engine.process.progress import Progress
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import empty_batch, padding_starts, prepare
from compiled_engine.runner.padded_step import PaddedStep
from compiled_engine.runner.warm_up import BatchShape, start_up_batches
from compiled_engine.sampling.kernel_warm_up import ways_of_sampling
from compiled_engine.sampling.ranks import VocabularySlice


def rehearse_ahead(config: EngineConfig, group: Group, workers: KernelWorkers) -> None:
    """Go through sampling and attention once, beside the trace. Raises what a part raises; leaves only kernels."""
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # it has a thread of its own
    with _asked(config, workers) as kernels:
        sampling = _sampling(config, VocabularySlice.of(config.model.vocab_size, group), kernels)
        for shape in start_up_batches(config):  # what takes the longest to compile is for the first, the largest
            if not workers.closed:  # else the start has failed meanwhile
                _attention(config, shape)
        for job in as_completed([*sampling, *kernels.load()]):
            job.result()


def rehearse(config: EngineConfig, step: PaddedStep, workers: KernelWorkers, progress: Progress) -> None:
    """Go through every part of a step once. Raises what a part raises; leaves no trace but compiled kernels."""
    with _asked(config, workers) as kernels:
        sampling = _sampling(config, step.sampling.sampler.vocabulary, kernels) if step.samples else []
        largest, *others = start_up_batches(config)
        _attention(config, largest)  # no other kernel differs for it
        for shape in others:
            _forward(config, step, shape)
        _inputs(config, step)
        jobs = [*sampling, *kernels.load()]
        with progress.stage("compile kernels", total=len(jobs)) as progressed:
            for job in as_completed(jobs):
                job.result()
                progressed(1)


@contextmanager
def _asked(config: EngineConfig, workers: KernelWorkers) -> Iterator[AskedKernels]:
    """The kernels that are asked for in this context. What raises does not wait for what is left."""
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(config.device,)) as threads:
        try:
            with compiled_by(workers, threads) as kernels:
                yield kernels
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _sampling(config: EngineConfig, vocabulary: VocabularySlice, kernels: AskedKernels) -> list[Future[Any]]:
    """Sampling is launched, each way by a thread: it indexes with what its kernels have computed."""
    alone = replace(vocabulary, group=stand_in_for(vocabulary.group))  # the other ranks do not rehearse
    return [kernels.launched(way) for way in ways_of_sampling(alone, config.model.dtype, config.device)]


@torch.inference_mode()
def _attention(config: EngineConfig, shape: BatchShape) -> None:
    """Of each kind of layer, on tensors of its own."""
    model, backend, block_size = config.local_model, get_backend(config.attention_backend), config.cache.block_size
    num_blocks = -(-shape.max_seq_len // block_size)  # each of them is the one that there is
    inputs = attention_inputs_of(_empty_step(config, shape, num_blocks), config.attention_backend)
    for case in cases_of(model, block_size, config.device):
        q_THd = torch.zeros(shape.num_tokens, case.num_heads, case.head_dim, dtype=case.dtype, device=config.device)
        kv_cache = q_THd.new_zeros(1, 2, block_size, case.num_kv_heads, case.head_dim)
        sinks_H = q_THd.new_zeros(case.num_heads) if case.sinks else None
        scale = model.attention_scale or case.head_dim**-0.5
        scoring = Scoring(scale, case.sliding_window, case.soft_cap, sinks_H)
        backend.attend(q_THd, kv_cache, torch.empty_like(q_THd), inputs, scoring)


@torch.inference_mode()
def _forward(config: EngineConfig, step: PaddedStep, shape: BatchShape) -> None:
    """Requests without slots and with empty contexts, on tensors of its own."""
    empty = _empty_step(config, shape, step.buffers.block_table_RB.shape[1], step.buffers.asked)
    inputs = attention_inputs_of(empty, config.attention_backend)
    step.model.run(shape.num_tokens, arguments_of(empty, inputs, step.kv_caches))


def _empty_step(
    config: EngineConfig, shape: BatchShape, num_blocks: int, asked: Sequence[StepTensor] = ()
) -> dict[str, torch.Tensor]:
    """The step tensors of padding alone; attention's work is not planned."""
    num_tokens, num_requests, device = shape.num_tokens, shape.num_requests, config.device
    sizes = {"tokens": num_tokens, "requests": num_requests, "blocks_per_request": num_blocks, "work": 0}
    step = padding_of((*STEP_TENSORS, *asked), sizes | {"request_borders": num_requests + 1}, device)
    starts_R1 = torch.from_numpy(padding_starts(num_tokens, num_requests))
    step["attention_inputs.query_start_loc_R1"].copy_(starts_R1)
    step["attention_inputs.host_3"].copy_(torch.tensor(shape.host_3, device="cpu"))
    return step


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
