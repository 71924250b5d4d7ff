"""Resolve the option speculative_config, which has vLLM's keys, or raise an error with the allowed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compiled_engine.attention.backend import AttentionChoice, choose_backend
from compiled_engine.attention.case import GraphSupport, cases_of
from compiled_engine.config import (
    CompileConfig,
    DraftConfig,
    EngineConfig,
    GraphConfig,
    GraphMode,
    ModelConfig,
    SpeculationConfig,
    draft_lengths,
    json_value,
)
from compiled_engine.features.speculation.draft_sharpness import GREEDY_DRAFTS
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.eagle3_folder import is_head, read_head
from compiled_engine.models.checkpoint.mtp_layer import read_mtp_layer
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.keywords import KEYS_OF_DRAFTS
from compiled_engine.other_engines.translate import refuse
from compiled_engine.parallel.rank_share import local_share
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.compile import resolve_compile
from compiled_engine.resolve.cuda_graphs import (
    default_capture_sizes,
    graphs_of_draft_model,
    graphs_of_head,
    recording_obstacle,
)
from compiled_engine.resolve.folders import resolve_cache_dir, resolve_model_folder
from compiled_engine.resolve.parallel import check_model
from compiled_engine.schema import (
    SWITCH,
    Kind,
    integer,
    number,
    one_of,
    read_mapping,
    require,
    require_defaults,
    text,
    unknown_name_message,
)

NGRAM, DRAFT_MODEL, EAGLE3, MTP = "ngram", "draft_model", "eagle3", "mtp"
WITH_MODEL = (DRAFT_MODEL, EAGLE3)
METHODS = (NGRAM, *WITH_MODEL, MTP)
# vLLM's older names of the method mtp, one for each family.
_MTP_FAMILIES = """
    bailing_hybrid bailing_hybrid_v3 deepseek dots3_note ernie exaone4_5 exaone_moe gemma4 glm4_moe glm4_moe_lite
    glm5_next glm_ocr hy_v3 hy_v4 inkling kimi_k3 longcat_flash mimo mimo_v2 minimax_m3 nemotron_h pangu_ultra_moe
    qwen3_5 qwen3_next qwen4_exp step3p5
"""
MTP_NAMES = tuple(f"{family}_mtp" for family in _MTP_FAMILIES.split())
STANDARD, SYNTHETIC = "standard", "synthetic"
LOOKUP = 5
MOST_DRAFTS = 64
_LENGTH = integer(1, 1024)
AUTO, GREEDY = "auto", "greedy"
# Values tried for "auto". The first is used until the best is known.
SHARPNESSES = (3.0, 1.0, 1.5, GREEDY_DRAFTS)
_SHARE = number("from 0 to 1", lambda share: 0 <= share <= 1)
KEYS = {
    "method": Kind(
        require(
            f"{', '.join(METHODS)}, or no speculative_config, which changes no answer",
            lambda value: True,
            lambda value: value in METHODS,
        ),
        {"enum": METHODS},
    ),
    "num_speculative_tokens": integer(1, MOST_DRAFTS),
    "prompt_lookup_max": _LENGTH,
    "prompt_lookup_min": _LENGTH,
    "model": Kind(lambda name, value: value, {"type": "string"}),  # checked as the option `model` is
    "revision": text(),
    "draft_tensor_parallel_size": integer(1),
    "enable_adaptive_verification": SWITCH,
    "draft_sharpness": Kind(
        require(
            f"{AUTO}, {GREEDY}, or a number above 0 and at most 1000",
            lambda value: isinstance(value, str | int | float) and not isinstance(value, bool),
            lambda value: value in (AUTO, GREEDY) if isinstance(value, str) else 0 < value <= 1000,
        ),
        {"type": ["string", "number"]},
    ),
    "rejection_sample_method": one_of(STANDARD, SYNTHETIC),
    "synthetic_acceptance_rates": Kind(lambda name, value: value, {"type": "array"}),
    "synthetic_acceptance_length": number("at least 1", lambda length: length >= 1),
}
REQUIRED = ("method", "num_speculative_tokens")
# Keys that require another key to have one of these values.
NEEDED = {
    "prompt_lookup_max": ("method", (NGRAM,)),
    "prompt_lookup_min": ("method", (NGRAM,)),
    "model": ("method", WITH_MODEL),
    "revision": ("method", WITH_MODEL),
    "draft_tensor_parallel_size": ("method", (*WITH_MODEL, MTP)),
    "draft_sharpness": ("method", (EAGLE3, MTP)),
    "synthetic_acceptance_rates": ("rejection_sample_method", (SYNTHETIC,)),
    "synthetic_acceptance_length": ("rejection_sample_method", (SYNTHETIC,)),
}


def num_drafts_asked(options: EngineOptions) -> int:
    """Return `num_speculative_tokens`; 0 without drafts, or for a value that `resolve_speculation` refuses."""
    number = read_speculation(options.speculative_config, options.model).get("num_speculative_tokens", 0)
    return number if type(number) is int and 0 < number <= MOST_DRAFTS else 0


def resolve_speculation(options: EngineOptions, config: EngineConfig, progress: Progress) -> SpeculationConfig:
    """Return the configuration of speculation; the default one, without drafts, if speculative_config is not given.

    config: the engine's configuration, resolved except for speculation; the reasons for chosen values are added to
    config.reasons. Raises TypeError, ValueError or OSError with the key, its value and what is allowed.
    """
    given = read_speculation(options.speculative_config, options.model)
    if not given:
        return SpeculationConfig()
    for name in sorted(given, key=lambda name: name != "method"):  # "method" is checked first
        if name in KEYS_OF_DRAFTS:
            refuse(f"speculative_config[{name!r}]", given[name], KEYS_OF_DRAFTS[name])
        if name not in KEYS:
            message = unknown_name_message("speculative_config has no key", str(name), KEYS)
            raise ValueError(f"{message}; allowed: {', '.join(KEYS)}")
        KEYS[name].check(f"speculative_config[{name!r}]", given[name])
    method = given.get("method", "")
    for name in (*REQUIRED, *(("model",) if method in WITH_MODEL else ())):
        if name not in given:
            allowed = f"; allowed: {', '.join(METHODS)}" if name == "method" else ""
            raise ValueError(f"speculative_config has no {name!r}, which it must have; got {dict(given)!r}{allowed}")
    for name, (other, values) in NEEDED.items():
        if name in given and given.get(other) not in values:
            raise ValueError(
                f"speculative_config[{name!r}] is {given[name]!r}, but {other!r} is {given.get(other)!r}; allowed with "
                f"it: {' or '.join(map(repr, values))}"
            )
    num_tokens = given["num_speculative_tokens"]
    _check_limits(given, config.scheduler.max_num_batched_tokens)
    rates, adapts = _acceptance_rates(given, num_tokens), given.get("enable_adaptive_verification", False)
    if adapts:
        *numbers, most_drafts = map(str, draft_lengths(num_tokens))
        config.reasons["speculation.adapts"] = (
            f"a step has {', '.join(numbers)} or {most_drafts} drafts, by measured times and acceptance; /metrics and "
            "compiled-engine bench step show them"
        )
    _check_together(options, config)
    if method in (*WITH_MODEL, MTP):
        draft, aux_layers = resolve_draft(options, given, config, progress)
        speculation = SpeculationConfig(
            method,
            num_tokens,
            draft=draft,
            acceptance_rates=rates,
            aux_layers=aux_layers,
            reads_hidden=method == MTP,
            adapts=adapts,
        )
        if speculation.has_head:
            speculation = replace(speculation, sharpnesses=_sharpnesses(given, config.reasons))
        return speculation
    longest, shortest = _lookup(given, config.reasons)
    return SpeculationConfig(method, num_tokens, longest, shortest, acceptance_rates=rates, adapts=adapts)


def _check_limits(given: Mapping[str, Any], max_num_batched_tokens: int) -> None:
    """Raise ValueError for a value above the limit that another option or key sets."""
    for name, most, reason in (
        ("num_speculative_tokens", max_num_batched_tokens - 1, "one less than max_num_batched_tokens"),
        ("synthetic_acceptance_length", given["num_speculative_tokens"] + 1, "one more than num_speculative_tokens"),
        ("prompt_lookup_min", given.get("prompt_lookup_max", math.inf), "prompt_lookup_max"),
    ):
        if given.get(name, 0) > most:
            raise ValueError(f"speculative_config[{name!r}] is {given[name]}; allowed: at most {most}, {reason}")


def _sharpnesses(given: Mapping[str, Any], reasons: dict[str, str]) -> tuple[float, ...]:
    sharpness = given.get("draft_sharpness", AUTO)
    # Synthetic acceptance does not depend on the drafts.
    if sharpness == AUTO and given.get("rejection_sample_method") != SYNTHETIC:
        reasons["speculation.sharpnesses"] = "that with which most drafts are right is found while requests run"
        return SHARPNESSES
    if sharpness in (AUTO, GREEDY):
        return (GREEDY_DRAFTS if sharpness == GREEDY else 1.0,)
    return (float(sharpness),)


def resolve_draft(
    options: EngineOptions, given: Mapping[str, Any], config: EngineConfig, progress: Progress
) -> tuple[DraftConfig, tuple[int, ...]]:
    """Return (configuration of the draft model or head, indices of the layers of the engine's model that it reads).

    An EAGLE-3 head reads the inputs of these layers. For a draft model and for an MTP layer there are none. given: the
    result of `read_speculation`. Adds the reasons for chosen values to config.reasons. Raises the errors of
    `resolve_speculation`.
    """
    reasons: dict[str, str] = {}
    try:
        aux_layers: tuple[int, ...] = ()
        if given["method"] == EAGLE3:
            draft, aux_layers = _head(options, given, config, reasons, progress)
        elif given["method"] == MTP:
            longest, cache_dir = config.scheduler.max_model_len, resolve_cache_dir(options)
            draft = read_mtp_layer(config.model, longest, cache_dir, config.reasons)
        else:
            draft = _draft_model(options, given, config, reasons, progress)
        _check_ranks(given, draft, config.parallel.tensor_parallel_size)
        share, device = local_share(draft, config.parallel.tensor_parallel_size), config.device
        cases = cases_of(share, 0, device, config.cache.kv_dtype)
        attention = choose_backend(config.attention_backend, config.cache.block_size, cases)
        compiled = resolve_compile(options, config.compile.enabled, draft, config.scheduler, device, reasons)
    except (TypeError, ValueError) as error:
        name = "model" if "model" in given else "method"
        raise type(error)(f"speculative_config[{name!r}] is {str(given[name])!r}: {error}") from error
    graph = _graphs(config, draft, compiled, attention, reasons)
    config.reasons.update({f"speculation.draft.{name}": reason for name, reason in reasons.items()})
    return DraftConfig(draft, compiled, graph), aux_layers


def _head(
    options: EngineOptions,
    given: Mapping[str, Any],
    config: EngineConfig,
    reasons: dict[str, str],
    progress: Progress,
) -> tuple[ModelConfig, tuple[int, ...]]:
    """Return (configuration of an EAGLE-3 head, indices of the layers of the engine's model whose inputs it reads).

    Downloads the head's weights if it is from the hub, unless load_format is "dummy". Raises ValueError if the head
    does not fit the engine's model.
    """
    folder = resolve_model_folder(
        replace(options, model=given["model"], revision=given.get("revision")), reasons, progress
    )
    load_format = config.model.load_format
    if load_format != "dummy":
        _download(folder.hub_name, folder.path, progress)
    head, layers = read_head(folder.path, config.model, config.scheduler.max_model_len, load_format)
    config.reasons["speculation.aux_layers"] = (
        f"the head reads what enters the layers {', '.join(map(str, layers))}, counted from 0"
    )
    return replace(head, hub_name=folder.hub_name, revision=folder.revision), tuple(layers)


def _download(hub_name: str | None, path: Path, progress: Progress) -> None:
    """Download the weights of a checkpoint from the hub, unless `path` has them. hub_name: None for a local folder."""
    if hub_name is not None:
        from compiled_engine.models.checkpoint.hub import (
            download_weights,  # imports huggingface_hub, not needed for a folder
        )

        download_weights(hub_name, path, progress)


def _graphs(
    config: EngineConfig,
    draft: ModelConfig,
    compiled: CompileConfig,
    attention: AttentionChoice,
    reasons: dict[str, str],
) -> GraphConfig:
    """Return the configuration of graphs for a draft model or head.

    On a GPU, the draft's forwards are captured in CUDA graphs if the engine's are. On a CPU, the draft's calls of C++
    kernels are recorded if those of the engine's decodes are. If the draft's attention backend or layers do not allow
    this, the mode is NONE, and the reason is added to `reasons`.
    """
    mode, graph, device = config.graph.mode, config.graph, config.device
    if mode is GraphMode.RECORDED:
        obstacle = recording_obstacle(compiled, config.parallel, draft, attention, device)
        if obstacle is None:
            return GraphConfig(GraphMode.RECORDED)
        reasons["graph.mode"] = f"decodes cannot be recorded: {obstacle}"
    elif graph.captures and attention.support.graphs is not GraphSupport.NEVER:
        reasons["graph.mode"] = "the passes of a draft model are captured for decodes"
        sizes = graph.decode_sizes or default_capture_sizes(config.scheduler.max_num_seqs)
        if draft.head is not None:
            return graphs_of_head(sizes)
        return graphs_of_draft_model(sizes, compiled, attention, config.scheduler)
    elif graph.captures:
        reasons["graph.mode"] = f"attention backend {attention.backend} cannot be captured"
    return GraphConfig(GraphMode.NONE)


def _draft_model(
    options: EngineOptions,
    given: Mapping[str, Any],
    config: EngineConfig,
    reasons: dict[str, str],
    progress: Progress,
) -> ModelConfig:
    """Return a draft model's configuration. Raises ValueError if the model does not fit the engine's model."""
    model = config.model
    asked = replace(options, model=given["model"], revision=given.get("revision"))
    folder = resolve_model_folder(asked, reasons, progress)
    if is_head(folder.path):
        raise ValueError("it is an EAGLE-3 head; allowed: a model that generates, or 'method': 'eagle3'")
    draft, model_reasons = read_model_config(
        folder.path,
        hub_name=folder.hub_name,
        revision=folder.revision,
        dtype=json_value(model.dtype),
        max_model_len=config.scheduler.max_model_len,
        load_format=options.load_format,
        seed=options.seed,
        device_type=config.device.type,
        model_impl="textbook",
        cache_dir=resolve_cache_dir(options),
    )
    reasons |= model_reasons
    if draft.pooling is not None:
        raise ValueError(f"{draft.architecture} pools: it generates no tokens; allowed: a model that generates")
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"vocab_size is {draft.vocab_size}; allowed: that of the model it drafts for, {model.vocab_size}"
        )
    return draft


def _check_ranks(given: Mapping[str, Any], draft: ModelConfig, num_ranks: int) -> None:
    size = given.get("draft_tensor_parallel_size", num_ranks)
    if size != num_ranks:
        raise ValueError(f"draft_tensor_parallel_size is {size}; allowed: tensor_parallel_size, {num_ranks}")
    check_model(draft, num_ranks)


def read_speculation(value: Mapping[str, Any] | str | None, model: Any) -> dict[str, Any]:
    """Return the keys and values of the option speculative_config, given as `value`; empty if it is not given.

    Keys with the value None are left out, and so are vLLM's keys whose value has no effect. model: the option `model`.
    vLLM's older names of the method mtp become `mtp`. With this method, the key `model` may repeat the option `model`,
    and has no effect.
    """
    given = {
        name: each
        for name, each in read_mapping("speculative_config", value).items()
        if each is not None and not (each is False and name in KEYS_OF_DRAFTS)
    }
    if given.get("method") in MTP_NAMES:
        given["method"] = MTP
    # As paths, since a folder has several spellings.
    if given.get("method") == MTP and "model" in given and Path(str(given["model"])) == Path(str(model)):
        del given["model"]
    return given


def _lookup(given: Mapping[str, Any], reasons: dict[str, str]) -> tuple[int, int]:
    """Return (largest, smallest) length of n-grams. If only one is given, the other is equal to it, as in vLLM."""
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    for name, value, other in (("lookup_max", longest, shortest), ("lookup_min", shortest, longest)):
        if value is None:
            reasons[f"speculation.{name}"] = "default" if other is None else "the other bound"
    return longest or shortest or LOOKUP, shortest or longest or LOOKUP


def _acceptance_rates(given: Mapping[str, Any], num_tokens: int) -> tuple[float, ...]:
    """Return SpeculationConfig.acceptance_rates, a rate for each of `num_tokens` drafts; () if drafts are verified.

    Either rates are given, or the mean number of tokens per step. The mean is reached with the least variance: a step
    has as many tokens as its integer part, and one more with the probability of its fractional part. Raises TypeError
    or ValueError for invalid values, and if both or neither are given.
    """
    rates, length = given.get("synthetic_acceptance_rates"), given.get("synthetic_acceptance_length")
    if given.get("rejection_sample_method") != SYNTHETIC:
        return ()
    if (rates is None) == (length is None):
        raise ValueError(
            "speculative_config['rejection_sample_method'] is 'synthetic'; allowed with it: one of "
            f"synthetic_acceptance_rates and synthetic_acceptance_length, got {'neither' if rates is None else 'both'}"
        )
    if length is not None:
        return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(num_tokens))
    name = "speculative_config['synthetic_acceptance_rates']"
    allowed = f"{num_tokens} numbers from 0 to 1, none above the one before it"
    if not isinstance(rates, list | tuple) or len(rates) != num_tokens:
        raise ValueError(f"{name} is {rates!r}; allowed: {allowed}")
    for rate in rates:
        _SHARE.check(name, rate)
    if sorted(rates, reverse=True) != list(rates):
        raise ValueError(f"{name} is {rates!r}; allowed: {allowed}")
    return tuple(map(float, rates))


def _check_together(options: EngineOptions, config: EngineConfig) -> None:
    """Raise ValueError if the model or an option cannot be combined with speculation."""
    reason = None
    if config.model.pooling is not None:
        reason = "the model pools: it generates no tokens"
    elif config.parallel.num_stages > 1:
        reason = f"pipeline_parallel_size is {config.parallel.num_stages}: drafts take one stage"
    elif options.logits_processors:
        reason = "there are logits_processors, which are not told of drafts"
    if reason is not None:
        require_defaults(options, reason, "speculative_config")
