"""Measures weight updates and sleep on a GPU: seconds, and the share of memory that sleep frees.

    python tests/measure_rollouts.py --shape qwen3-8b

A trainer in another process shares weights on the same GPU. The result is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainers import trainer

from compiled_engine.bench.load_rate import write_random_checkpoint
from compiled_engine.llm import LLM
from compiled_engine.process.progress import SilentProgress
from compiled_engine.sampling.params import SamplingParams

PROMPT = {"prompt_token_ids": [*range(3, 40)]}
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
TAGS = ("weights", "kv_cache")


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure(folder: Path, utilization: float, repeats: int) -> dict[str, Any]:
    """Return medians of seconds, each beside all its values, and bytes."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    result: dict[str, Any] = {}
    with LLM(
        folder,
        device="cuda",
        dtype="bfloat16",
        mode="graphed",
        max_model_len=4096,
        max_num_seqs=16,
        gpu_memory_utilization=utilization,
        enable_sleep_mode=True,
        skip_tokenizer_init=True,
        progress=False,
    ) as llm:

        def first_token() -> None:
            llm.generate(PROMPT, FIRST, use_tqdm=False)

        first_token()
        captures = llm.metrics()["captures"]
        executor: Any = llm.core.executor
        stored = executor.runner.calls["weights.apply"].__self__.weights.stored
        weights = sum(each.nbytes for each in stored.filled())
        caches = sum(each.nbytes for each in executor.runner.model.kv_caches)
        for level in (1, 2):
            for number in range(repeats):
                before = free()
                note(f"sleep_{level}_s" if number else f"first_sleep_{level}_s", seconds(partial(llm.sleep, level)))
                note(f"freed_share_{level}", (free() - before) / (weights + caches))
                if level == 1:
                    start = time.perf_counter()
                    note("wake_1_s", seconds(llm.wake_up))
                    first_token()
                    note("wake_1_to_first_token_s", time.perf_counter() - start)
                else:
                    for tag in TAGS:
                        note(f"wake_2_{tag}_s", seconds(partial(llm.wake_up, [tag])))
                        if tag == "weights":
                            note("folder_s", seconds(partial(llm.update_weights, folder)))
        with trainer(folder) as sender:
            for number in range(repeats):
                start = time.perf_counter()
                shared = sender.shared("share")
                note("share_s", time.perf_counter() - start)
                note("ipc_s" if number else "first_ipc_s", seconds(partial(llm.update_weights, shared)))
                note("folder_s", seconds(partial(llm.update_weights, folder)))
        first_token()
        result |= {"captures_since_start": llm.metrics()["captures"] - captures}
    result |= {"weights_bytes": weights, "kv_cache_bytes": caches, "device": torch.cuda.get_device_name()}
    return result | {"medians": {name: median(values) for name, values in found.items()}, "values": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), given.shape, torch.device("cuda", 0), SilentProgress())
        print(json.dumps(measure(Path(folder), given.gpu_memory_utilization, given.repeats), indent=1))


if __name__ == "__main__":
    main()
