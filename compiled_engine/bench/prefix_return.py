"""Measure the first token of a prompt whose long prefix the KV cache has evicted, and the delay of other requests."""

from __future__ import annotations

import random
import time
from typing import Any

from compiled_engine.bench.engine_steps import decodes
from compiled_engine.bench.workloads import random_prompts, summary
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.params import SamplingParams

CONTEXT = 64  # tokens of the prompts of decodes
STEPS_ALONE = 32
# Seconds between steps while files are written, and steps at a time. Few steps are run, as they fill the KV cache. A
# single step that the pause holds up does not count for the times by which loads are judged, see break_even.py.
PATIENCE_S, STEPS_AT_A_TIME = 0.02, 3
# The cases: the prefix is computed, found in the KV cache, and found outside it after other prompts have evicted it.
COMPUTED, CACHED, RETURNED = "computed", "cached", "returned"


def prefix_return(
    llm: LLM, prefix_len: int, num_decodes: int, warm_up: int, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Return figures in ms with median and spread, for each case, while `num_decodes` other requests decode.

    Figures are over `repeats` samples, after `warm_up` uncounted samples. `first_token` is the time from the arrival of
    a prompt of `prefix_len` tokens to its first token, and `others` the mean time of a step in that time.
    `others_alone` is the time of a step without such a prompt. `loaded_blocks` is the number of blocks that came from
    host memory, and `read_blocks` how many of these came from files.
    """
    generator, before = random.Random(llm.config.model.seed), llm.metrics()
    samples = []
    with progress.stage("measure", total=warm_up + repeats) as advance:
        for number in range(warm_up + repeats):
            samples.append(_sample(llm, generator, prefix_len, num_decodes, number))
            advance(1)
    samples, after = samples[warm_up:], llm.metrics()
    times = {
        name: {case: summary([sample[case][place] for sample in samples]) for case in (COMPUTED, CACHED, RETURNED)}
        for place, name in enumerate(("first_token", "others"))
    }
    counts = {
        f"{name}_blocks": after[f"kv_offload_{name}"] - before[f"kv_offload_{name}"] for name in ("loaded", "read")
    }
    return {**times, "others_alone": summary([sample["alone"][1] for sample in samples]), **counts}


def _sample(
    llm: LLM, generator: random.Random, prefix_len: int, num_decodes: int, number: int
) -> dict[str, tuple[float, float]]:
    (prefix,) = random_prompts(llm, generator, [prefix_len - 1])
    with decodes(llm, generator, num_decodes, CONTEXT, llm.config.model.max_model_len - CONTEXT) as core:
        begun = time.perf_counter()
        for _ in range(STEPS_ALONE):
            core.step()
        found = {"alone": (0.0, (time.perf_counter() - begun) / STEPS_ALONE * 1e3)}
        found[COMPUTED] = _first_token_ms(core, f"{number}.{COMPUTED}", [*prefix, 1])
        _until_written(llm, core)
        found[CACHED] = _first_token_ms(core, f"{number}.{CACHED}", [*prefix, 2])
        for other, prompt in enumerate(random_prompts(llm, generator, [prefix_len] * _num_evicting(llm, prefix_len))):
            _first_token_ms(core, f"{number}.{other}", prompt)
            _until_written(llm, core)
        found[RETURNED] = _first_token_ms(core, f"{number}.{RETURNED}", [*prefix, 3])
    return found


def _until_written(llm: LLM, core: EngineCore) -> None:
    """Run steps until no file is being written: a block whose file is not whole cannot be read from it.

    The wait ends with the decodes, if they are short and the files are slow.
    """
    while llm.metrics()["kv_offload_writing"] and core.has_unfinished():
        time.sleep(PATIENCE_S)
        for _ in range(STEPS_AT_A_TIME):
            core.step()


def _num_evicting(llm: LLM, prefix_len: int) -> int:
    """Return how many prompts of prefix_len tokens evict all else from the KV cache.

    If blocks are also stored in files, the prompts suffice to evict all else from host memory, too.
    """
    cache = llm.config.cache
    blocks = llm.metrics()["blocks_total"] + (cache.host_blocks if cache.block_files is not None else 0)
    return -(-blocks * cache.block_size // prefix_len)


def _first_token_ms(core: EngineCore, request_id: str, prompt: list[int]) -> tuple[float, float]:
    """Return the time to a prompt's first token, and the mean time of the steps until then, in ms."""
    begun, num_steps, has_token = time.perf_counter(), 0, False
    core.add(EngineRequest(request_id, tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0, seed=0)))
    while not has_token:
        num_steps += 1
        has_token = any(output.request_id == request_id for output in core.step())
    milliseconds = (time.perf_counter() - begun) * 1e3
    return milliseconds, milliseconds / num_steps
