"""What a row of the table measures, as numbers: each workload says what it needs, runs once, and knows its bound."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from compiled_engine.bench.bounds import (
    Job,
    ModelSizes,
    Rates,
    prefill_seconds,
    step_seconds,
    tpot_seconds,
    workload_seconds,
)
from compiled_engine.bench.engine_steps import PROMPTS_IN_FLIGHT, mixed_chunks, mixed_step_ms, outputs_needed
from compiled_engine.bench.workloads import generate_seconds, random_prompts, request_lengths, tpot_ms
from compiled_engine.llm import LLM

WARM_UP_TOKENS = 4
WARM_UP_REQUESTS = 8
LOWER, HIGHER = "lower", "higher"


class Needs(NamedTuple):
    """What a workload asks of an engine, in tokens and requests.

    longest: of a request, prompt and output. at_once: requests that must run side by side, and together: tokens of the
    KV cache that these take. in_a_step: tokens of a step.
    """

    longest: int
    at_once: int = 1
    together: int = 0
    in_a_step: int = 1


class Workload(Protocol):
    """A dataclass. better: which figures are, LOWER or HIGHER ones. what: in words."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    unit: ClassVar[str]
    better: ClassVar[str]

    def what(self) -> str: ...

    def needs(self) -> Needs: ...

    def warm_up(self, llm: LLM, generator: random.Random) -> None: ...

    def once(self, llm: LLM, generator: random.Random) -> float: ...

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        """The figure that no engine can be better than."""
        ...


@dataclass(frozen=True)
class TimePerToken:
    """(time for `output` tokens - time for 1) / (output - 1) of `batch` requests with prompts of `prompt` tokens."""

    batch: int
    prompt: int = 128
    output: int = 257
    unit: ClassVar[str] = "ms"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        return f"time per output token, {self.batch} x {self.prompt:,} tokens of context"

    def needs(self) -> Needs:
        longest = self.prompt + self.output
        return Needs(longest, self.batch, self.batch * longest)

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        prompts = random_prompts(llm, generator, [self.prompt] * self.batch)
        generate_seconds(llm, prompts, [WARM_UP_TOKENS] * self.batch)

    def once(self, llm: LLM, generator: random.Random) -> float:
        return tpot_ms(llm, generator, self.batch, self.prompt, self.output)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        return tpot_seconds(sizes, rates, self.batch, self.prompt, self.output) * 1e3


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens per second, from the call to the first token of every prompt."""

    prompts: int
    length: int
    unit: ClassVar[str] = "tok/s"
    better: ClassVar[str] = HIGHER

    def what(self) -> str:
        return f"prefill of {self.prompts} x {self.length:,} tokens"

    def needs(self) -> Needs:
        return Needs(self.length + 1)

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        self.once(llm, generator)

    def once(self, llm: LLM, generator: random.Random) -> float:
        prompts = random_prompts(llm, generator, [self.length] * self.prompts)
        return self.prompts * self.length / generate_seconds(llm, prompts, [1] * self.prompts)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        return self.prompts * self.length / prefill_seconds(sizes, rates, [self.length] * self.prompts)


@dataclass(frozen=True)
class Requests:
    """Output tokens per second of requests that are all there at the start.

    prompt, output: the least and the most tokens of each, uniform in between, drawn with `seed`. common: tokens that
    all prompts begin with, on top of their own. sampling: fields of `SamplingParams`. named: what() instead of numbers.
    """

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    common: int = 0
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    named: str = ""
    unit: ClassVar[str] = "output tok/s"
    better: ClassVar[str] = HIGHER

    def what(self) -> str:
        lengths = f"{_range(self.prompt)} + {_range(self.output)} tokens"
        common = f"{self.common:,} common + " if self.common else ""
        return self.named or f"{self.requests:,} request{'s' * (self.requests > 1)} of {common}{lengths}"

    def needs(self) -> Needs:
        return Needs(self.common + self.prompt[1] + self.output[1])

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        prompts = random_prompts(llm, generator, [self.prompt[0]] * WARM_UP_REQUESTS)
        generate_seconds(llm, prompts, [min(2 * WARM_UP_TOKENS, self.output[1])] * WARM_UP_REQUESTS, **self.sampling)

    def once(self, llm: LLM, generator: random.Random) -> float:
        own, output_lens = request_lengths(self.requests, self.prompt, self.output, self.seed)
        vocab_size = llm.config.model.vocab_size
        shift = generator.randrange(vocab_size)  # other ids of the same lengths each time
        (common,) = random_prompts(llm, generator, [self.common])
        prompts = [common + [(token + shift) % vocab_size for token in prompt] for prompt in own]
        generated = sum(output_lens) * self.sampling.get("n", 1)
        return generated / generate_seconds(llm, prompts, output_lens, **self.sampling)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        own, output_lens = request_lengths(self.requests, self.prompt, self.output, self.seed)
        completions = self.sampling.get("n", 1)
        jobs = [Job(len(prompt), [length] * completions) for prompt, length in zip(own, output_lens, strict=True)]
        seconds = workload_seconds(sizes, rates, jobs, max_num_seqs, self.common)
        return sum(output_lens) * completions / seconds


@dataclass(frozen=True)
class MixedStep:
    """A step in which `decodes` requests decode, with contexts of about `context` tokens, and a prompt of `prompt`
    tokens is computed: see `mixed_step_ms`."""

    decodes: int
    prompt: int
    context: int = 128
    steps: int = 16
    unit: ClassVar[str] = "ms"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        return f"mixed step, {self.decodes} decodes + {self.prompt:,} tokens"

    def needs(self) -> Needs:
        longest = self.context + outputs_needed(self.steps)
        together = self.decodes * longest + PROMPTS_IN_FLIGHT * (self.prompt + 1)
        most = max(longest, self.prompt + 1)
        return Needs(most, self.decodes + PROMPTS_IN_FLIGHT, together, self.decodes + self.prompt)

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        mixed_step_ms(llm, generator, self.decodes, self.context, self.prompt, WARM_UP_TOKENS)

    def once(self, llm: LLM, generator: random.Random) -> float:
        return mixed_step_ms(llm, generator, self.decodes, self.context, self.prompt, self.steps)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        return step_seconds(sizes, rates, mixed_chunks(self.decodes, self.context, self.prompt, self.steps)) * 1e3


@dataclass(frozen=True)
class Start:
    """Seconds from the start of a process to its first token; kind: cold or warm, see `start_up.measure`.

    No `Workload`: it needs a process of its own, and no engine; its bound, `start_up.torch_alone`, is measured too.
    """

    kind: str
    unit: ClassVar[str] = "s"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        return f"process start to first token, {self.kind}"


def _range(lengths: tuple[int, int]) -> str:
    least, most = lengths
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
