"""Warms the engine up: runs every kind of batch, so that no request waits for a kernel, and measures a step's memory.

Warm-up batches consist of padding, without slots and with empty contexts, so they have no side effects. Sampling is
run in every way that a request may ask for (sampling/ways.py). Batches that have a graph and differ from others only in
attention are left to the graph's capture, which runs the batch first.

If a start may need new Triton kernels, they are first compiled in parallel (`compile_kernels`), because the warm-up
would compile one after another. For this, a dry run makes the launches of a step without launching kernels, and
collects the kernels. Kernels that do not depend on the model's code are compiled while the model is traced
(`compile_kernels_ahead`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase, cases_of
from compiled_engine.attention.inputs import (
    STEP_TENSORS,
    AttentionInputs,
    Scoring,
    StepTensor,
    arguments_of,
    attention_inputs_of,
    padding_of,
)
from compiled_engine.config import EngineConfig, effective_fields
from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import InputBuffers, empty_batch, padding_starts, stage_empty
from compiled_engine.engine.step_graphs import ModelStep
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.engine.step_sampling import StepSampling
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.key import KERNEL_FIELDS
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.kernels.cache_folder import keep_kernels_of_this_thread, kernel_folder
from compiled_engine.kernels.compile_ahead import KernelCollector, KernelWorkers, compiled_by, triton_digests
from compiled_engine.kv_format import FP8, halves_of, head_width
from compiled_engine.parallel.group import Group, fake_group_for
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.profile import profiles_folder
from compiled_engine.passes.registry import kernel_token_counts
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.ways import MOST_MEMORY, sample_once, ways_of_sampling


def warm_up(config: EngineConfig, step: ModelStep, progress: Progress) -> int:
    """Run the warm-up batches. Returns the peak of the memory that a step allocates on a GPU, in bytes; 0 on a CPU."""
    on_gpu = config.device.type == "cuda"
    shapes = not_captured(config, start_up_batches(config))
    if on_gpu:
        triton_digests(config.device).result()
        torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device) if on_gpu else 0
    with progress.stage("warm up", total=len(shapes)) as progressed:
        for shape in shapes:
            # On a GPU the largest batch comes first, and its peak memory is measured.
            for variant in step.model.variants:
                _run_empty(step, shape, distinct=shape != shapes[0], variant=variant)
            progressed(1)
        if len(config.offset_choices) > 1:
            _inputs(config, step)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated(config.device) - before
    if isinstance(step.tail, StepSampling):
        for sample in ways_of_sampling(step.tail.sampler.vocabulary, config.model.dtype, config.device):
            sample()
    torch.cuda.empty_cache()
    return peak


def _run_empty(step: ModelStep, shape: BatchShape, *, distinct: bool, variant: str) -> None:
    states, buffers, tail = step.states, step.buffers, step.tail
    num_tokens, num_requests = shape.num_tokens, shape.num_requests
    batch = empty_batch(buffers, num_tokens, num_requests, shape.host_3, variant=variant)
    stage_empty(batch, buffers)
    states.writes.apply()
    step.prepare(batch)
    hidden = step.model.forward(batch, buffers, hidden_wanted=True, distinct=distinct)
    if not isinstance(tail, StepSampling):
        step.model.forward(batch, buffers, distinct=distinct)
        tail.advance(batch, None, num_requests)
        return
    last_R = buffers.logits_index_R[:num_requests]
    logits_RV = step.model.logits_of(hidden.of_tokens(last_R))
    del hidden
    if step.model.ends_at_logits(num_tokens, variant):
        logits_RV = step.model.forward(batch, buffers, distinct=distinct).tensor[last_R]
    tail.launch_first(batch, ForwardOutput(logits_RV, is_logits=True), num_requests)
    token_ids_R = sample_once(MOST_MEMORY, logits_RV, tail.sampler.vocabulary)
    tail.advance(batch, token_ids_R, num_requests, again=True)


PROMPT_TOKENS = 16


class BatchShape(NamedTuple):
    """The shape of a warm-up batch. See `padding_starts` for how its tokens are divided among its rows."""

    num_tokens: int
    num_requests: int  # rows, see `query_len`
    max_seq_len: int  # bound of the contexts
    query_len: int = 1  # consecutive rows per request, see AttentionInputs

    @property
    def host_3(self) -> tuple[int, int, int]:
        """The batch's AttentionInputs.host_3."""
        if self.num_tokens == self.num_requests:
            return self.num_requests, self.query_len, self.max_seq_len
        return 0, max(2, self.num_tokens // self.num_requests), self.max_seq_len


def start_up_batches(config: EngineConfig, query_lens: Sequence[int] = ()) -> list[BatchShape]:
    """Return the shapes of batches that together run every kernel of a step.

    On a GPU these are the largest batch, prompts, and decodes of many sizes; on a CPU one decode and one batch of
    prompts. Attention kernels depend on the number of decodes (powers of two cover all), on the bound of the contexts,
    and on whether prompt tokens are few or many. Kernels of passes depend on the token counts that the passes declare.
    query_lens: numbers of rows that a decoding request may have; empty: config.query_lens.
    """
    scheduler, graph, query_lens = config.scheduler, config.graph, query_lens or config.query_lens
    max_tokens, max_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    longest = scheduler.max_model_len
    num_requests = 2 if max_requests > 1 and max_tokens > 2 else 1
    if config.device.type != "cuda":
        prompts = [BatchShape(min(max_tokens, PROMPT_TOKENS), num_requests, longest)] if max_tokens > 1 else []
        return [BatchShape(1, 1, longest), *prompts]
    counts = kernel_token_counts(config)
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
    short = [BatchShape(size, size, context) for size, context in graph.short_shapes(1)]
    # Without a graph, the longest context itself is the bound; it selects kernels, and the splits of a few requests.
    captured = max(graph.decode_sizes, default=0) if graph.mode.captures_decodes else 0
    without = [size for size in sizes if size > captured]
    few = [size for size in sorted({captured + 1, min(4, max_requests)}) if captured < size <= max_requests]
    bounds = [1 << i for i in range(5, longest.bit_length())]
    shapes = [*product(few, bounds), *product(without, bounds[:1])]
    of_any_length = [BatchShape(size, size, bound) for size, bound in shapes if bound < longest]
    several: list[BatchShape] = []
    for number in query_lens:
        kinds = [*((size, longest) for size in sizes), *graph.short_shapes(number), *shapes]
        of_number = [BatchShape(size * number, size * number, bound, number) for size, bound in kinds]
        several += [shape for shape in of_number if shape.num_tokens <= max_tokens]
    most_rows = min(max_requests * max(query_lens, default=1), max_tokens)
    if config.model.latent_dim and 1 < most_rows == max_tokens:  # only prompts are expanded, which takes memory
        prompts = [BatchShape(max_tokens, num_requests, longest), *prompts]
    return [BatchShape(max_tokens, most_rows, longest), *prompts, *decodes, *several, *short, *of_any_length]


def not_captured(config: EngineConfig, shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """Return the batches that the warm-up must run, since the capture of graphs does not.

    Decodes with a graph are left out if they have several rows per request or a bound of the contexts below
    max_model_len. Other decodes are warmed up even if they have graphs, because a step with prompts computes the logits
    of as many rows without a graph.
    """
    longest = config.scheduler.max_model_len
    dispatcher = Dispatcher(config.graph, config.scheduler, (), config.query_lens, config.rare_query_lens)
    of_decodes = {*dispatcher.decode_keys, *dispatcher.short_keys}

    def runs(shape: BatchShape) -> bool:
        if shape.num_tokens != shape.num_requests or (shape.query_len == 1 and shape.max_seq_len == longest):
            return True
        num_requests = shape.num_requests // shape.query_len
        key = dispatcher.dispatch(shape.num_tokens, num_requests, shape.query_len, shape.max_seq_len)
        return key not in of_decodes

    return [shape for shape in shapes if runs(shape)]


def compile_kernels(
    config: EngineConfig,
    step: ModelStep,
    workers: KernelWorkers,
    progress: Progress,
    features: Sequence[StepFeature] = (),
) -> None:
    """Compile the kernels of every part of a step in parallel, by dry runs. Raises the errors of these runs.

    Sampling is not dry-run but run. features: the features whose kernels are compiled too.
    """
    with _asked(config, workers) as kernels:
        tail = step.tail
        sampling = _sampling(config, tail.sampler.vocabulary, kernels) if isinstance(tail, StepSampling) else []
        largest, *others = start_up_batches(config)
        _attention(config, largest)  # only attention's kernels differ for it
        for shape in others:
            compile_forward(config, step.model, step.buffers, shape)
        _inputs(config, step)
        for feature in features:
            feature.compile_kernels()
        jobs = [*sampling, *kernels.load()]
        with progress.stage("compile kernels", total=len(jobs)) as progressed:
            for job in as_completed(jobs):
                job.result()
                progressed(1)


def compile_kernels_ahead(config: EngineConfig, group: Group, workers: KernelWorkers) -> None:
    """Compile the kernels of sampling and attention. For a thread that runs while the model is traced.

    group: the ranks that compute each layer together. Raises the errors of compilations.
    """
    vocab_size = config.model.vocab_size
    divided = group if local_model(config).vocab_size != vocab_size else None
    _prepare_thread(config)
    with _asked(config, workers) as kernels:
        sampling = []
        if config.model.yields_tokens:
            sampling = _sampling(config, VocabularySlice.of(vocab_size, divided), kernels)
        for shape in start_up_batches(config):  # the largest batch has the longest compilations
            if not workers.closed:  # closed if the start has failed
                _attention(config, shape)
        for job in as_completed([*sampling, *kernels.load()]):
            job.result()


@contextmanager
def _asked(config: EngineConfig, workers: KernelWorkers) -> Iterator[KernelCollector]:
    """Let `workers` compile the kernels that are launched in this context, see `compiled_by`; yields the collector.

    After an exception, kernels whose compilation has not started are dropped.
    """
    with ThreadPoolExecutor(initializer=_prepare_thread, initargs=(config,)) as threads:
        try:
            with compiled_by(workers, threads) as kernels:
                yield kernels
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare_thread(config: EngineConfig) -> None:
    """Make the engine's GPU this thread's current device, and keep the thread's Triton kernels in the kernel folder.

    Does nothing on a CPU.
    """
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)
        keep_kernels_of_this_thread(kernel_folder(config.compile.cache_dir))


def _sampling(config: EngineConfig, vocabulary: VocabularySlice, kernels: KernelCollector) -> list[Future[Any]]:
    """Start to run each way of sampling in a thread; return a future for each.

    Sampling cannot be dry-run, because it indexes with the results of its kernels.
    """
    alone = replace(vocabulary, group=fake_group_for(vocabulary.group))  # other ranks do not take part
    return [kernels.launched(way) for way in ways_of_sampling(alone, config.model.dtype, config.device)]


@torch.inference_mode()
def _attention(config: EngineConfig, shape: BatchShape) -> None:
    """Call the attention of each kind of layer on newly allocated tensors, in a dry run."""
    model, backend, block_size = local_model(config), get_backend(config.attention_backend), config.cache.block_size
    num_blocks = -(-shape.max_seq_len // block_size)  # ranks share the same kernels
    inputs = attention_inputs_of(_empty_step(config, shape, num_blocks), config.attention_backend)
    for case in cases_of(model, block_size, config.device, config.cache.kv_dtype):
        q_THd = torch.zeros(shape.num_tokens, case.num_heads, case.head_dim, dtype=case.dtype, device=config.device)
        sinks_H = q_THd.new_zeros(case.num_heads) if case.sinks else None
        scale = model.attention_scale or case.head_dim**-0.5
        has_scales = config.cache.kv_dtype == FP8
        kv_scales_2K = torch.ones(2, case.num_kv_heads, device=config.device) if has_scales else None
        scoring = Scoring(scale, case.sliding_window, case.soft_cap, sinks_H, kv_scales_2K)
        if case.packed:
            k_TKd = q_THd.new_zeros(shape.num_tokens, case.num_kv_heads, case.head_dim)
            biases_HW = q_THd.new_zeros(case.num_heads, case.num_biases) if case.num_biases else None
            backend.attend_packed(q_THd, k_TKd, k_TKd, torch.empty_like(q_THd), inputs, scoring, biases_HW)
            continue
        width = head_width(config.cache_dtype, case.head_dim, case.latent_dim)
        kv_shape = 1, halves_of(case.latent_dim), block_size, case.num_kv_heads, width
        kv_cache = torch.zeros(kv_shape, dtype=config.cache_dtype, device=config.device)
        if case.latent_dim:
            _latent_attention(case, kv_cache, inputs, scale)
            continue
        backend.attend(q_THd, kv_cache, torch.empty_like(q_THd), inputs, scoring)


def _latent_attention(case: AttentionCase, cache_N1P1w: torch.Tensor, inputs: AttentionInputs, scale: float) -> None:
    """Call the attention of a layer with latent rows on newly allocated tensors."""
    value_dim = case.value_dim or 0
    q_THd = cache_N1P1w.new_zeros(inputs.sizes[0], case.num_heads, case.key_dim, dtype=case.dtype)
    elements = case.num_heads * (case.key_dim - (case.head_dim - case.latent_dim) + value_dim)
    weight_Cr = q_THd.new_zeros(elements, case.latent_dim)
    out_THv = q_THd.new_empty(*q_THd.shape[:2], value_dim)
    get_backend(inputs.backend).attend_latents(q_THd, weight_Cr, cache_N1P1w, out_THv, inputs, scale)


@torch.inference_mode()
def compile_forward(config: EngineConfig, model: ModelForward, buffers: InputBuffers, shape: BatchShape) -> None:
    """Call the forward of a batch in each variant, in a dry run that collects its kernels.

    The forward returns hidden states. If it may also return logits for so few tokens, it is called again for these.
    """
    for variant in model.variants:
        asked = buffers.asked[variant]
        empty = _empty_step(config, shape, buffers.block_table_RB.shape[1], asked)
        inputs = attention_inputs_of(empty, config.attention_backend)
        arguments = arguments_of(empty, inputs, model.kv_caches)
        inputs_of_logits = tuple(empty[tensor.name] for tensor in asked if tensor.by_logits)
        run = partial(model.run, distinct=True, variant=variant, logits_inputs=inputs_of_logits)
        tokens = shape.num_tokens
        output = run(tokens, arguments, hidden_wanted=True)
        if model.ends_at_logits(tokens, variant):
            run(tokens, arguments)
        if inputs_of_logits and config.model.yields_tokens:  # otherwise logits need no kernel of the engine
            model.logits_of(output.of_tokens(slice(shape.num_requests)))


def _empty_step(
    config: EngineConfig, shape: BatchShape, num_blocks: int, asked: Sequence[StepTensor] = ()
) -> dict[str, torch.Tensor]:
    """Return the step tensors of a batch of padding, by name. Its attention is not planned. asked: further tensors."""
    num_tokens, num_requests, device = shape.num_tokens, shape.num_requests, config.device
    sizes = {"tokens": num_tokens, "requests": num_requests, "blocks_per_request": num_blocks, "work": 0}
    step = padding_of((*STEP_TENSORS, *asked), sizes | {"request_borders": num_requests + 1}, device)
    starts_R1 = torch.from_numpy(padding_starts(num_tokens, num_requests))
    step["attention_inputs.query_start_loc_R1"].copy_(starts_R1)
    step["attention_inputs.host_3"].copy_(torch.tensor(shape.host_3, device="cpu"))
    return step


@torch.inference_mode()
def _inputs(config: EngineConfig, step: ModelStep) -> None:
    """Run the kernels that prepare a step's inputs and that advance the states, on batches of padding.

    In a dry run, they are only compiled.
    """
    states, buffers = step.states, step.buffers
    counts = (1, 2) if config.scheduler.max_num_batched_tokens > 1 else (1,)
    for num_tokens, has_offsets in product(counts, config.offset_choices):
        host_3 = BatchShape(num_tokens, 1, 2).host_3
        batch = empty_batch(buffers, num_tokens, 1, host_3, variant=step.model.variants[-1])
        batch = replace(batch, has_offsets=has_offsets)
        stage_empty(batch, buffers)
        states.writes.apply()
        step.prepare(batch)
        advance = step.tail.advance
        advance(batch, None, 1)
        advance(batch, torch.zeros(1, dtype=torch.int64, device=config.device), 1, again=True)
    buffers.forget_staged()  # in a dry run it does not reach the device


def stamp_of_start(kernels: Path, entry_key: str, config: EngineConfig, share: int = 0) -> Path:
    """Return the path of a file in the kernel folder that exists if an earlier start with the same kernels succeeded.

    entry_key: the compiled model's key in the compile cache. share: index of the rank's LayerShare, its part of the
    layers.
    """
    fields = {name: value for name, value in effective_fields(config).items() if name.startswith(KERNEL_FIELDS)}
    files = sorted(profiles_folder().glob("*.json"))
    profiles = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    factors = {"entry": entry_key, "share": share, "config": fields, "profiles": profiles}
    return kernels / f"start_{factors_key(factors)}"


def write_stamp(stamp: Path) -> None:
    """Create the file `stamp`, which marks all kernels as compiled for later starts. Errors are ignored.

    Without the file, the next start uses worker processes again.
    """
    with suppress(OSError):
        stamp.touch(mode=0o600)
