"""Workloads that a worker process measures, for an ablation and for the comparison of the engine with its server.

They are sent to the worker as JSON. The workload on a text is in text_workload.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compiled_engine.bench.bounds import Chunk, ModelSizes, Rates, step_seconds
from compiled_engine.bench.engine_steps import (
    PROMPTS_IN_FLIGHT,
    STEP_SAMPLES,
    decode_kernels,
    decode_steps_ms,
    mixed_step_ms,
    outputs_needed,
)
from compiled_engine.bench.image_rows import FirstToken
from compiled_engine.bench.results import model_record, provenance
from compiled_engine.bench.table_rows import WARM_UP_TOKENS, MixedStep, Prefill, TimePerToken
from compiled_engine.bench.text_workload import TextWorkload
from compiled_engine.bench.workloads import LARGEST_TOKEN_ID, generate_seconds, request_lengths, tpot_ms
from compiled_engine.config import EngineConfig
from compiled_engine.llm import LLM

# Number of measured mixed steps in an HTTP workload.
STEPS = 16


@dataclass(frozen=True)
class AblationWorkload:
    """The workload of an ablation, with lengths in tokens."""

    # batch_sizes, prompt_len and output_len: for the time per output token
    batch_sizes: tuple[int, ...] = (1, 8, 64, 256)
    prompt_len: int = 128
    output_len: int = 65
    mixed_decodes: int = 32  # mixed_decodes and mixed_prompt_len: decodes and prefill of a mixed step
    mixed_prompt_len: int = 256
    num_steps: int = 16  # mixed steps, and decode steps with counted kernels
    prefill_prompts: int = 8  # prefill_prompts and prefill_len: for the prefill rate
    prefill_len: int = 4000
    # The image of a prompt: pixels on a side, 0 for engines that read no images, and the image's tokens.
    image_side: int = 0
    image_len: int = 0
    seed: int = 0
    max_new_tokens_per_step: int = 1  # per request, the largest of any variant

    def requests_at_once(self) -> int:
        return max(*self.batch_sizes, self.mixed_decodes + PROMPTS_IN_FLIGHT, self.prefill_prompts)

    def longest(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        mixed = self.prompt_len + outputs_needed(STEP_SAMPLES * self.num_steps, self.max_new_tokens_per_step)
        of_image = self._with_image().text + self.image_len + 1
        return max(self.prompt_len + self.output_len, mixed, self.mixed_prompt_len + 1, self.prefill_len + 1, of_image)

    def num_blocks(self, block_size: int) -> int:
        """Return the number of KV cache blocks with which each part of the workload runs without preemption."""

        def blocks(num_requests: int, tokens: int) -> int:
            return num_requests * -(-tokens // block_size)

        of_mixed, of_steps = (
            outputs_needed(num_steps, self.max_new_tokens_per_step)
            for num_steps in (self.num_steps, STEP_SAMPLES * self.num_steps)
        )
        mixed = blocks(self.mixed_decodes, self.prompt_len + of_mixed)
        return 1 + max(
            blocks(max(self.batch_sizes), self.prompt_len + self.output_len),
            blocks(max(self.batch_sizes), self.prompt_len + of_steps),
            mixed + blocks(PROMPTS_IN_FLIGHT, self.mixed_prompt_len + 1),
            blocks(self.prefill_prompts, self.prefill_len + 1),
            blocks(1, self._with_image().text + self.image_len + 1),
        )

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError, naming the option, if the configuration does not allow this workload."""
        scheduler = config.scheduler
        mixed = self.mixed_decodes + self.mixed_prompt_len
        blocks = self.num_blocks(config.cache.block_size)
        given = config.cache.num_blocks
        if scheduler.max_num_seqs < self.requests_at_once():
            raise ValueError(f"max_num_seqs is {scheduler.max_num_seqs}; allowed: at least {self.requests_at_once()}")
        if scheduler.max_model_len < self.longest():
            raise ValueError(
                f"max_model_len is {scheduler.max_model_len}; allowed: at least {self.longest()}, the longest request"
            )
        if scheduler.max_num_batched_tokens < mixed:
            raise ValueError(
                f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}; allowed: at least {mixed}, a mixed step"
            )
        if given is not None and given < blocks:
            raise ValueError(f"num_blocks is {given}; allowed: at least {blocks} of {config.cache.block_size} tokens")

    def measure(self, llm: LLM) -> dict[str, Any]:
        """Return the figures of one repeat of each part, measured after a short warm-up.

        The keys are those of `bound`, kernels (the number of kernels in a decode step) and image_ms (the time to the
        first token of a prompt with an image, or None for an engine that reads no images).
        """
        generator = random.Random(self.seed)
        mixed, prefill = self._mixed(), self._prefill()
        for batch_size in self.batch_sizes:
            tpot_ms(llm, generator, batch_size, self.prompt_len, WARM_UP_TOKENS)
        tpots = {str(tpot.batch): tpot.once(llm, generator) for tpot in self._tpots()}
        steps = {
            str(batch_size): decode_steps_ms(llm, generator, batch_size, self.prompt_len, self.num_steps)
            for batch_size in self.batch_sizes
        }
        mixed.warm_up(llm, generator)
        mixed_ms = mixed.once(llm, generator)
        prefill.warm_up(llm, generator)
        return {
            "tpot_ms": tpots,
            "step_ms": steps,
            "mixed_step_ms": mixed_ms,
            "prefill_tokens_per_s": prefill.once(llm, generator),
            "kernels": decode_kernels(llm, generator, self.prompt_len, self.num_steps),
            "image_ms": self._image_ms(llm, generator),
        }

    def bound(self, sizes: ModelSizes, rates: Rates) -> dict[str, Any]:
        """Return lower bounds of the times, and the upper bound of the prefill rate.

        The keys are tpot_ms and step_ms (by batch size), mixed_step_ms and prefill_tokens_per_s.
        """
        most = self.requests_at_once()
        step = Chunk(self.prompt_len + self.num_steps, 1)
        return {
            "tpot_ms": {str(tpot.batch): tpot.bound(sizes, rates, most) for tpot in self._tpots()},
            "step_ms": {str(size): step_seconds(sizes, rates, [step] * size) * 1e3 for size in self.batch_sizes},
            "mixed_step_ms": self._mixed().bound(sizes, rates, most),
            "prefill_tokens_per_s": self._prefill().bound(sizes, rates, most),
        }

    def _tpots(self) -> list[TimePerToken]:
        return [TimePerToken(batch_size, self.prompt_len, self.output_len) for batch_size in self.batch_sizes]

    def _mixed(self) -> MixedStep:
        return MixedStep(self.mixed_decodes, self.mixed_prompt_len, self.prompt_len, self.num_steps)

    def _prefill(self) -> Prefill:
        return Prefill(self.prefill_prompts, self.prefill_len)

    def _image_ms(self, llm: LLM, generator: random.Random) -> float | None:
        if not self.image_side or llm.config.images is None:
            return None
        self._with_image().warm_up(llm, generator)
        return self._with_image().once(llm, generator)

    def _with_image(self) -> FirstToken:
        return FirstToken(1, self.image_side)

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"batch_sizes": list(self.batch_sizes)}

    def task(self) -> dict[str, Any]:
        """Return the workload as JSON for a worker."""
        return {"kind": "ablation", "fields": self.as_record()}


@dataclass(frozen=True)
class HttpWorkload:
    """Requests that all arrive at the start. Prompts, and outputs, have `least` to `most` tokens each."""

    num_requests: int
    least: int
    most: int
    vocab_size: int  # upper bound of token ids, exclusive
    temperature: float
    mixed_decodes: int  # mixed_*: a mixed step as in the table, to which the time between tokens is compared
    mixed_context: int
    mixed_prompt: int
    seed: int = 0

    def requests(self, shift: int) -> tuple[list[list[int]], list[int]]:
        """Return (the token ids of each prompt, the output length of each request).

        Another `shift` gives other token ids with the same lengths, so that prompts are not in the prefix cache.
        """
        bounds = (self.least, self.most)
        prompts, lengths = request_lengths(self.num_requests, bounds, bounds, self.seed)
        return [[(token + shift) % self.vocab_size for token in prompt] for prompt in prompts], lengths

    def task(self, repeats: int) -> dict[str, Any]:
        """Return the workload as JSON for a worker."""
        return {"kind": "http", "fields": asdict(self), "repeats": repeats}

    def measure(self, llm: LLM, repeats: int) -> dict[str, Any]:
        """Return output_throughput, mixed_step_ms, model, date, machine and versions, by name.

        output_throughput has the output tokens per second of each repeat, after a warm-up.
        """
        generator = random.Random(self.seed)
        rates = []
        for _ in range(repeats + 1):
            prompts, lengths = self.requests(generator.randrange(self.vocab_size))
            seconds = generate_seconds(llm, prompts, lengths, temperature=self.temperature, detokenize=True)
            rates.append(sum(lengths) / seconds)
        mixed = (self.mixed_decodes, self.mixed_context, self.mixed_prompt, STEPS)
        mixed_step_ms(llm, generator, *mixed)
        return {
            "output_throughput": rates[1:],
            "mixed_step_ms": mixed_step_ms(llm, generator, *mixed),
            "model": model_record(llm.config, None),
            **provenance(llm.config.device),
        }


# Workload T of the table, and the mixed step of 32 decodes and 1,024 tokens.
ON_GPU = HttpWorkload(256, 100, 1024, LARGEST_TOKEN_ID + 1, 0.6, 32, 128, 1024)
# For the bundled model on a CPU.
ON_CPU = HttpWorkload(32, 16, 64, 4096, 0.6, 8, 32, 64)


def measure(task: Mapping[str, Any], llm: LLM) -> dict[str, Any]:
    """Measure a workload with this engine, and return its figures. task: result of the workload's method `task`."""
    if task["kind"] == "http":
        return HttpWorkload(**task["fields"]).measure(llm, task["repeats"])
    if task["kind"] == "text":
        return TextWorkload(**task["fields"]).measure(llm)
    return ablation_workload(task["fields"]).measure(llm)


def ablation_workload(record: Mapping[str, Any]) -> AblationWorkload:
    """Return the workload whose method `as_record` returned `record`."""
    return AblationWorkload(**{**record, "batch_sizes": tuple(record["batch_sizes"])})
