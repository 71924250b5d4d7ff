"""Make random prompts of token ids, and time calls of the public `generate` with them.

Each timed call gets new prompts, so that none is in the prefix cache. End-of-sequence tokens are ignored.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# Largest token id in prompts of workload T.
LARGEST_TOKEN_ID = 10_000
# Whether lower or higher figures are better.
LOWER, HIGHER = "lower", "higher"


class Needs(NamedTuple):
    """The requirements of a workload on an engine, in tokens and requests."""

    longest: int  # tokens of the longest request, prompt and output
    at_once: int = 1  # requests that must run concurrently
    together: int = 0  # KV cache tokens that these take
    in_a_step: int = 1  # tokens of a step


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return {"median": the median of values, "spread": [min, max]}."""
    return {"median": statistics.median(values), "spread": [min(values), max(values)]}


def random_prompts(llm: LLM, generator: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    vocab_size = llm.config.model.vocab_size
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generate_seconds(llm: LLM, prompts: list[list[int]], output_lens: Sequence[int], **sampling: Any) -> float:
    """Return the seconds of one call of `generate`. sampling: fields of `SamplingParams`; greedy by default."""
    chosen = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
    params = [SamplingParams(max_tokens=length, **chosen) for length in output_lens]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def tpot_ms(llm: LLM, generator: random.Random, batch_size: int, prompt_len: int, output_len: int) -> float:
    """Return TPOT in ms: (time for output_len tokens - time for 1) / (output_len - 1), with batch_size prompts."""
    lengths = [prompt_len] * batch_size
    one = generate_seconds(llm, random_prompts(llm, generator, lengths), [1] * batch_size)
    many = generate_seconds(llm, random_prompts(llm, generator, lengths), [output_len] * batch_size)
    return (many - one) / (output_len - 1) * 1e3


def request_lengths(
    num_requests: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int], seed: int
) -> tuple[list[list[int]], list[int]]:
    """Return (random prompts, random output lengths) of num_requests requests.

    prompt_lens, output_lens: the least and the most tokens. Lengths are uniform between these. seed: of all that is
    random.

    256 requests of 100 to 1024 tokens with seed 0 are workload T: 142,827 tokens in, 133,966 out.
    """
    generator = random.Random(seed)
    prompts = [
        [generator.randint(0, LARGEST_TOKEN_ID) for _ in range(generator.randint(*prompt_lens))]
        for _ in range(num_requests)
    ]
    return prompts, [generator.randint(*output_lens) for _ in range(num_requests)]
