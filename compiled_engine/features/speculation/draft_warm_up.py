"""Warm-up of a draft model or draft head: runs every kind of batch of its passes once."""

from __future__ import annotations

from typing import Protocol

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.forward import BatchForward
from compiled_engine.engine.warm_up import BatchShape, compile_forward, not_captured, start_up_batches
from compiled_engine.process.progress import Progress


class Passes(Protocol):
    """The passes of a draft model or draft head."""

    config: EngineConfig  # of the draft model or head
    query_lens: tuple[int, ...]  # numbers of rows that a request may have in a pass, besides one
    prompts: BatchForward  # the forward over prompts, whose kernels the other passes use too

    def launch_inputs(self) -> None:
        """Launch the kernels of the passes except for the model's, over padding."""
        ...

    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Run a pass over padding, without side effects.

        host_3: see AttentionInputs. distinct: see ModelForward.run.
        """
        ...


def draft_batches(draft: Passes) -> list[BatchShape]:
    """Return the start-up batches of a draft model or head: its first pass, its further passes, and prompts."""
    config = draft.config
    most = config.scheduler.max_num_seqs
    shapes = start_up_batches(config, draft.query_lens)
    return [
        shape if shape.query_len > 1 else shape._replace(num_requests=min(shape.num_requests, most)) for shape in shapes
    ]


def warm_up_draft(draft: Passes, progress: Progress) -> int:
    """Run the start-up batches; returns the peak memory of a pass in bytes, without memory allocated before."""
    device, shapes = draft.config.device, not_captured(draft.config, draft_batches(draft))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    draft.launch_inputs()
    with progress.stage("warm up draft model", total=len(shapes)) as progressed:
        for shape in shapes:
            draft.run_empty(shape.num_tokens, shape.num_requests, shape.host_3, distinct=shape != shapes[0])
            progressed(1)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def compile_draft_kernels(draft: Passes) -> None:
    """Dry-run the launches of the passes, so that their kernels are compiled."""
    for shape in draft_batches(draft)[1:]:
        compile_forward(draft.config, draft.prompts, shape)
    draft.launch_inputs()
