"""Program of a worker process with one engine: reads a task as JSON from stdin, and writes JSON lines to stdout.

The task is {"options": engine options, "workload": the `task()` of a workload, or null to only start the engine}. The
lines are {"ready": true} once the engine can take requests, {"first_token": true} at the first token, then the result.
All other output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

# The start-up stage that this process times itself.
BEFORE = "before the engine"


def run(task: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the task and return its result. say: called with each line that precedes the result.

    The keys are start_up (spans, see Timeline, including the imports before the engine starts) and cache (hit, miss or
    off). With a workload there are also its measurements, memory_bytes, compiles_after_start, captures, graph_fallbacks
    and preemptions.
    """
    from compiled_engine.process.memory import collection_paused
    from compiled_engine.process.timeline import Timeline

    timeline = Timeline()
    timeline.add("interpreter", 0.0, timeline.now(), BEFORE)
    with collection_paused(), timeline.span("import the engine", BEFORE):  # as the package does
        from compiled_engine.llm import LLM
        from compiled_engine.sampling.params import SamplingParams

    with LLM(**task["options"], progress=False) as llm:
        say({"ready": True})
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)
        say({"first_token": True})
        started = llm.metrics()
        spans = [*started["start_up"], *timeline.as_records()]
        result = {"start_up": sorted(spans, key=lambda span: span["start_s"]), "cache": started["cache"]}
        if task["workload"] is not None:
            from compiled_engine.bench.worker_workloads import measure

            kernels = compiled_kernels() if llm.config.device.type == "cuda" else []
            result |= measure(task["workload"], llm)
            metrics = llm.metrics()
            result["memory_bytes"] = memory_bytes(llm.config, metrics)
            result["compiles_after_start"] = len(kernels)
            for name in ("captures", "graph_fallbacks", "preemptions"):
                result[name] = metrics[name]
        return result


def compiled_kernels() -> list[str]:
    """Return a list that grows with each Triton kernel compiled or loaded from now on."""
    import triton

    found: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **about: found.append(about["repr"])
    return found


def memory_bytes(config: Any, metrics: dict[str, Any]) -> dict[str, int] | None:
    """Return the device memory in use, in bytes by part.

    None without CUDA, with worker processes, and with sleep mode, whose memory is not PyTorch's.

    kv_cache: the KV cache. without_kv_cache: the rest of PyTorch's reserved peak (weights, activations, graphs).
    graphs_predicted, graphs_used: predicted and actual size of the graphs.
    """
    import torch

    if config.device.type != "cuda" or config.parallel.executor != "in_process" or config.sleeps:
        return None
    kv_cache = metrics["kv_cache_bytes"]
    return {
        "kv_cache": kv_cache,
        "without_kv_cache": torch.cuda.max_memory_reserved(config.device) - kv_cache,
        "graphs_predicted": metrics["graph_bytes_predicted"],
        "graphs_used": metrics["graph_bytes_used"],
    }


def main() -> None:
    """Run one task from stdin. Output of libraries goes to stderr, since stdout is for results only."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=results, flush=True)

    say(run(json.loads(sys.stdin.readline()), say))


if __name__ == "__main__":
    main()
