"""The variants of an ablation: engine options that switch parts of the engine on or off."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.bench.results import WHOLE
from compiled_engine.config import EngineConfig
from compiled_engine.kv_format import AUTO, CODED
from compiled_engine.passes.parallel.sequence_parallel import SequenceParallel
from compiled_engine.quantisation_names import ONLINE
from compiled_engine.resolve.compile import COMPILE_OPTIONS, SEQUENCE_PARALLEL_PASSES

# Graph modes without decode graphs, and without graphs of mixed batches.
NOT_OF_DECODES, NOT_OF_MIXED = ("piecewise", "breakable"), ("full_decode_only",)
# Options that the variants set.
RESERVED = ("mode", "graph_mode")
GRAPH_OPTIONS = ("capture_sizes", "capture_token_sizes")
# Number of drafts of the n-gram variant.
NGRAM_DRAFTS = 3
QUANTISED_NOTE = (
    "the bound is that of weights and a cache in the model's dtype: a step of quantised ones reads fewer bytes"
)
GRAPHS_NEED_CUDA = "CUDA graphs need a CUDA device: on a CPU there are no variants with graphs"


@dataclass(frozen=True)
class Variant:
    """A variant of the engine: a name, and the engine options that define it."""

    name: str
    options: Mapping[str, Any]  # engine options, in addition to those shared by all variants

    @property
    def compiles(self) -> bool:
        return self.options["mode"] != "eager"

    @property
    def captures(self) -> bool:
        return self.options["mode"] == "graphed" or "graph_mode" in self.options

    @property
    def rounds(self) -> bool:
        """Whether the variant's options quantise weights or the KV cache."""
        return not {"quantization", "kv_cache_dtype"}.isdisjoint(self.options)

    def engine_options(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shared options that this variant accepts, combined with the variant's own options.

        Compiler options are dropped for eager variants, and graph options for variants without graphs. Sequence
        parallelism is dropped if one of its passes is disabled.
        """
        left_out = [*(() if self.compiles else COMPILE_OPTIONS), *(() if self.captures else GRAPH_OPTIONS)]
        left_out += ["capture_sizes"] if self.options.get("graph_mode") in NOT_OF_DECODES else []
        left_out += ["capture_token_sizes"] if self.options.get("graph_mode") in NOT_OF_MIXED else []
        kept = {name: value for name, value in shared.items() if name not in left_out}
        if "disable_passes" in self.options:
            passes = [*kept.get("disable_passes", ()), *self.options["disable_passes"]]
            if not {*SEQUENCE_PARALLEL_PASSES}.isdisjoint(passes):
                kept.pop("sequence_parallel", None)
            return kept | dict(self.options) | {"disable_passes": passes}
        return kept | dict(self.options)


def variants(
    device_type: str,
    passes: Sequence[str],
    left_out: Sequence[str] | None = None,
    alone: bool = False,
    records: bool = False,
) -> list[Variant]:
    """Return the variants for a device type: the parts of the engine added one by one, then passes disabled one by one.

    passes: the enabled passes. left_out: passes to disable in turn; None: all. alone: add a variant without any pass,
    and one with each pass of `left_out` alone. records: on a CPU, add a variant that records and replays the kernel
    calls of decodes.
    """
    whole = whole_engine(device_type)
    if device_type != "cuda":
        parts = [Variant("eager", {"mode": "eager"}), whole]
        parts += [Variant("compiled + recorded", {"mode": "graphed"})] if records else []
    else:
        parts = [
            Variant("eager", {"mode": "eager"}),
            Variant("eager + full decode graphs", {"mode": "eager", "graph_mode": "full_decode_only"}),
            Variant("eager + breakable", {"mode": "eager", "graph_mode": "breakable"}),
            Variant("compiled", {"mode": "compiled"}),
            Variant("compiled + piecewise", {"mode": "compiled", "graph_mode": "piecewise"}),
            Variant("compiled + full and piecewise", {"mode": "compiled", "graph_mode": "full_and_piecewise"}),
            whole,
        ]
    names = [name for name in passes if left_out is None or name in left_out]
    without = {name: [name] for name in names}
    if alone:
        without["all passes"] = [*passes]
        without |= {f"all passes but {name}": [other for other in passes if other != name] for name in names}
    return [
        *parts,
        *(
            Variant(f"{whole.name} without {name}", {**whole.options, "disable_passes": disabled})
            for name, disabled in without.items()
        ),
    ]


def parallel_variants(config: EngineConfig) -> list[Variant]:
    """Return variants that have all parts of the engine, but use the devices in another way than `config` says.

    If the engine runs the model in its own process, a variant uses a worker process. With tensor parallelism, a variant
    has sequence parallelism, and one has NCCL in place of symmetric memory.
    """
    on_gpu, parallel = config.device.type == "cuda", config.parallel
    whole = whole_engine(config.device.type)
    others: dict[str, dict[str, Any]] = {}
    if parallel.executor == "in_process" and parallel.data_parallel_size == 1:
        others["in a worker process"] = {"distributed_executor": "multiprocess"}
    lacking = [name for name in SEQUENCE_PARALLEL_PASSES if name not in config.compile.passes]
    if parallel.tensor_parallel_size > 1 and lacking == [SequenceParallel.name]:
        others["with sequence parallelism"] = {"sequence_parallel": True}
    if parallel.tensor_parallel_size > 1 and on_gpu and parallel.collectives == "auto":
        others["over NCCL"] = {"collectives": "nccl"}
    return [Variant(f"{whole.name} {how}", {**whole.options, **options}) for how, options in others.items()]


def image_variants(config: EngineConfig) -> list[Variant]:
    """Return a list with a variant that runs the text model alone; [] if the engine reads no images."""
    whole = whole_engine(config.device.type)
    alone = Variant(f"{whole.name} without images", {**whole.options, "language_model_only": True})
    return [] if config.images is None else [alone]


def quantised_variants(config: EngineConfig) -> list[Variant]:
    """Return a variant for each online quantisation scheme, and one for each 8-bit cache format.

    Schemes are left out if the model is quantised already, and formats if the cache has an 8-bit format already.
    """
    whole = whole_engine(config.device.type)
    schemes = ONLINE if config.model.quantisation is None else ()
    formats = [each.name for each in CODED] if config.cache.kv_dtype == AUTO else []
    return [
        *(Variant(f"{whole.name} in {name}", {**whole.options, "quantization": name}) for name in schemes),
        *(Variant(f"{whole.name}, {name} cache", {**whole.options, "kv_cache_dtype": name}) for name in formats),
    ]


def drafting_variants(config: EngineConfig, options: Mapping[str, Any]) -> list[Variant]:
    """Return variants that have all parts of the engine, but use drafts in another way than `config` says.

    If the engine drafts, one variant has no drafts, and, unless the engine's number of drafts is adaptive, one has an
    adaptive number. If the engine does not draft, a variant has n-gram drafts. options: the user's engine options.
    """
    whole = whole_engine(config.device.type)
    given = options.get("speculative_config")
    given = json.loads(given) if isinstance(given, str) else given
    others: dict[str, dict[str, Any] | None] = {}
    if not config.speculation.num_tokens:
        others["with drafts of n-grams"] = {"method": "ngram", "num_speculative_tokens": NGRAM_DRAFTS}
    else:
        others["without drafts"] = None
        if not config.speculation.adapts:
            others["with as many drafts as pay"] = {**(given or {}), "enable_adaptive_verification": True}
    return [
        Variant(f"{whole.name} {how}", {**whole.options, "speculative_config": drafts})
        for how, drafts in others.items()
    ]


def whole_engine(device_type: str) -> Variant:
    """Return the variant with all parts of the engine."""
    return Variant(WHOLE[device_type], {"mode": "graphed" if device_type == "cuda" else "compiled"})


def chosen(found: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the named variants, by default all, in the order of `found`. Raises ValueError for an unknown name."""
    known = [variant.name for variant in found]
    for name in names:
        if name not in known:
            raise ValueError(f"variant is {name!r}; allowed: {', '.join(known)}")
    return [variant for variant in found if not names or variant.name in names]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an engine option that the variants set themselves."""
    for name in RESERVED:
        if name in options:
            raise ValueError(f"{name} is {options[name]!r}; allowed: none, since each variant has its own")
