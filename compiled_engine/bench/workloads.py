"""The workloads: what is sent through the public `generate` call, as random token ids, and how it is timed.

Every timed call gets prompts of its own, so that no prompt is in the prefix cache. Temperatures are 0, in throughput
0.6; an end-of-sequence token ends nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.params import SamplingParams

THROUGHPUT_TEMPERATURE = 0.6
# Prompts of the throughput workload hold token ids up to this one.
LARGEST_TOKEN_ID = 10_000
T = TypeVar("T")


@dataclass(frozen=True)
class Rounds:
    """How often to measure: `warm_up` rounds that do not count, then `repeats` that do; `seed` of prompts."""

    warm_up: int = 1
    repeats: int = 3
    seed: int = 0


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median, and the spread [least, most]."""
    return {"median": statistics.median(values), "spread": [min(values), max(values)]}


def random_prompts(llm: LLM, generator: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    vocab_size = llm.config.model.vocab_size
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generate_seconds(llm: LLM, prompts: list[list[int]], output_lens: Sequence[int], temperature: float = 0.0) -> float:
    """Seconds of one generate call."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in output_lens
    ]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def tpot_ms(llm: LLM, generator: random.Random, batch_size: int, prompt_len: int, output_len: int) -> float:
    """TPOT in ms: (time for output_len tokens - time for 1) / (output_len - 1), with as many prompts as the batch."""
    lengths = [prompt_len] * batch_size
    one = generate_seconds(llm, random_prompts(llm, generator, lengths), [1] * batch_size)
    many = generate_seconds(llm, random_prompts(llm, generator, lengths), [output_len] * batch_size)
    return (many - one) / (output_len - 1) * 1e3


def latency(
    llm: LLM, batch_sizes: Sequence[int], prompt_len: int, output_len: int, rounds: Rounds, progress: Progress
) -> list[dict[str, Any]]:
    """TPOT in ms of each batch size: [{"batch_size", "tpot_ms": {"median", "spread"}}]."""
    generator = random.Random(rounds.seed)

    def once() -> list[float]:
        return [tpot_ms(llm, generator, batch_size, prompt_len, output_len) for batch_size in batch_sizes]

    columns = zip(*repeated(once, rounds, progress), strict=True)
    return [
        {"batch_size": batch_size, "tpot_ms": summary(values)}
        for batch_size, values in zip(batch_sizes, columns, strict=True)
    ]


def throughput_lengths(num_requests: int, low: int, high: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths, uniform in [low, high].

    256 requests of 100 to 1024 tokens with seed 0 are workload T: 142,827 tokens in, 133,966 out.
    """
    generator = random.Random(seed)
    prompts = [
        [generator.randint(0, LARGEST_TOKEN_ID) for _ in range(generator.randint(low, high))]
        for _ in range(num_requests)
    ]
    return prompts, [generator.randint(low, high) for _ in range(num_requests)]


def throughput(llm: LLM, num_requests: int, low: int, high: int, rounds: Rounds, progress: Progress) -> dict[str, Any]:
    """Output tokens per second of requests of mixed lengths that are all there at the start.

    {"requests", "input_tokens", "output_tokens", "output_tokens_per_s": {"median", "spread"}}. A round of warm-up is
    eight short requests.
    """
    prompts, output_lens = throughput_lengths(num_requests, low, high, rounds.seed)
    vocab_size = llm.config.model.vocab_size
    generator = random.Random(rounds.seed + 1)
    for _ in range(rounds.warm_up):
        generate_seconds(llm, random_prompts(llm, generator, [low] * 8), [min(16, high)] * 8, THROUGHPUT_TEMPERATURE)

    def once() -> float:
        # Other ids of the same lengths each time, the first time those that were drawn.
        shift = generator.randrange(vocab_size) if rates else 0
        moved = [[(token + shift) % vocab_size for token in prompt] for prompt in prompts]
        rates.append(sum(output_lens) / generate_seconds(llm, moved, output_lens, THROUGHPUT_TEMPERATURE))
        return rates[-1]

    rates: list[float] = []
    repeated(once, Rounds(0, rounds.repeats), progress)
    return {
        "requests": num_requests,
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": sum(output_lens),
        "output_tokens_per_s": summary(rates),
    }


def prefill(llm: LLM, num_prompts: int, prompt_len: int, rounds: Rounds, progress: Progress) -> dict[str, Any]:
    """Prompt tokens per second from the call to the first token of all prompts.

    {"prompts", "prompt_len", "tokens_per_s": {"median", "spread"}}.
    """
    generator = random.Random(rounds.seed)

    def once() -> float:
        prompts = random_prompts(llm, generator, [prompt_len] * num_prompts)
        return num_prompts * prompt_len / generate_seconds(llm, prompts, [1] * num_prompts)

    rates = repeated(once, rounds, progress)
    return {"prompts": num_prompts, "prompt_len": prompt_len, "tokens_per_s": summary(rates)}


def repeated(once: Callable[[], T], rounds: Rounds, progress: Progress) -> list[T]:
    """The results of the measured rounds."""
    results = []
    with progress.stage("measure", total=rounds.warm_up + rounds.repeats) as advance:
        for _ in range(rounds.warm_up + rounds.repeats):
            results.append(once())
            advance(1)
    return results[rounds.warm_up :]
