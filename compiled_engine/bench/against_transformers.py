"""Tokens per second beside transformers on the same machine, model, prompts and token counts, in one run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.sampling.params import SamplingParams


def compare(
    model: Path | None, mode: str, num_requests: int, prompt_len: int, output_len: int, repeats: int
) -> dict[str, Any]:
    """Greedy generation without end-of-sequence: one request at a time against `generate`, and `num_requests` at
    once against transformers' continuous batching. Output tokens per second, medians of interleaved repeats.
    """
    path = model or BUNDLED_MODEL_PATH
    llm = LLM(path, mode=mode, progress=False, max_num_seqs=num_requests, enable_prefix_caching=False)
    device, dtype = llm.config.device, llm.config.model.dtype
    oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    oracle.to(device)
    prompts = _prompts(llm.config.model.vocab_size, num_requests, prompt_len)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    single, many = prompts[0], prompts

    def ours(batch: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def theirs_single() -> int:
        ids = torch.tensor([single], device=device)
        out = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
        )
        return out.shape[1] - ids.shape[1]

    def theirs_many() -> int:
        return _continuous_batching(oracle, many, output_len)

    contenders: dict[str, Callable[[], int]] = {
        "engine_single": lambda: ours([single]),
        "transformers_generate": theirs_single,
        "engine_batch": lambda: ours(many),
        "transformers_continuous_batching": theirs_many,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run()
            if repeat:  # the first round is warm-up
                rates[name].append(tokens / (time.perf_counter() - start))
    llm.close()
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "model": str(path.name),
        "mode": mode,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "requests": num_requests,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "tokens_per_s": median,
        "spread": {name: [min(values), max(values)] for name, values in rates.items()},
        "single_speedup": median["engine_single"] / median["transformers_generate"],
        "batch_speedup": median["engine_batch"] / median["transformers_continuous_batching"],
    }


def _continuous_batching(model: Any, prompts: list[list[int]], output_len: int) -> int:
    generation = GenerationConfig(
        max_new_tokens=output_len, min_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(),
        progress_bar=False,
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def _prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]
