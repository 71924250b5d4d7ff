"""Time per output token and throughput through the public `generate` call, with random token ids as prompts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

OUTPUT_LEN = 257


def latency(llm: LLM, batch_sizes: Sequence[int], prompt_len: int, repeats: int) -> list[dict[str, Any]]:
    """For each batch size, TPOT in ms: (time for 257 tokens - time for 1) / 256; median and spread of repeats."""
    generator = random.Random(0)
    results = []
    for batch_size in batch_sizes:
        tpots = []
        for repeat in range(repeats + 1):
            prompts = _prompts(llm, generator, [prompt_len] * batch_size)
            one = _seconds(llm, prompts, [1] * batch_size, temperature=0.0)
            many = _seconds(llm, prompts, [OUTPUT_LEN] * batch_size, temperature=0.0)
            if repeat:  # the first is warm-up
                tpots.append((many - one) / (OUTPUT_LEN - 1) * 1e3)
        results.append(
            {"batch_size": batch_size, "tpot_ms": statistics.median(tpots), "spread_ms": [min(tpots), max(tpots)]}
        )
    return results


def throughput(llm: LLM, num_requests: int, low: int, high: int, repeats: int) -> dict[str, Any]:
    """Output tokens per second of requests whose prompt and output lengths are uniform in [low, high], seed 0,
    temperature 0.6, end-of-sequence ignored: median and spread of repeats after a small warm-up."""
    generator = random.Random(0)
    _seconds(llm, _prompts(llm, generator, [low] * 8), [16] * 8, temperature=0.6)
    rates: list[float] = []
    input_lens = [generator.randint(low, high) for _ in range(num_requests)]
    output_lens = [generator.randint(low, high) for _ in range(num_requests)]
    for _ in range(repeats):
        prompts = _prompts(llm, generator, input_lens)
        rates.append(sum(output_lens) / _seconds(llm, prompts, output_lens, temperature=0.6))
    return {
        "requests": num_requests,
        "input_tokens": sum(input_lens),
        "output_tokens": sum(output_lens),
        "output_tokens_per_s": statistics.median(rates),
        "spread": [min(rates), max(rates)],
    }


def _prompts(llm: LLM, generator: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    vocab_size = llm.config.model.vocab_size
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _seconds(llm: LLM, prompts: list[list[int]], output_lens: Sequence[int], temperature: float) -> float:
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in output_lens
    ]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start
