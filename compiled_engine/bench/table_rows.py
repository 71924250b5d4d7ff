"""Rows of the performance table, and their workloads.

A workload says what it requires of an engine, runs once per repeat, and has a bound for its figure.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

from compiled_engine.bench.bounds import (
    Job,
    ModelSizes,
    Rates,
    prefill_seconds,
    step_seconds,
    tpot_seconds,
    workload_seconds,
)
from compiled_engine.bench.drafts import LENGTH, SAID
from compiled_engine.bench.engine_steps import PROMPTS_IN_FLIGHT, mixed_chunks, mixed_step_ms, outputs_needed
from compiled_engine.bench.image_rows import FirstToken, RequestsWithImages
from compiled_engine.bench.workloads import (
    HIGHER,
    LOWER,
    Needs,
    generate_seconds,
    random_prompts,
    request_lengths,
    tpot_ms,
)
from compiled_engine.llm import LLM
from compiled_engine.resolve.speculation import DRAFT_MODEL, EAGLE3, NGRAM
from compiled_engine.schema import unknown_name_message

WARM_UP_TOKENS = 4
WARM_UP_REQUESTS = 8


class Workload(Protocol):
    """A workload, as a dataclass. `once` runs it and returns one figure in `unit`; `what` describes it in words."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    unit: ClassVar[str]
    better: ClassVar[str]  # LOWER or HIGHER

    def what(self) -> str: ...

    def needs(self, tokens_per_step: int) -> Needs:
        """Return what the workload requires of an engine whose steps yield up to `tokens_per_step` tokens a request."""
        ...

    def warm_up(self, llm: LLM, generator: random.Random) -> None: ...

    def once(self, llm: LLM, generator: random.Random) -> float: ...

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        """Return the best possible figure for this workload, which no engine can surpass."""
        ...


@dataclass(frozen=True)
class TimePerToken:
    """Measures (time for `output` tokens - time for 1) / (output - 1), with `batch` prompts of `prompt` tokens."""

    batch: int
    prompt: int = 128
    output: int = 257
    drafts: str | None = None  # the draft method; None for one token per step
    tokens: float = 1.0  # tokens per step and request
    unit: ClassVar[str] = "ms"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        said = "" if self.drafts is None else f", {SAID[self.drafts]}"
        return f"time per output token, {self.batch} x {self.prompt:,} tokens of context{said}"

    def needs(self, tokens_per_step: int) -> Needs:
        longest = self.prompt + self.output
        return Needs(longest, self.batch, self.batch * longest)

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        prompts = random_prompts(llm, generator, [self.prompt] * self.batch)
        generate_seconds(llm, prompts, [WARM_UP_TOKENS] * self.batch)

    def once(self, llm: LLM, generator: random.Random) -> float:
        return tpot_ms(llm, generator, self.batch, self.prompt, self.output)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        return tpot_seconds(sizes, rates, self.batch, self.prompt, self.output) * 1e3 / self.tokens


@dataclass(frozen=True)
class Prefill:
    """Measures prompt tokens per second, from the call of `generate` to the first token of every prompt."""

    prompts: int
    length: int
    unit: ClassVar[str] = "tok/s"
    better: ClassVar[str] = HIGHER

    def what(self) -> str:
        return f"prefill of {self.prompts} x {self.length:,} tokens"

    def needs(self, tokens_per_step: int) -> Needs:
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
    """Measures output tokens per second of requests that all arrive at the start."""

    requests: int
    prompt: tuple[int, int]  # prompt and output: least and most tokens, drawn uniformly with `seed`
    output: tuple[int, int]
    common: int = 0  # tokens that all prompts begin with, in addition to their own
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`
    named: str = ""  # description in place of numbers
    unit: ClassVar[str] = "output tok/s"
    better: ClassVar[str] = HIGHER

    def what(self) -> str:
        lengths = f"{_range(self.prompt)} + {_range(self.output)} tokens"
        common = f"{self.common:,} common + " if self.common else ""
        return self.named or f"{self.requests:,} request{'s' * (self.requests > 1)} of {common}{lengths}"

    def needs(self, tokens_per_step: int) -> Needs:
        return Needs(self.common + self.prompt[1] + self.output[1])

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        prompts = random_prompts(llm, generator, [self.prompt[0]] * WARM_UP_REQUESTS)
        generate_seconds(llm, prompts, [min(2 * WARM_UP_TOKENS, self.output[1])] * WARM_UP_REQUESTS, **self.sampling)

    def once(self, llm: LLM, generator: random.Random) -> float:
        own, output_lens = request_lengths(self.requests, self.prompt, self.output, self.seed)
        vocab_size = llm.config.model.vocab_size
        shift = generator.randrange(vocab_size)  # different ids with the same lengths each time
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
    """Measures a step with `decodes` decodes of about `context` tokens and a prefill of `prompt` tokens.

    See `mixed_step_ms`.
    """

    decodes: int
    prompt: int
    context: int = 128
    steps: int = 16
    unit: ClassVar[str] = "ms"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        return f"mixed step, {self.decodes} decodes + {self.prompt:,} tokens"

    def needs(self, tokens_per_step: int) -> Needs:
        longest = self.context + outputs_needed(self.steps, tokens_per_step)
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
    """A measurement of the seconds from process start to the first token.

    It is no `Workload`, since it needs fresh processes instead of an engine. Its bound, `start_up.torch_alone`, is
    measured too.
    """

    kind: str  # cold or warm, see `start_up.measure`
    unit: ClassVar[str] = "s"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        return f"process start to first token, {self.kind}"


def _range(lengths: tuple[int, int]) -> str:
    least, most = lengths
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


@dataclass(frozen=True)
class Limits:
    """Engine options of a table row that differ from the defaults. Rows with equal limits share an engine."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    drafts: str | None = None  # the draft method, see `drafts_of`; weights are then random


@dataclass(frozen=True)
class Subject:
    """A model on which rows of the table are measured."""

    prefix: str  # first part of its rows' ids
    shape: str | None  # None for a checkpoint
    title: str
    sees: bool = False  # prompts may have images


@dataclass(frozen=True)
class Row:
    """A row of the main table: a workload, measured on a model with these limits of requests and tokens."""

    id: str
    subject: Subject
    limits: Limits
    workload: Workload | Start
    # name of the plot that the row is a point of, and its x value; measured only on request
    curve: tuple[str, int] | None = None


SMALL_SHAPE = Subject("0.6b", "qwen3-0.6b", "Qwen3-0.6B")
LARGE_SHAPE = Subject("8b", "qwen3-8b", "Qwen3-8B")
VISION_SHAPE = Subject("vl-8b", "qwen3-vl-8b", "Qwen3-VL-8B", sees=True)
BUNDLED = Subject("bundled", None, "bundled model")
OWN = Subject("model", None, "model")

Declared = Mapping[str, tuple[Limits, Workload | Start]]
SERVING, LONG = Limits(4096), Limits(32_768)
T = {"temperature": 0.6}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
LENGTHS_OF_T = ((100, 1024), (100, 1024))

ON_A_GPU: Declared = {
    "tpot-1": (SERVING, TimePerToken(1)),
    "tpot-8": (SERVING, TimePerToken(8)),
    "tpot-64": (SERVING, TimePerToken(64)),
    "T": (SERVING, Requests(256, *LENGTHS_OF_T, sampling=T, named="workload T")),
    "T128": (SERVING, Requests(128, *LENGTHS_OF_T, seed=1, sampling=T, named="128 requests of T")),
    "T128-penalties": (
        SERVING,
        Requests(128, *LENGTHS_OF_T, seed=1, sampling=T | PENALTIES, named="128 requests of T, penalties"),
    ),
    "T128-logprobs": (
        SERVING,
        Requests(128, *LENGTHS_OF_T, seed=1, sampling=T | {"logprobs": 5}, named="128 requests of T, logprobs=5"),
    ),
    "T64-n4": (
        SERVING,
        Requests(64, *LENGTHS_OF_T, seed=2, sampling=T | {"n": 4, "seed": 7}, named="64 requests of T, n=4, seeded"),
    ),
    "short": (SERVING, Requests(4000, (32, 32), (32, 32), sampling=T)),
    "shared-prefix": (SERVING, Requests(256, (50, 50), (64, 64), common=3000, sampling=T)),
    "prefill-8x4000": (SERVING, Prefill(8, 4000)),
    "mixed-8+64": (SERVING, MixedStep(8, 64)),
    "mixed-32+256": (SERVING, MixedStep(32, 256)),
    "mixed-128+256": (SERVING, MixedStep(128, 256)),
    "mixed-32+1024": (SERVING, MixedStep(32, 1024)),
    "mixed-64+4000": (SERVING, MixedStep(64, 4000)),
    "prefill-1x32000": (LONG, Prefill(1, 32_000)),
    "tpot-1x32000": (LONG, TimePerToken(1, 32_000)),
    "tpot-16x16000": (LONG, TimePerToken(16, 16_000)),
    "start-cold": (SERVING, Start("cold")),
    "start-warm": (SERVING, Start("warm")),
}
OF_THE_LARGE_SHAPE = (
    *("tpot-1", "tpot-8", "tpot-64", "T", "prefill-8x4000"),
    *("mixed-8+64", "mixed-32+256", "mixed-128+256", "mixed-32+1024", "mixed-64+4000"),
)
ANY = Limits()
ON_A_CPU: Declared = {
    "tpot-1": (ANY, TimePerToken(1, 16, 33)),
    "tpot-8": (ANY, TimePerToken(8, 16, 33)),
    "T": (ANY, Requests(32, (16, 64), (16, 64), sampling=T, named="32 requests of 16 to 64 + 16 to 64 tokens")),
    "T-penalties": (ANY, Requests(16, (16, 64), (16, 64), sampling=T | PENALTIES, named="16 of them, penalties")),
    "T-logprobs": (ANY, Requests(16, (16, 64), (16, 64), sampling=T | {"logprobs": 5}, named="16 of them, logprobs=5")),
    "T-n4": (ANY, Requests(8, (16, 64), (16, 64), sampling=T | {"n": 4, "seed": 7}, named="8 of them, n=4, seeded")),
    "short": (ANY, Requests(64, (8, 8), (8, 8), sampling=T)),
    "shared-prefix": (ANY, Requests(16, (10, 10), (16, 16), common=200, sampling=T)),
    "prefill-2x500": (ANY, Prefill(2, 500)),
    "mixed-4+32": (ANY, MixedStep(4, 32, context=16, steps=8)),
    "start-cold": (ANY, Start("cold")),
    "start-warm": (ANY, Start("warm")),
}


def _with_drafts(limits: Limits, output: int, prompt: int, methods: Sequence[str], batches: Sequence[int]) -> Declared:
    return {
        f"tpot-{batch}-{method}": (
            replace(limits, drafts=method),
            TimePerToken(batch, prompt, output, method, 1.0 if method == NGRAM else LENGTH),
        )
        for method in methods
        for batch in batches
    }


# Measured only if selected.
WITH_IMAGES: Declared = {
    "image": (SERVING, FirstToken(1, 1024)),
    "image-8": (Limits(16_384), FirstToken(8, 1024)),
    "T64-images": (SERVING, RequestsWithImages(64, *LENGTHS_OF_T, side=512, seed=2, sampling=T)),
    "tpot-1": ON_A_GPU["tpot-1"],
    "tpot-64": ON_A_GPU["tpot-64"],
}
DRAFTS_OF_SMALL = _with_drafts(SERVING, 257, 128, (NGRAM, EAGLE3), (1, 8, 64))
DRAFTS_OF_LARGE = _with_drafts(SERVING, 257, 128, (NGRAM, DRAFT_MODEL, EAGLE3), (1, 8, 64))
DRAFTS_ON_A_CPU = _with_drafts(ANY, 33, 16, (NGRAM, EAGLE3), (1, 8))

BY_BATCH, BY_CONTEXT, BY_QUEUE = "batch", "context", "queue"
WIDE = Limits(4096, 512)
# Concurrent requests in the curve of time per token over context.
CONTEXT_BATCH = 8


def _curves(on_gpu: bool) -> list[tuple[str, int, Limits, Workload]]:
    """Return (plot name, x value, limits, workload) of each point of the curves."""
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if on_gpu else (1, 2, 4, 8, 16)
    contexts = (128, 512, 2048, 8192, 32_000) if on_gpu else (16, 64, 256, 1024)
    queues = (1, 10, 100, 1000, 10_000) if on_gpu else (1, 10, 100)
    wide, long, output = (WIDE, LONG, 129) if on_gpu else (ANY, ANY, 17)
    each = 32 if on_gpu else 8
    return [
        *((BY_BATCH, size, wide, TimePerToken(size, contexts[0], output)) for size in batches),
        *((BY_CONTEXT, size, long, TimePerToken(CONTEXT_BATCH, size, output)) for size in contexts),
        *((BY_QUEUE, size, wide, Requests(size, (each, each), (each, each), sampling=T)) for size in queues),
    ]


def rows_of(subject: Subject, declared: Declared, *, on_gpu: bool) -> list[Row]:
    """Return the rows of a model, with the points of its curves last. declared: (limits, workload) by name of the row.

    on_gpu: the curves' points are those for a GPU, otherwise those for a CPU.
    """
    rows = [Row(f"{subject.prefix}-{name}", subject, *what) for name, what in declared.items()]
    return rows + [
        Row(f"curve-{subject.prefix}-{curve}-{place}", subject, limits, workload, (curve, place))
        for curve, place, limits, workload in _curves(on_gpu)
    ]


def known_rows(*, on_gpu: bool, own_model: bool) -> tuple[list[Row], list[Row]]:
    """Return (all rows that can be selected, the rows that are measured by default).

    own_model: the user has named a model, so all rows are for this model.
    """
    if own_model:
        rows = default = rows_of(OWN, ON_A_GPU if on_gpu else ON_A_CPU, on_gpu=on_gpu)
    else:
        large = {name: ON_A_GPU[name] for name in OF_THE_LARGE_SHAPE}
        shapes = rows_of(SMALL_SHAPE, ON_A_GPU, on_gpu=True) + rows_of(LARGE_SHAPE, large, on_gpu=True)
        bundled = rows_of(BUNDLED, ON_A_CPU, on_gpu=False)
        default = shapes if on_gpu else bundled
        drafting = {SMALL_SHAPE: DRAFTS_OF_SMALL, LARGE_SHAPE: DRAFTS_OF_LARGE, BUNDLED: DRAFTS_ON_A_CPU}
        rows = shapes + bundled
        rows += [Row(f"{VISION_SHAPE.prefix}-{name}", VISION_SHAPE, *what) for name, what in WITH_IMAGES.items()]
        rows += [
            Row(f"{one.prefix}-{name}", one, *what) for one, those in drafting.items() for name, what in those.items()
        ]
    return rows, default


def chosen(known: Sequence[Row], default: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Return the rows whose ids match a pattern (*, ? and [...] as in a shell), in the order of the patterns.

    default: the default rows of the device. A pattern that matches a default row selects default rows only; any other
    pattern selects from all rows, `known`. Raises ValueError with the most similar id for a pattern without matches.
    """
    found: dict[str, Row] = {}
    for pattern in patterns:
        matching = _matching(default, pattern) or _matching(known, pattern)
        if not matching:
            ids = [row.id for row in known]
            raise ValueError(unknown_name_message("there is no row", pattern, ids) + " (--list shows all)")
        found |= {row.id: row for row in matching}
    return list(found.values())


def _matching(rows: Sequence[Row], pattern: str) -> list[Row]:
    return [row for row in rows if fnmatchcase(row.id, pattern)]
