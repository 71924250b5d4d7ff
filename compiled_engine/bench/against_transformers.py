"""Compare the engine's tokens per second with those of transformers, on the same machine, model, prompts and lengths.

transformers has several ways to generate, and the fastest depends on the machine and the batch. All are measured, and
the engine is compared with the fastest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import CompileConfig, ContinuousBatchingConfig

from compiled_engine.bench.bounds import Chunk, device_rates, model_sizes, step_bytes
from compiled_engine.bench.results import model_record, provenance
from compiled_engine.bench.workloads import summary
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.params import SamplingParams

# Ways of transformers to generate: name in options -> name in results.
WAYS = {
    "generate": "generate",
    "static": "generate, static cache",
    "compiled": "generate, static cache, torch.compile",
    "continuous": "continuous batching",
}
# The way that is not used for a single request.
FOR_MANY = ("continuous",)

Prompts = list[list[int]]
# Generates for all prompts and returns the number of tokens.
Contender = Callable[[Prompts], int]


def compare(
    model: Path | None,
    mode: str,
    num_requests: int,
    prompt_len: int,
    output_len: int,
    repeats: int,
    ways: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """Compare greedy generation of `output_len` tokens, for one request and for `num_requests` requests at once.

    model: folder of a checkpoint; None for the bundled model. mode: the engine's. ways: keys of WAYS; empty for all.

    The engine and the ways take turns, `repeats` times after a warm-up. On a CPU, each way is measured with one thread
    and with all threads, while the engine chooses its number of threads itself. All prompts have the same length, so
    that nothing is padded.

    Returns results with "one" and "many". Both have engine (tokens per second with median and spread), transformers (a
    list of way, threads, tokens_per_s), fastest (the entry of that list with the highest median), and ratio (the
    engine's median divided by that median). If the list is empty, fastest is None and there is no ratio. Both also have
    bandwidth_share: the bytes that the engine's steps must read per second, as a share of the copy bandwidth. The
    result also has rates, see `Rates`.

    Raises ValueError for an unknown way, RuntimeError if a contender generates a wrong number of tokens.
    """
    for way in ways:
        if way not in WAYS:
            raise ValueError(f"way is {way!r}; allowed: {', '.join(WAYS)}")
    path = model or BUNDLED_MODEL_PATH
    with LLM(path, mode=mode, progress=False, max_num_seqs=num_requests, enable_prefix_caching=False) as llm:
        config = llm.config
        oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=config.model.dtype).eval().to(config.device)
        oracle.generation_config = GenerationConfig()
        prompts = _prompts(config.model.vocab_size, num_requests, prompt_len)
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        engine: Contender = partial(_engine, llm, params)
        sizes, rates = model_sizes(config.model), device_rates(config.device, config.model.dtype)
        results: dict[str, dict[str, Any]] = {}
        for name, batch in (("one", prompts[:1]), ("many", prompts)):
            theirs = {
                (WAYS[way], threads): _contender(oracle, way, threads, output_len)
                for way in ways or WAYS
                if name == "many" or way not in FOR_MANY
                for threads in _thread_counts(config.device)
            }
            with progress.stage(f"{len(batch)} requests", total=(repeats + 1) * (len(theirs) + 1)) as advance:
                ours, others = _take_turns(engine, theirs, batch, output_len, repeats, advance)
            records: list[dict[str, Any]] = [
                {"way": way, "threads": threads, "tokens_per_s": summary(measured)}
                for (way, threads), measured in others.items()
            ]
            found = results[name] = {"engine": summary(ours), "transformers": records, "fastest": None}
            read = step_bytes(sizes, [Chunk(prompt_len + output_len / 2, 1)] * len(batch))
            found["bandwidth_share"] = found["engine"]["median"] / len(batch) * read / rates.bytes_per_s
            if records:  # a single request has none if only continuous batching was chosen
                found["fastest"] = max(records, key=lambda record: record["tokens_per_s"]["median"])
                found["ratio"] = found["engine"]["median"] / found["fastest"]["tokens_per_s"]["median"]
        return {
            "benchmark": "transformers",
            "results": results,
            "rates": asdict(rates),
            "workload": {"requests": num_requests, "prompt_len": prompt_len, "output_len": output_len},
            "repeats": repeats,
            "model": model_record(config, None),
            "options": {"mode": mode},
            **provenance(config.device),
        }


def _take_turns(
    engine: Contender,
    theirs: dict[tuple[str, int], Contender],
    batch: Prompts,
    output_len: int,
    repeats: int,
    advance: Callable[[int], None],
) -> tuple[list[float], dict[tuple[str, int], list[float]]]:
    """Return tokens per second in each repeat, of the engine and of each contender in `theirs`; the engine runs first.

    advance: called with 1 after each run. Raises RuntimeError if a contender generates a wrong number of tokens.
    """
    ours: list[float] = []
    others: dict[tuple[str, int], list[float]] = {key: [] for key in theirs}
    for repeat in range(repeats + 1):  # the first is warm-up
        for contender, rates in [(engine, ours), *((theirs[key], others[key]) for key in theirs)]:
            start = time.perf_counter()
            tokens = contender(batch)
            rate = tokens / (time.perf_counter() - start)
            if tokens != len(batch) * output_len:
                raise RuntimeError(f"{len(batch) * output_len} tokens were asked for, {tokens} came")
            if repeat:
                rates.append(rate)
            advance(1)
    return ours, others


def _engine(llm: LLM, params: SamplingParams, batch: Prompts) -> int:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _contender(oracle: Any, way: str, threads: int, output_len: int) -> Contender:
    """Return a function that generates `output_len` tokens per prompt greedily. way: a key of WAYS."""
    generation = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0)
    if way == "continuous":
        generation.eos_token_id = -1
    elif way != "generate":
        generation.cache_implementation = "static"
        generation.disable_compile = way == "static"
    if way == "compiled":
        on_cpu = oracle.device.type == "cpu"
        generation.compile_config = CompileConfig(mode="default" if on_cpu else "reduce-overhead")
        generation.compile_config._compile_all_devices = True

    def run(batch: Prompts) -> int:
        with _threads(threads):
            if way == "continuous":
                cache = ContinuousBatchingConfig()
                pages = sum(-(-(len(prompt) + output_len) // cache.page_size) for prompt in batch)
                cache.num_blocks = 2 * pages  # the default takes most of the memory, which each call clears
                outputs = oracle.generate_batch(
                    inputs=batch,
                    generation_config=generation,
                    continuous_batching_config=cache,
                    progress_bar=False,
                )
                return sum(len(output.generated_tokens) for output in outputs.values())
            ids_RT = torch.tensor(batch, device=oracle.device)
            out_RT = oracle.generate(ids_RT, attention_mask=torch.ones_like(ids_RT), generation_config=generation)
            return out_RT.numel() - ids_RT.numel()

    return run


def _thread_counts(device: torch.device) -> list[int]:
    """Return the thread counts to measure: on a CPU 1 and all, as the best depends on the batch; else the default."""
    threads = torch.get_num_threads()
    return sorted({1, threads}) if device.type == "cpu" else [threads]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prompts(vocab_size: int, count: int, length: int) -> Prompts:
    generator = random.Random(0)
    return [[generator.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]
