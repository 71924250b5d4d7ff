"""Starts the engine of an `LLM` and makes its parts. Importing this module imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import RequestLimits
from compiled_engine.frontend.engine_loop import EngineLoop
from compiled_engine.frontend.generation_config import read_default_sampling_params
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.tokenizer import find_tokenizer_folder, load_tokenizer, read_eos_token_ids
from compiled_engine.frontend_parts import FrontendParts, make_frontend
from compiled_engine.options import EngineOptions
from compiled_engine.process.in_background import InBackground
from compiled_engine.process.profiling import Profiler
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.replicas import Replicas
from compiled_engine.processes.start_cores import start_cores
from compiled_engine.resolve.engine import resolve, warn_if_eager


@dataclass(frozen=True)
class LLMParts:
    """The parts of a started `LLM`: frontend, engine core, the loop that runs requests, and profiler."""

    frontend: FrontendParts
    core: EngineCore | Replicas
    loop: EngineLoop  # runs requests on `core`
    profiler: Profiler


def start_llm(options: EngineOptions, progress: Progress, timeline: Timeline) -> LLMParts:
    """Start the engine for these options and return its parts. Raises the same errors as `LLM`."""
    with timeline.span("configuration"):
        config = resolve(options, progress)
    warn_if_eager(options, config)
    model_path = config.model.path
    tokenizer_path = None
    if not options.skip_tokenizer_init:
        tokenizer_path = find_tokenizer_folder(config.tokenizer, model_path)
    default_sampling_params = read_default_sampling_params(model_path, options.generation_config)
    read_eos_token_ids(model_path, None, config.model.overrides)  # raises errors before the slow parts start
    # No text arrives before the engine is ready, so the tokenizer is loaded in parallel.
    tokenizer_start_s = timeline.now()
    loading = InBackground(lambda: load_tokenizer(tokenizer_path) if tokenizer_path else None)
    core = start_cores(config, progress, options.logits_processors, timeline)
    try:
        with timeline.span("wait for the tokenizer"):
            tokenizer = loading.result()
    except BaseException:
        core.close()
        raise
    timeline.add("tokenizer", tokenizer_start_s, loading.seconds, "configuration")
    limits = RequestLimits.of(config, core.num_slots)
    objects_allowed = "where data_parallel_size is above 1" if config.parallel.has_replicas else ""
    return LLMParts(
        frontend=make_frontend(config, limits, tokenizer, default_sampling_params, objects_allowed=objects_allowed),
        core=core,
        loop=EngineLoop(core, OutputProcessor(tokenizer)),
        profiler=Profiler(Path(options.profile_dir), config.device),
    )
