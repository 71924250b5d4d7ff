"""Measure an engine under requests about shared documents, of which a few are asked about far more often than the rest.

The documents have more tokens than the KV cache holds, so most prefixes are found again only where evicted blocks are
kept. Documents are chosen by Zipf's law: the n-th is asked about 1/n times as often as the first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from compiled_engine.bench.workloads import random_prompts
from compiled_engine.config import EngineConfig
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.params import SamplingParams

# Tokens of all documents, as a multiple of those that the KV cache holds.
MULTIPLE = 5
QUESTION_LEN, OUTPUT_LEN = 32, 16
PERCENTILES = (50, 99)


class Traffic(NamedTuple):
    """The prompts of all clients, the same for each engine that is compared."""

    prompts: Sequence[Sequence[int]]
    num_documents: int
    repeated: float  # share of the prompts' tokens that are of a document of an earlier prompt, 0 to 1


def longest_request(document_len: int) -> int:
    """Return the tokens of a request about a document, prompt and output together."""
    return document_len + QUESTION_LEN + OUTPUT_LEN


def make_traffic(llm: LLM, document_len: int, num_requests: int) -> Traffic:
    """Return prompts that each consist of a document and a question.

    All documents together have five times (MULTIPLE) as many tokens as the engine's KV cache holds; there is at least
    one.
    Raises ValueError if the KV cache does not hold a request.
    """
    num_slots = llm.metrics()["blocks_total"] * llm.config.cache.block_size
    if num_slots < (least := longest_request(document_len)):
        raise ValueError(f"the KV cache holds {num_slots} tokens; allowed: at least {least}, those of a request")
    generator = random.Random(llm.config.model.seed)
    num_documents = max(1, MULTIPLE * num_slots // document_len)
    documents = random_prompts(llm, generator, [document_len] * num_documents)
    weights = [1 / rank for rank in range(1, num_documents + 1)]
    chosen = generator.choices(range(num_documents), weights, k=num_requests)
    questions = random_prompts(llm, generator, [QUESTION_LEN] * num_requests)
    prompts = [documents[document] + question for document, question in zip(chosen, questions, strict=True)]
    num_repeated = num_requests - len({*chosen})
    return Traffic(prompts, num_documents, num_repeated * document_len / sum(map(len, prompts)))


def serve_traffic(llm: LLM, traffic: Traffic, num_clients: int, progress: Progress) -> dict[str, Any]:
    """Return figures of an engine that serves the traffic to `num_clients` clients, each with one request at a time.

    `hit_rate` has the shares of prompt tokens that the KV cache, host memory and files had, and their sum; `ttft_ms`
    the percentiles of the time from a request's arrival to its first token; then `requests_per_s` and `preemptions`.
    """
    before, begun = llm.metrics(), time.perf_counter()
    first_tokens = [*_first_tokens_ms(llm, traffic.prompts, num_clients, progress)]
    seconds = time.perf_counter() - begun
    counts = _difference(before, llm.metrics())
    return {
        "hit_rate": _hit_rate(llm.config, counts),
        "ttft_ms": {f"p{each}": float(np.percentile(first_tokens, each)) for each in PERCENTILES},
        "requests_per_s": len(traffic.prompts) / seconds,
        "preemptions": counts["preemptions"],
    }


def _first_tokens_ms(
    llm: LLM, prompts: Sequence[Sequence[int]], num_clients: int, progress: Progress
) -> Iterator[float]:
    """Yield the time from each request's arrival to its first token, in ms, in the order of first tokens."""
    core, waiting = llm.core, iter(enumerate(prompts))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    arrivals: dict[str, float] = {}  # of requests without a token
    num_running = 0
    with progress.stage("serve", total=len(prompts)) as advance:
        while True:
            for number, prompt in islice(waiting, num_clients - num_running):
                arrivals[request_id := f"traffic-{number}"] = time.perf_counter()
                core.add(EngineRequest(request_id, tuple(prompt), params))
                num_running += 1
            if not num_running:
                return
            for output in core.step():
                if output.new_token_ids and output.request_id in arrivals:
                    yield (time.perf_counter() - arrivals.pop(output.request_id)) * 1e3
                if output.finish_reason is not None:
                    num_running -= 1
                    advance(1)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    names = ("prefix_queries", "prefix_hits", "kv_offload_hits", "kv_offload_read", "preemptions")
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


def _hit_rate(config: EngineConfig, counts: Mapping[str, int]) -> dict[str, float]:
    of_files = counts["kv_offload_read"] * config.cache.block_size
    found = {
        "device": counts["prefix_hits"] - counts["kv_offload_hits"],
        "host": counts["kv_offload_hits"] - of_files,
        "files": of_files,
        "all": counts["prefix_hits"],
    }
    return {tier: tokens / counts["prefix_queries"] for tier, tokens in found.items()}
