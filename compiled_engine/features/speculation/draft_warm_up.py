"""The start of a draft model or a head: every kind of batch of its passes runs once."""

from __future__ import annotations

from typing import Protocol

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.forward import BatchForward
from compiled_engine.engine.warm_up import BatchShape, compile_forward, not_captured, start_up_batches
from compiled_engine.process.progress import Progress


class Passes(Protocol):
    """The passes of a draft model or a head. config: its own. query_lens: rows of a request in them, but for one.
    prompts: the forward that all passes share kernels with."""

    config: EngineConfig
    query_lens: tuple[int, ...]
    prompts: BatchForward

    def launch_inputs(self) -> None:
        """Launch the kernels beside the model, over padding."""
        ...

    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Run a pass over padding alone, without a trace. host_3: see AttentionInputs. distinct: see
        ModelForward.run."""
        ...


def draft_batches(draft: Passes) -> list[BatchShape]:
    """Return the batches of a draft model or a head: rows of its first pass, rows of its further passes, and
    prompts."""
    config = draft.config
    most = config.scheduler.max_num_seqs
    shapes = start_up_batches(config, draft.query_lens)
    return [
        shape if shape.query_len > 1 else shape._replace(num_requests=min(shape.num_requests, most)) for shape in shapes
    ]


def warm_up_draft(draft: Passes, progress: Progress) -> int:
    """Run the start-up batches of a draft model; returns the peak bytes of a pass beyond what was there before."""
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
    """Go through the launches of the passes."""
    for shape in draft_batches(draft)[1:]:
        compile_forward(draft.config, draft.prompts, shape)
    draft.launch_inputs()
