"""Resolve the options for several devices, or raise an error before any process starts."""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch

from compiled_engine.config import ModelConfig, ParallelConfig
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import KEY_HEADS, expansion, local_share, recurrent_heads, widths
from compiled_engine.parallel.stages import divide_layers, parameter_places, stages_of
from compiled_engine.schema import require_defaults

# Model types verified with tensor parallelism: the engine's own code, and transformers' code.
DIVISIBLE = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "MiMoForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
DIVISIBLE_FOREIGN = (
    *DIVISIBLE,
    "AXK1ForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BailingHybridForCausalLM",
    "BambaForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Jais2ForCausalLM",
    "KimiLinearForCausalLM",
    "MiniCPM3ForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "OlmoForCausalLM",
    "PhiForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SarvamMLAForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
)


def resolve_parallel(
    options: EngineOptions, model: ModelConfig, device: torch.device, reasons: dict[str, str]
) -> ParallelConfig:
    """Return the parallel configuration, and add the reasons for chosen values to `reasons`.

    Raises ValueError with the field, its value and what is allowed.
    """
    size, stages, executor = options.tensor_parallel_size, options.pipeline_parallel_size, options.distributed_executor
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    ranks = size * stages
    if executor == "auto":
        executor = "in_process" if ranks == 1 else "multiprocess"
        reasons["parallel.executor"] = "one device" if ranks == 1 else f"one process for each of {ranks} devices"
    if executor == "in_process" and ranks > 1:
        raise ValueError(
            f"distributed_executor is 'in_process', which runs one device, but {_more_than_one(sizes)}; "
            "allowed: auto, multiprocess"
        )
    check_model(model, size)
    if options.batch_invariant and size > 1:
        reasons["parallel.tensor_parallel_size"] = "every rank has the whole vocabulary: batch_invariant is True"
    elif model.vocab_size % size:
        reasons["parallel.tensor_parallel_size"] = f"every rank has the whole vocabulary: {size} does not divide it"
    if executor == "ray" and find_spec("ray") is None:
        raise ValueError(
            "distributed_executor is 'ray', but the package ray is not installed: "
            "python -m pip install 'compiled-engine[ray]'; allowed without it: auto, in_process, multiprocess"
        )
    replicas = options.data_parallel_size
    if executor != "in_process" or replicas > 1:
        _check_processors(options)
        _check_devices(options, device, executor, sizes, replicas)
    if options.collectives == "nccl" and (device.type != "cuda" or size == 1):
        sums = "a CPU's go through gloo" if size > 1 else "tensor_parallel_size is 1: there is nothing to sum"
        require_defaults(options, sums, "collectives")
    layers = _stage_layers(options, model, reasons)
    return ParallelConfig(size, executor, replicas, layers, options.collectives)


def _stage_layers(options: EngineOptions, model: ModelConfig, reasons: dict[str, str]) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, () for a single stage. Adds the division to `reasons`.

    Raises ValueError for a model that cannot be divided into stages.
    """
    stages = options.pipeline_parallel_size
    if stages == 1:
        return ()
    reason = allowed = ""
    if stages > model.num_layers:
        reason, allowed = f"the model has {model.num_layers} layers", f"or at most {model.num_layers}"
    elif model.recurrences is not None:
        reason = f"the states of {model.architecture}'s recurrences cannot be divided"
    elif model.transformers is not None:
        reason, allowed = "models through transformers' code cannot be divided so far", "or model_impl textbook"
    if reason:
        require_defaults(options, reason, "pipeline_parallel_size", allowed=allowed)
    local = local_share(model, options.tensor_parallel_size)
    built = build_model(local)
    nbytes = {name: parameter.nbytes for name, parameter in built.named_parameters()}
    layers = divide_layers(parameter_places(built, local), nbytes, model.num_layers, stages)
    has = (f"stage {s.index} has layers {s.layers[0]} to {s.layers[-1]}" for s in stages_of(layers, model.num_layers))
    reasons["parallel.stage_layers"] = f"{', '.join(has)}: so the slowest stage is as fast as can be"
    return layers


def _more_than_one(sizes: dict[str, int]) -> str:
    return " and ".join(f"{name} is {size}" for name, size in sizes.items() if size > 1)


def check_model(model: ModelConfig, size: int) -> None:
    """Raise ValueError if `size` ranks cannot divide the model.

    Ranks divide only known architectures. `size` must divide the numbers of attention heads and of rows of MLPs and
    experts. It must divide the number of KV heads, or be a multiple of it.
    """
    if size == 1:
        return
    known = DIVISIBLE if model.transformers is None else DIVISIBLE_FOREIGN
    if model.architecture not in known:
        raise ValueError(
            f"tensor_parallel_size is {size}, but models of {model.architecture} with the code of "
            f"{model.implementation} cannot be divided; allowed: 1, or one of {', '.join(known)}"
        )
    recurrent = recurrent_heads(model)
    shapes = list(dict.fromkeys(map(model.heads_of, range(model.num_layers))))
    divided = [
        ("rows of the MLP", model.intermediate_size if model.num_mlps else 0),
        ("rows of the experts", model.experts.intermediate_size),
        *((f"rows of {name}", width) for name, width in widths(model).items()),
        *(("attention heads", heads.num_heads) for heads in shapes),
        *([] if recurrent is None else recurrent[:1]),
    ]
    for what, count in divided:
        if count % size:
            raise ValueError(
                f"tensor_parallel_size is {size}, which does not divide the model's {count} {what}; "
                "allowed: a divisor of them"
            )
    for heads in shapes:
        if heads.num_kv_heads % size and size % heads.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {size}; allowed: a divisor or a multiple of the model's "
                f"{heads.num_kv_heads} KV heads"
            )
    _check_recurrences(model, size)


def _check_recurrences(model: ModelConfig, size: int) -> None:
    """Raise ValueError if `size` ranks cannot divide the groups of heads that recurrent states have, or the channels.

    Norms of Mamba 2 have groups of channels; one that is the whole row is summed over the ranks.
    """
    found, expanded = recurrent_heads(model), expansion(model)
    if found is None:
        return
    (heads, num_heads), (groups, num_groups) = found
    may_share_one = groups != KEY_HEADS
    if num_groups % size and not (num_groups == 1 and may_share_one):
        others = f", or any divisor of the {num_heads} {heads} with a single group" if may_share_one else ""
        raise ValueError(
            f"tensor_parallel_size is {size}, which does not divide the model's {num_groups} {groups}; "
            f"allowed: a divisor of them{others}"
        )
    if expanded is not None and expanded % size:
        raise ValueError(
            f"tensor_parallel_size is {size}, which does not divide the model's mamba_expand, {expanded}; "
            "allowed: a divisor of it, since a rank's channels are a multiple of hidden_size in transformers' code"
        )


def _check_processors(options: EngineOptions) -> None:
    for index, given in enumerate(options.logits_processors):
        if not isinstance(given, str):
            raise ValueError(
                f"logits_processors[{index}] is {given!r}, which cannot be given to another process; allowed with "
                "distributed_executor='multiprocess' or several replicas: 'package.module:Name'"
            )


def _check_devices(
    options: EngineOptions, device: torch.device, executor: str, sizes: dict[str, int], replicas: int
) -> None:
    """Raise ValueError if there are too few GPUs, if the option `device` names a single GPU, or if PyTorch lacks NCCL.

    sizes: option -> size; the product of the sizes is the number of devices of a replica.
    """
    share, given = math.prod(sizes.values()), _more_than_one(sizes)
    if not torch.distributed.is_available():
        given = given or f"distributed_executor is {executor!r}"
        raise ValueError(f"{given}, but this PyTorch has no torch.distributed; allowed: one device")
    if device.type != "cuda":
        return
    if ":" in options.device:
        raise ValueError(
            f"device is {options.device!r}, but rank i runs on the i-th visible GPU; allowed with several replicas or "
            "distributed_executor='multiprocess': auto, cpu, cuda (CUDA_VISIBLE_DEVICES selects the GPUs)"
        )
    visible = torch.cuda.device_count()
    if executor == "ray":
        visible = share * replicas  # the cluster reports its own devices
    if share > visible:
        together = "" if share in sizes.values() else f", which takes {share} GPUs"
        raise ValueError(f"{given}{together}, but {visible} GPUs are visible; allowed: at most {visible}")
    if replicas * share > visible:
        raise ValueError(
            f"data_parallel_size is {replicas}, with {share} GPUs for each replica, but "
            f"{visible} GPUs are visible; allowed: at most {visible // share}"
        )
    if share > 1 and not torch.distributed.is_nccl_available():
        raise ValueError(f"{given}, but this PyTorch has no NCCL; allowed on GPUs: 1")
