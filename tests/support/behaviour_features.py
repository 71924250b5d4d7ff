"""Engines with one feature each, and requests that use it: what comes out, and what scheduler and runner say of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from adapter_folders import make_adapter
from checkpoints import make_checkpoint
from encoder_folders import make_encoder
from families import family, write_checkpoint
from message_record import MessageDigests, recorded_messages
from pooling_folders import make_classifier, make_embedder
from scripted_drafts import AnyLength
from small_engines import CHUNKED
from step_trace import recorded_graphs, steady_step

from compiled_engine import LLM, LoRARequest, SamplingParams
from compiled_engine.features import registry
from compiled_engine.models.bundled import BUNDLED_HEAD_PATH, BUNDLED_MODEL_PATH

# Few blocks, so that requests are preempted.
OPTIONS = CHUNKED | {"num_blocks": 36}
TEXTS = (
    "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2",
    "def parse(",
    "import os\nimport sys\n\n\ndef main(arguments):\n    ",
    "class Stack:\n    def __init__(self, items=None):\n        self.items = ",
    "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7,",
    "for",
    "import os\nimport sys\n\n\ndef other(",
)
# Of what a request may ask for, which is the core's.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 30},
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 9, "stop": ["\n\n"]},
    {"temperature": 0.9, "seed": 5, "n": 2, "logit_bias": {300: 2.0}},
    {"temperature": 0.6, "seed": 8, "logprobs": 0, "bad_words": ["self"], "min_p": 0.02},
)
GRAMMARS: tuple[dict[str, Any] | None, ...] = (
    {"regex": "[a-z]{3}(, [a-z]{2}){2}"},
    None,
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
)
# Numbers of metrics that are the same in every run.
METRICS = (
    "finished",
    "aborted",
    "steps",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "captures",
    "graph_fallbacks",
)
METRICS_OF_DRAFTS = ("drafted_requests", "draft_tokens", "accepted_tokens", "accepted_by_position", "rested")
METRICS_OF_GRAPHS = ("graph_replays_by_key", "graph_fallbacks_by_reason", "graph_padded_tokens", "batch_histogram")


@dataclass(frozen=True)
class Feature:
    """A feature for the record: the options of an engine with it, and requests that use it."""

    # Writes what the engine needs into an empty folder, and returns the engine's options, `model` among them.
    prepare: Callable[[Path], dict[str, Any]]
    run: Callable[[LLM, Path], Any] = field(default_factory=lambda: generated)  # returns the results of requests
    arguments: Callable[[Path], dict[str, Any]] = lambda folder: {}  # of generate, for the steady step
    begin: Callable[[LLM], Any] = lambda llm: None  # called before the first run
    chosen: bool = False  # the number of drafts is drawn at random instead of by time
    ways: tuple[str, ...] = ("eager", "graphs", "compiled")  # keys of WAYS, for a CPU
    # The steady step of two requests is counted: not with pooling, nor in a pipeline, which has other steps in between.
    traced: bool = True
    on_gpu: bool = True


def generated(llm: LLM, folder: Path, **more: Any) -> Any:
    """Return texts and log-probabilities of requests with every kind of sampling."""
    return outputs_of(llm, [dict(SAMPLING[number % len(SAMPLING)]) for number in range(len(TEXTS))], **more)


def outputs_of(llm: LLM, sampling: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    params = [SamplingParams(max_tokens=14 + 2 * number, **each) for number, each in enumerate(sampling)]
    outputs = llm.generate(list(TEXTS), params, use_tqdm=False, **more)
    return [
        [list(each.token_ids), each.finish_reason, each.stop_reason, rounded(each.logprobs)]
        for output in outputs
        for each in output.outputs
    ] + [rounded(output.prompt_logprobs) for output in outputs]


def rounded(entries: Any) -> list[dict[str, float]]:
    return [{str(key): round(one.logprob, 4) for key, one in (entry or {}).items()} for entry in entries or ()]


def prompt_logprobs(llm: LLM, folder: Path) -> Any:
    """Return the results of requests, some of which ask for prompt log-probabilities."""
    sampling = [SAMPLING[number % 2] | {"prompt_logprobs": (None, 0, 2)[number % 3]} for number in range(len(TEXTS))]
    return outputs_of(llm, sampling)


def constrained(llm: LLM, folder: Path) -> Any:
    """Return the results of requests with and without grammars."""
    given = [GRAMMARS[number % len(GRAMMARS)] for number in range(len(TEXTS))]
    sampling = [SAMPLING[1] | ({} if one is None else {"structured_outputs": one}) for one in given]
    return outputs_of(llm, sampling)


def compile_grammars(llm: LLM) -> None:
    """Compile the grammars one after the other; otherwise their times would decide which request begins first."""
    for one in filter(None, GRAMMARS):
        llm.generate(TEXTS[0], SamplingParams(max_tokens=1, structured_outputs=one), use_tqdm=False)


def adapters_of(folder: Path) -> list[LoRARequest | None]:
    """Return for each text one of three adapters, or none; the engine has two slots."""
    made = [LoRARequest(f"adapter {number}", number, folder / str(number)) for number in (1, 2, 3)]
    return [[None, *made][(number * 3) % 4] for number in range(len(TEXTS))]


def with_adapters(folder: Path) -> dict[str, Any]:
    model = make_checkpoint(folder / "model", "qwen3", num_hidden_layers=2, tie_word_embeddings=True, vocab_size=4096)
    for number, targets in enumerate((("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("o_proj", "lm_head")), 1):
        make_adapter(folder / str(number), model, 2 * number, targets=targets, seed=number)
    loras = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 3}
    return {"model": folder / "model", "tokenizer": BUNDLED_MODEL_PATH, **loras}


def embedded(llm: LLM, folder: Path) -> Any:
    """Return the embeddings of texts, to four digits."""
    return [vector(each.outputs.embedding) for each in llm.embed(list(TEXTS), use_tqdm=False)]


def embedded_by_token(llm: LLM, folder: Path) -> Any:
    """Return the embeddings of texts, and of each token of a text."""
    by_token = llm.encode(list(TEXTS[:3]), pooling_task="token_embed", use_tqdm=False)
    return embedded(llm, folder) + [vector(each.outputs.data) for each in by_token]


def classified(llm: LLM, folder: Path) -> Any:
    return [vector(each.outputs.probs) for each in llm.classify(list(TEXTS), use_tqdm=False)]


def vector(values: Any) -> list[float]:
    found = torch.as_tensor(values, dtype=torch.float32).flatten().tolist()
    return [0.0 if math.isclose(each, 0, abs_tol=5e-5) else round(each, 4) for each in found]


def in_folder(make: Callable[..., Any], **given: Any) -> Callable[[Path], dict[str, Any]]:
    """Return a `prepare` function that writes a model with its tokenizer into a folder by calling `make`."""

    def prepare(folder: Path) -> dict[str, Any]:
        make(folder, **given)
        encodes = make is make_encoder
        return {"model": folder, "max_num_batched_tokens": 96} | ({"num_blocks": None} if encodes else {})

    return prepare


def with_recurrences(folder: Path) -> dict[str, Any]:
    write_checkpoint(folder, family("qwen3_5_text"))
    return {"model": folder, "skip_tokenizer_init": True, "max_model_len": 200, "num_blocks": 160}


def recurrent(llm: LLM, folder: Path) -> Any:
    """Return the results of prompts that part at several places, so that snapshots of states are taken and found."""
    shared = [(7 * place) % 60 for place in range(160)]
    prompts = [{"prompt_token_ids": shared[: 40 * (number % 5)] + [number] * 9} for number in range(9)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(each.outputs[0].token_ids), rounded(each.outputs[0].logprobs)] for each in outputs]


def bundled(**options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model": BUNDLED_MODEL_PATH, **options}


def drafts(**config: Any) -> Callable[[Path], dict[str, Any]]:
    return bundled(speculative_config={"num_speculative_tokens": 3, **config})


POOLED: dict[str, Any] = {"ways": ("eager", "compiled"), "traced": False}
STAGES: dict[str, Any] = {"ways": ("compiled",), "traced": False, "on_gpu": False}
HEAD = {"method": "eagle3", "model": str(BUNDLED_HEAD_PATH)}
FEATURES: dict[str, Feature] = {
    "no feature": Feature(bundled()),
    "prompt log-probabilities": Feature(bundled(), prompt_logprobs),
    "grammars": Feature(bundled(), constrained, begin=compile_grammars),
    "n-grams": Feature(drafts(method="ngram"), ways=("eager", "compiled")),
    "draft model": Feature(drafts(method="draft_model", model=str(BUNDLED_MODEL_PATH), num_speculative_tokens=2)),
    "head": Feature(drafts(**HEAD, draft_sharpness=1.5)),
    "head that rests": Feature(drafts(**HEAD, enable_adaptive_verification=True), chosen=True),
    "adapters": Feature(
        with_adapters,
        lambda llm, folder: generated(llm, folder, lora_request=adapters_of(folder)),
        lambda folder: {"lora_request": adapters_of(folder)[1:3]},
        ways=("compiled", "compiled, graphs"),
    ),
    "recurrences": Feature(with_recurrences, recurrent),
    "embeddings": Feature(in_folder(make_embedder, kinds=("lasttoken",)), embedded_by_token, **POOLED),
    "classes": Feature(in_folder(make_classifier), classified, **POOLED),
    "encoder": Feature(in_folder(make_encoder, kinds=("cls",)), embedded, **POOLED),
    "two stages": Feature(bundled(pipeline_parallel_size=2), generated, **STAGES),
    "two stages, grammars and prompt log-probabilities": Feature(
        bundled(pipeline_parallel_size=2),
        lambda llm, folder: [constrained(llm, folder), prompt_logprobs(llm, folder)],
        begin=compile_grammars,
        **STAGES,
    ),
}
# How an engine computes. graphs: its steps are graphs of recorded work, as those of a GPU are graphs.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "graphs": {"mode": "eager"},
    "compiled": {},
    "compiled, graphs": {},
    "cuda": {"device": "cuda", "block_size": 16, "num_blocks": 12},
}
QUICK = ("eager", "graphs")


def record_feature(name: str, way: str, folder: Path, cache_dir: Path) -> dict[str, Any]:
    """Return a record of an engine with the feature: outputs, messages, metrics and the costs of a step.

    The same requests come twice, the second time to cached prefixes. folder: empty, or prepared before.
    """
    feature = FEATURES[name]
    options = OPTIONS | feature.prepare(folder) | WAYS[way]
    if "mode" not in WAYS[way]:
        options["cache_dir"] = cache_dir
    digests = MessageDigests()
    with _started(feature, way), LLM(**options) as llm:
        feature.begin(llm)
        before = llm.metrics()
        with recorded_messages(digests):
            outputs = [feature.run(llm, folder) for _ in range(2)]
        llm.core.check_integrity()
        after = llm.metrics()
        found = {"outputs": outputs, "messages": digests.found(), "metrics": dict(_gained(before, after))}
        if feature.traced:
            trace = steady_step(llm, **feature.arguments(folder))
            found |= {"a step": trace.figures(), "ops of a step": dict(sorted(trace.ops.items()))}
        if way == "cuda":
            found["kernels"] = kernels(lambda: feature.run(llm, folder))
    return found


def kernels(work: Callable[[], Any]) -> dict[str, int]:
    """Return how often each kernel runs during `work`, and each CUDA call that launches kernels, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    counted = Counter(
        event.name
        for event in profile.events()
        if event.device_type == on_device or event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))
    )
    return dict(sorted(counted.items()))


@contextmanager
def _started(feature: Feature, way: str) -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(recorded_graphs() if "graphs" in way else nullcontext())
        if feature.chosen:
            patches.enter_context(patch.object(registry, "DraftLength", AnyLength))
        yield


def _gained(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in (*METRICS, *METRICS_OF_DRAFTS, *METRICS_OF_GRAPHS):
        yield name, _difference(before.get(name, 0), after[name])
    yield "passes", {name: {p: c["matches"] for p, c in passes.items()} for name, passes in after["passes"].items()}


def _difference(before: Any, after: Any) -> Any:
    """Subtract counts, or counts by name at any depth, of `before` from those of `after`; names with 0 are left out."""
    if isinstance(after, Mapping):
        found = {str(name): _difference((before or {}).get(name, 0), value) for name, value in after.items()}
        return {name: value for name, value in found.items() if value}
    return after - before
