"""The engine's log-probabilities compared with those of transformers, family by family, through transformers' own code.

Each comparison has prompts longer than a step and than any window, so they are computed in chunks; decodes; and the
same prompts once more, which begin in the prefix cache.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import Family, load_oracle, write_checkpoint
from fused_forward import BLOCK_SIZE, FusedModel, fuse

from compiled_engine.bench.results import provenance
from compiled_engine.config import EngineConfig
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.graphs.compiler.build import apply_passes, trace_rank, trace_whole
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.other_engines.translate import make_options
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.manager import PassReport
from compiled_engine.resolve.engine import resolve, resolve_device
from compiled_engine.sampling.params import SamplingParams

# Largest difference of a log-probability in fp32.
TOLERANCE = 3e-4
# In bf16: how many times as far from the fp32 oracle as transformers in bf16 the engine may be, on average.
BF16_FACTOR = 1.3
# Fields of a configuration that say how many experts there are.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PROMPT_LENS = (1, 5, 33, 70)
OUTPUT_LEN = 10
OPTIONS: dict[str, Any] = {
    # Enough for three requests, so that several comparisons fit on a device.
    "num_blocks": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 3,
    "max_model_len": 128,
    "model_impl": "transformers",
    "progress": False,
}


@dataclass(frozen=True)
class Difference:
    """Differences of the engine's log-probabilities from transformers', and what they are compared with."""

    largest: float  # from transformers in fp32
    mean: float
    mean_of_transformers: float  # in the engine's dtype, from transformers in fp32
    tokens_per_s: float | None = None  # output of the engine, if measured
    from_float64: float | None = None  # the largest of an engine in fp32 from transformers in float64
    transformers_from_float64: float | None = None  # the largest of transformers in fp32
    # The engine's and transformers', for families with experts in narrower dtypes: where two experts are nearly as
    # good, rounding sends a token to another expert, and few such tokens decide a mean.
    medians: tuple[float, float] | None = None
    # Whether each greedy token of the engine is transformers' most likely one in fp32 or in float64.
    tokens_equal: bool | None = None

    def is_right(self, dtype: torch.dtype) -> bool:
        if dtype == torch.float32:
            # Where roundings count for more than that, transformers in fp32 is no reference itself.
            from_either = self.largest if self.from_float64 is None else min(self.largest, self.from_float64)
            return from_either <= TOLERANCE
        found, expected = self.medians or (self.mean, self.mean_of_transformers)
        return found <= BF16_FACTOR * expected


def compare_families(
    cases: Sequence[Family], modes: Sequence[str], options: dict[str, Any], done: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Compare each family in each mode, as JSON; `done` is given the result so far after each family.

    modes: of the engine, or "fused": its graphs after all passes, executed op by op on the CPU; or, for several ranks,
    "verified": its graphs, with sums over the ranks compared with the undivided model. options: further options of
    `LLM`.
    """
    found: dict[str, Any] = {"benchmark": "families", "ranks": options.get("tensor_parallel_size", 1), "results": []}
    found |= provenance(resolve_device(options.get("device", "auto"), {}))
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found["results"].append(_compare(case, Path(folder), modes, options))
        done(found)
    return found


def _compare(case: Family, folder: Path, modes: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, str(options.get("dtype", "float32")))
    found: dict[str, Any] = {"family": case.name, "architecture": None, "dtype": options.get("dtype")}
    found["implementation"] = options.get("model_impl", OPTIONS["model_impl"])
    try:
        oracle = write_checkpoint(folder, case, dtype)  # an older transformers may not have the type
        found["architecture"] = type(oracle).__name__
        for mode in modes:
            if mode == "fused":
                model = fused_model(folder, options)
                difference = difference_after_passes(model, oracle)
                found["passes"] = [_summary(report) for report in model.reports]
            elif mode == "verified":
                found["passes"] = [_summary(report) for report in verified_passes(folder, options)]
                continue
            else:
                difference = difference_of(folder, oracle, options | {"mode": mode}, measures_speed=True)
            found[mode] = vars(difference) | {"right": difference.is_right(dtype)}
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def difference_of(folder: Path, oracle: Any, options: dict[str, Any], *, measures_speed: bool = False) -> Difference:
    """Compare the checkpoint in the folder, run by an engine with these options. measures_speed: see tokens_per_s."""
    prompts = random_prompts(oracle, PROMPT_LENS)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=3, prompt_logprobs=3, detokenize=False)
    with LLM(folder, **OPTIONS | {"dtype": "float32"} | options) as llm:
        dtype, device = llm.config.model.dtype, llm.config.device
        # Without log-probabilities of the prompt its beginning comes from the prefix cache.
        cached = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=3, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [*llm.generate(given, params), *llm.generate(given, cached)]
        rate = tokens_per_s(llm) if measures_speed else None
    models = {torch.float32: oracle.to(device)}
    if dtype == torch.float32:
        models[torch.float64] = load_oracle(folder, torch.float64)
    else:
        models[dtype] = load_oracle(folder, dtype).to(device)
    engine: list[float] = []
    transformers: dict[torch.dtype, list[float]] = {each: [] for each in models}
    tokens_equal = True
    for prompt, output in zip([*prompts, *prompts], outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        tables = {each: _logprobs(model, [*prompt, *token_ids]) for each, model in models.items()}
        exact = [table_TV for each, table_TV in tables.items() if each in (torch.float32, torch.float64)]
        likeliest = [table_TV[len(prompt) - 1 : -1].argmax(-1).tolist() for table_TV in exact]
        tokens_equal &= all(token in allowed for token, *allowed in zip(token_ids, *likeliest, strict=True))
        for position, token_id, logprob in _entries(output):
            engine.append(logprob)
            for each, table_TV in tables.items():
                transformers[each].append(table_TV[position - 1, token_id].item())
    reference = transformers[torch.float32]
    ours, theirs = _distances(engine, reference), _distances(transformers[dtype], reference)
    from_float64: tuple[float | None, float | None] = None, None
    if (wide := transformers.get(torch.float64)) is not None:
        from_float64 = max(_distances(engine, wide)), max(_distances(reference, wide))
    routed = any(getattr(oracle.config.get_text_config(), name, 0) for name in _EXPERTS)
    medians = (statistics.median(ours), statistics.median(theirs)) if routed and dtype != torch.float32 else None
    means = sum(ours) / len(ours), sum(theirs) / len(theirs)
    return Difference(max(ours), *means, rate, *from_float64, medians, tokens_equal)


def random_prompts(oracle: Any, lens: Sequence[int]) -> list[list[int]]:
    """Return random token ids without padding, for which some models count no position."""
    config, generator = oracle.config.get_text_config(), random.Random(0)
    allowed = [token_id for token_id in range(config.vocab_size) if token_id != config.pad_token_id]
    return [[generator.choice(allowed) for _ in range(length)] for length in lens]


def _logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities [T, V], in float64 of a model in float64, in float32 of others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(
        torch.float64 if model.dtype == torch.float64 else before
    )  # XGLM's code makes such a tensor
    try:
        logits_TV = model(torch.tensor([token_ids], device=model.device), use_cache=False).logits[0]
    finally:
        torch.set_default_dtype(before)
    return (logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()).log_softmax(-1)


def _entries(output: RequestOutput) -> Iterator[tuple[int, int, float]]:
    """Yield position, token id and the engine's log-probability, of prompt and completion."""
    completion = output.outputs[0]
    of_prompt = list(output.prompt_logprobs[1:]) if output.prompt_logprobs else []
    entries = [*of_prompt, *(completion.logprobs or [])]
    first = len(output.prompt_token_ids) + len(completion.token_ids) - len(entries)
    for position, entry in enumerate(entries, start=first):
        for token_id, logprob in (entry or {}).items():
            yield position, token_id, logprob.logprob


def _distances(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(value - other) for value, other in zip(values, others, strict=True)]


def tokens_per_s(llm: LLM) -> float:
    """Return output tokens per second of as many requests as run at once: prompts of 8 tokens, 64 to generate.

    The second of two runs is measured.
    """
    count = llm.config.scheduler.max_num_seqs
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    for repeat in range(2):
        prompts = [{"prompt_token_ids": [1 + repeat * count + i] * 8} for i in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, params)
    return count * 64 / (time.perf_counter() - start)


def fused_model(folder: Path, options: dict[str, Any], *, verify: bool = False) -> FusedModel:
    """Return the checkpoint in the folder after the passes for up to 8 tokens, and for more. options: of `LLM`."""
    return fuse(_compiled_config(folder, {"block_size": BLOCK_SIZE, **options}), verify=verify)


def verified_passes(folder: Path, options: dict[str, Any]) -> tuple[PassReport, ...]:
    """Report what the passes do to the graphs of a rank, of the range for small batches and of the other.

    Raises VerificationError where the ranks together do not compute what the undivided model does.
    """
    config = _compiled_config(folder, {"verify_passes": True, **options})
    model, signature = without_storage(build_model(local_model(config)), config.device), forward_signature(config)
    traced, whole = trace_rank(config, model, signature), trace_whole(config, build_model)
    return tuple(report for one in signature.ranges for report in apply_passes(config, traced, one, whole)[1])


def _compiled_config(folder: Path, options: Mapping[str, Any]) -> EngineConfig:
    given: dict[str, Any] = {"dtype": "float32", **OPTIONS, "compile_ranges": (8,), **options}
    del given["progress"]
    return resolve(make_options(given | {"model": folder, "mode": "compiled", "attention_backend": "torch"}))


def difference_after_passes(model: FusedModel, oracle: Any) -> Difference:
    """Compare steps of prompts in chunks together with decodes, with windows shorter than the prompts."""
    sequences = random_prompts(oracle, (31, 18))
    steps = [[9, 1], [1, 6], [0, 1], [14, 1], [1, 1], [6, 8]]
    differences = []
    for ids, found_TV in zip(sequences, model.logprobs(sequences, steps), strict=True):
        exact_TV = oracle(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        differences.append((found_TV - exact_TV).abs())
    every = torch.cat(differences)
    return Difference(every.max().item(), every.mean().item(), 0.0)


def _summary(report: PassReport) -> dict[str, Any]:
    names = ("name", "applied", "matches", "contract")
    return {name: getattr(report, name) for name in names} | {"near_misses": list(report.near_misses)}


_TENSOR, _STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
_COMPILED: dict[str, Any] = {"mode": "compiled", "compile_workers": 0}
# Stages are parts of a compiled plan, and the last one is a pass: without the compiler there is TP alone.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "TP 2, eager": {**_TENSOR, "mode": "eager"},
    "TP 2, compiled": {**_TENSOR, **_COMPILED},
    "PP 2, compiled": {**_STAGES, **_COMPILED},
    "TP 2 x PP 2, compiled": {**_TENSOR, **_STAGES, **_COMPILED},
    "TP 2, sequence parallel": {**_TENSOR, **_COMPILED, "sequence_parallel": True},
}


def compare_layouts(
    cases: Sequence[Family], layouts: Sequence[str], options: Mapping[str, Any], done: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Compare layouts; as JSON: results, a list of family, implementation and, for each layout, largest, mean and
    right, or refused.

    options: further ones of `LLM`. `done` is given the result so far after each family.
    """
    found: dict[str, Any] = {"benchmark": "layouts", "layouts": list(layouts), "results": []}
    found |= provenance(torch.device("cpu"))
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            oracle = write_checkpoint(Path(folder), case.to_divide())
            row: dict[str, Any] = {"family": case.name, "implementation": options["model_impl"]}
            for name in layouts:
                given = {**options, **LAYOUTS[name]}
                # `compare_families` reports contracts that transformers' code may miss.
                given |= {"strict_passes": True} if given["model_impl"] == "textbook" and "eager" not in name else {}
                row[name] = _compared(Path(folder), oracle, given)
        found["results"].append(row)
        done(found)
    return found


def _compared(folder: Path, oracle: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        difference = difference_of(folder, oracle, {"device": "cpu"} | options)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"largest": difference.largest, "mean": difference.mean, "right": difference.is_right(torch.float32)}
