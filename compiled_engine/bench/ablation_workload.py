"""What an ablation measures, and the KV cache that it needs: the same for every variant."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from compiled_engine.bench.bounds import Chunk, ModelSizes, Rates, prefill_seconds, step_seconds, tpot_seconds
from compiled_engine.bench.engine_steps import (
    PROMPTS_IN_FLIGHT,
    STEP_SAMPLES,
    decode_kernels,
    decode_steps_ms,
    mixed_chunks,
    mixed_step_ms,
    outputs_needed,
)
from compiled_engine.bench.workloads import generate_seconds, random_prompts, tpot_ms
from compiled_engine.config import EngineConfig
from compiled_engine.llm import LLM

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class AblationWorkload:
    """Lengths in tokens.

    batch_sizes, prompt_len, output_len: of the time per output token. mixed_decodes, mixed_prompt_len: a mixed step is
    so many decodes and a prompt of that length; num_steps: mixed steps, and decode steps whose kernels are counted.
    prefill_prompts, prefill_len: of the prefill. seed: of all prompts.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 64, 256)
    prompt_len: int = 128
    output_len: int = 65
    mixed_decodes: int = 32
    mixed_prompt_len: int = 256
    num_steps: int = 16
    prefill_prompts: int = 8
    prefill_len: int = 4000
    seed: int = 0

    def requests_at_once(self) -> int:
        return max(*self.batch_sizes, self.mixed_decodes + PROMPTS_IN_FLIGHT, self.prefill_prompts)

    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        mixed = self.prompt_len + outputs_needed(STEP_SAMPLES * self.num_steps)
        return max(self.prompt_len + self.output_len, mixed, self.mixed_prompt_len + 1, self.prefill_len + 1)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that hold every part of the workload without preemption."""

        def blocks(num_requests: int, tokens: int) -> int:
            return num_requests * -(-tokens // block_size)

        mixed = blocks(self.mixed_decodes, self.prompt_len + outputs_needed(self.num_steps))
        return 1 + max(
            blocks(max(self.batch_sizes), self.prompt_len + self.output_len),
            blocks(max(self.batch_sizes), self.prompt_len + outputs_needed(STEP_SAMPLES * self.num_steps)),
            mixed + blocks(PROMPTS_IN_FLIGHT, self.mixed_prompt_len + 1),
            blocks(self.prefill_prompts, self.prefill_len + 1),
        )

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError naming the option that does not allow this workload."""
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
        """One repeat, after a short warm-up of each part: see `AblationWorkload.bound` for the keys."""
        generator = random.Random(self.seed)
        mixed = (self.mixed_decodes, self.prompt_len, self.mixed_prompt_len)
        for batch_size in self.batch_sizes:
            tpot_ms(llm, generator, batch_size, self.prompt_len, WARM_UP_TOKENS)
        tpots = {
            str(batch_size): tpot_ms(llm, generator, batch_size, self.prompt_len, self.output_len)
            for batch_size in self.batch_sizes
        }
        steps = {
            str(batch_size): decode_steps_ms(llm, generator, batch_size, self.prompt_len, self.num_steps)
            for batch_size in self.batch_sizes
        }
        mixed_step_ms(llm, generator, *mixed, WARM_UP_TOKENS)
        mixed_ms = mixed_step_ms(llm, generator, *mixed, self.num_steps)
        self._prefill_tokens_per_s(llm, generator)
        return {
            "tpot_ms": tpots,
            "step_ms": steps,
            "mixed_step_ms": mixed_ms,
            "prefill_tokens_per_s": self._prefill_tokens_per_s(llm, generator),
            "kernels": decode_kernels(llm, generator, self.prompt_len, self.num_steps),
        }

    def bound(self, sizes: ModelSizes, rates: Rates) -> dict[str, Any]:
        """The lower bounds of times, the upper bound of the rate: tpot_ms and step_ms by batch size, mixed_step_ms,
        prefill_tokens_per_s."""
        mixed = mixed_chunks(self.mixed_decodes, self.prompt_len, self.mixed_prompt_len, self.num_steps)
        prompts = [self.prefill_len] * self.prefill_prompts
        return {
            "tpot_ms": {
                str(batch_size): tpot_seconds(sizes, rates, batch_size, self.prompt_len, self.output_len) * 1e3
                for batch_size in self.batch_sizes
            },
            "step_ms": {
                str(batch_size): step_seconds(sizes, rates, [Chunk(self.prompt_len + self.num_steps, 1)] * batch_size)
                * 1e3
                for batch_size in self.batch_sizes
            },
            "mixed_step_ms": step_seconds(sizes, rates, mixed) * 1e3,
            "prefill_tokens_per_s": sum(prompts) / prefill_seconds(sizes, rates, prompts),
        }

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"batch_sizes": list(self.batch_sizes)}

    def _prefill_tokens_per_s(self, llm: LLM, generator: random.Random) -> float:
        prompts = random_prompts(llm, generator, [self.prefill_len] * self.prefill_prompts)
        return self.prefill_prompts * self.prefill_len / generate_seconds(llm, prompts, [1] * self.prefill_prompts)


def workload_from(record: dict[str, Any]) -> AblationWorkload:
    """The reverse of `as_record`."""
    return AblationWorkload(**record | {"batch_sizes": tuple(record["batch_sizes"])})
