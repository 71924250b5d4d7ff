"""Declares the callables of a model to the compiler: their arguments, results and compile ranges.

A callable is a function of the model that is compiled separately, such as the forward or the logits. The compiler
treats all callables in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_engine.attention.inputs import (
    FORWARD_ARGUMENTS,
    SIZES,
    STEP_TENSORS,
    StepTensor,
    attention_inputs_of,
    kv_cache_tensors,
    padding_of,
    tensors_of_model,
)
from compiled_engine.config import AdapterConfig, EngineConfig, HeadConfig, ImagesConfig
from compiled_engine.models.foreign.speech_inputs import CLIPS, ENCODER_ARGUMENTS, encoder_tensors
from compiled_engine.models.textbook.eagle3 import head_step_tensors
from compiled_engine.models.vision.inputs import tower_arguments, tower_tensors
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.images.merge_embeddings import IMAGES
from compiled_engine.passes.images.steps import image_step_tensors
from compiled_engine.passes.linear.adapters import ADAPTED, Adapters
from compiled_engine.passes.registry import step_tensors
from compiled_engine.passes.speech.hoist_encoder import ENCODED
from compiled_engine.pooling import Pooling
from compiled_engine.recurrence.sequences import model_step_tensors
from compiled_engine.speech import SpeechConfig, SpeechDescription
from compiled_engine.vision import VisionDescription

FORWARD, LOGITS, POOLER, COMBINE = "forward", "logits", "pooler", "combine"
ADAPTED_LOGITS = "adapted_logits"
# Callables of a speech model: its encoder, and the part of its decoder that depends on the encoder's result alone.
ENCODE, HOISTED = "encode", "hoisted"
# Variant of the forward -> the callable of its logits, or LOGITS in an engine without that callable.
VARIANTS = {ADAPTED: ADAPTED_LOGITS, IMAGES: ADAPTED_LOGITS}
# Variants whose steps have prompts. Few sizes of them are captured, in full graphs alone: attention between graphs does
# not get the tensors that some of these variants pass to it.
OF_PROMPTS = (IMAGES,)
# Sizes of the traced examples, three requests of four tokens. All of them are dynamic in the trace.
_EXAMPLE = {
    **{"tokens": 12, "requests": 3, "request_borders": 4, "blocks_per_request": 2, "work": 2, "blocks": 5},
    **{"embeddings": 11, "windows": 6, "window_borders": 7},
}


@dataclass(frozen=True)
class Signature:
    """The declaration of a callable: its arguments, results and compile ranges."""

    arguments: tuple[str, ...]  # names, in order
    tensors: tuple[StepTensor, ...]  # the tensors in the arguments; a tensor's name is its path there
    # Name -> Python expression over `model`, the arguments and earlier results, for each value that may be returned.
    results: Mapping[str, str]
    returns: tuple[str, ...]  # names of the returned results
    ranges: tuple[CompileRange, ...]  # the last one serves every batch
    small_returns: tuple[str, ...] = ()  # returned in small ranges, if different
    asked: tuple[StepTensor, ...] = ()  # step tensors that passes read, but not the model; they follow the arguments
    backend: str = ""  # of attention_inputs, if they are an argument
    # No pass fuses anything and pieces call op by op as eager code does, so a start loads them without a compiler.
    direct: bool = False
    adapted: bool = False  # with the pass that adds the requests' adapters
    images: ImagesConfig | None = None  # set if the embeddings of images are merged
    aux_layers: tuple[int, ...] = ()  # layers whose inputs are returned after the results
    # Further arguments of the trace. The graph is cut in two: with `hoists`, the callable is the part that depends on
    # these arguments alone, otherwise the other part. It takes only the arguments of its part.
    hoisted: tuple[str, ...] = ()
    hoists: bool = False

    @property
    def called_with(self) -> tuple[str, ...]:
        """The names of the arguments that the compiled callable takes, without the inputs that passes have added."""
        if self.hoists:
            return self.hoisted
        return tuple(name for name in self.arguments if name not in self.hoisted)

    @property
    def most_tokens(self) -> int:
        """The largest token count for which the trace must be valid.

        This is the most tokens that a step may have, or the token count of the traced example if that is larger.
        """
        return max(_EXAMPLE["tokens"], self.ranges[-1].high)

    def returned(self, compile_range: CompileRange) -> tuple[str, ...]:
        """Return the names of the callable's results in a compile range, such as hidden states or logits."""
        return (compile_range.small and self.small_returns) or self.returns

    def open_sizes(self) -> dict[tuple[str, int], tuple[str, int, int]]:
        """Return the dynamic sizes: (tensor, dimension) -> (name of the size, minimum, maximum).

        Dimensions with the same name have the same size.
        """
        bounds = SIZES | {"tokens": (1, self.most_tokens)}
        return {
            (tensor.name, number): (dim, *bounds[dim])
            for tensor in self.tensors
            for number, dim in enumerate(tensor.dims)
            if isinstance(dim, str)
        }

    def examples(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return a small example of each tensor, by name, for tracing. Only shapes and dtypes matter, not values."""
        return padding_of(self.tensors, _EXAMPLE, device)

    def passed(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Return the arguments for a call, in order, made from tensors by name as `examples` returns them.

        An argument is a tensor, a list of tensors, or AttentionInputs.
        """
        return tuple(self._argument(name, tensors) for name in self.arguments)

    def _argument(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        if name in tensors:
            return tensors[name]
        if name == "attention_inputs":
            return attention_inputs_of(tensors, self.backend)
        return [tensor for path, tensor in tensors.items() if path.startswith(f"{name}.")]


def compile_ranges(config: EngineConfig) -> tuple[CompileRange, ...]:
    """Return the compile ranges: those for small batches, ascending, and then the one that serves every batch."""
    small = [CompileRange(low, high, small=True) for low, high in config.compile.ranges]
    return (*small, CompileRange(1, config.scheduler.max_num_batched_tokens))


def callables_of(config: EngineConfig) -> dict[str, Signature]:
    """Return the signature of each callable of the configured model, by the callable's name."""
    pooling, head, adapters, vision = config.model.pooling, config.model.head, config.adapters, config.model.vision
    if vision is not None:
        return {FORWARD: tower_signature(config, vision)}
    found = {FORWARD: forward_signature(config)}
    if pooling is None:
        found[LOGITS] = logits_signature(config)
    elif pooling.head:
        found[POOLER] = pooler_signature(config, pooling)
    if adapters is not None:
        found[ADAPTED] = adapted_signature(config, adapters)
        if LOGITS in found:
            found[ADAPTED_LOGITS] = _with_adapters(found[LOGITS], adapters)
    if config.images is not None:
        found[IMAGES] = images_signature(config, config.images)
    if config.speech is not None and config.model.speech is not None:
        found[ENCODE] = encoder_signature(config, config.speech, config.model.speech)
        found[HOISTED] = replace(found[FORWARD], ranges=found[FORWARD].ranges[-1:], small_returns=(), hoists=True)
    if head is not None and not head.is_mtp:
        found[COMBINE] = combine_signature(config, head)
    return found


def extra_step_tensors(config: EngineConfig) -> tuple[StepTensor, ...]:
    """Return the inputs of the forward that only some engines have, because the model or a pass reads them."""
    adapters = () if config.adapters is None else Adapters(config.adapters).step_tensors()
    images: tuple[StepTensor, ...] = ()
    if config.images is not None:
        images = image_step_tensors(config.images)
        adapters = tuple(replace(tensor, variants=(*tensor.variants, IMAGES)) for tensor in adapters)
    return (*_of_model(config), *step_tensors(config.compile.passes), *adapters, *images)


def _of_model(config: EngineConfig) -> tuple[StepTensor, ...]:
    model = config.model
    own = tensors_of_model(model.token_types, length_angles=model.length_angles is not None)
    of_speech = () if model.speech is None else (CLIPS,)
    return (*own, *model_step_tensors(model), *head_step_tensors(model), *of_speech)


def forward_signature(config: EngineConfig) -> Signature:
    """Return the signature of the forward.

    The forward returns the hidden states of all tokens. In ranges for small batches it returns their logits instead, or
    both if a draft head reads the model's last hidden states. The forwards of draft heads and pooling models return
    hidden states in all ranges.
    """
    model, speculation = local_model(config), config.speculation
    own = _of_model(config)
    hoisted: tuple[StepTensor, ...] = ()
    if model.speech is not None:
        hoisted = (StepTensor(ENCODED, ("embeddings", model.hidden_size), model.dtype),)
    arguments = (*FORWARD_ARGUMENTS, *(tensor.name for tensor in (*own, *hoisted)))
    results = {"hidden_TD": f"model({', '.join(arguments)})"}
    small: tuple[str, ...] = ()
    if model.pooling is None and model.head is None:
        small = ("logits_TV", "hidden_TD") if speculation.reads_hidden else ("logits_TV",)
    if model.pooling is None:
        results["logits_TV"] = "model.logits(hidden_TD)"
    shapes = model.kv_shapes(_EXAMPLE["blocks"], config.cache.block_size, config.cache_dtype)
    caches = kv_cache_tensors(shapes, config.cache_dtype)
    return Signature(
        arguments,
        (*STEP_TENSORS, *caches, *own, *hoisted),
        results,
        returns=("hidden_TD",),
        ranges=compile_ranges(config),
        small_returns=small,
        asked=step_tensors(config.compile.passes),
        backend=config.attention_backend,
        aux_layers=speculation.aux_layers,
        hoisted=tuple(tensor.name for tensor in hoisted),
    )


def adapted_signature(config: EngineConfig, adapters: AdapterConfig) -> Signature:
    """Return the signature of the forward for steps in which some request uses an adapter.

    On a CPU this forward has no ranges for small batches, since their kernels do not support adapters.
    """
    forward = forward_signature(config)
    ranges = forward.ranges if config.device.type == "cuda" else forward.ranges[-1:]
    return replace(_with_adapters(forward, adapters), ranges=ranges)


def images_signature(config: EngineConfig, images: ImagesConfig) -> Signature:
    """Return the signature of the forward for steps that compute positions of images.

    Such steps are long, so there are no ranges for small batches. In an engine with adapters, the requests of these
    steps may use adapters.
    """
    adapters = config.adapters
    forward = forward_signature(config) if adapters is None else adapted_signature(config, adapters)
    asked = (*forward.asked, *image_step_tensors(images))
    return replace(forward, ranges=forward.ranges[-1:], asked=asked, images=images)


def _with_adapters(signature: Signature, adapters: AdapterConfig) -> Signature:
    return replace(signature, asked=(*signature.asked, *Adapters(adapters).step_tensors()), adapted=True)


def tower_signature(config: EngineConfig, vision: VisionDescription) -> Signature:
    """Return the signature of a vision tower's forward, which returns the embeddings of images."""
    arguments = tower_arguments(vision)
    return Signature(
        arguments,
        tower_tensors(vision, config.model.dtype),
        {"embeddings_ED": f"model({', '.join(arguments)})"},
        returns=("embeddings_ED",),
        ranges=compile_ranges(config)[-1:],
        backend=config.attention_backend,
    )


def encoder_signature(config: EngineConfig, limits: SpeechConfig, speech: SpeechDescription) -> Signature:
    """Return the signature of a speech model's encoder. Its compile range counts clips rather than tokens.

    limits: the engine's settings for speech. speech: the description of the model.
    """
    return Signature(
        ENCODER_ARGUMENTS,
        encoder_tensors(speech, config.model.dtype),
        {ENCODED: f"model.encode({', '.join(ENCODER_ARGUMENTS)})"},
        returns=(ENCODED,),
        ranges=(CompileRange(1, limits.step_clips),),
        backend=limits.encoder_backend,
    )


def logits_signature(config: EngineConfig) -> Signature:
    """Return the signature of the callable that computes the logits of selected hidden states.

    The callable is called after a forward that returns hidden states.
    """
    model = local_model(config)
    return Signature(
        ("hidden_RD",),
        (StepTensor("hidden_RD", ("tokens", model.hidden_size), model.dtype),),
        {"logits_RV": "model.logits(hidden_RD)"},
        returns=("logits_RV",),
        ranges=compile_ranges(config)[-1:],
        direct=True,
    )


def combine_signature(config: EngineConfig, head: HeadConfig) -> Signature:
    """Return the signature of a draft head's `combine`.

    `combine` computes the head's input features from the hidden states that enter some of the target model's layers,
    concatenated in the last dimension.
    """
    return Signature(
        ("aux_hidden_states_TE",),
        (StepTensor("aux_hidden_states_TE", ("tokens", head.num_aux_layers * head.target_size), config.model.dtype),),
        {"features_TD": "model.combine(aux_hidden_states_TE)"},
        returns=("features_TD",),
        ranges=compile_ranges(config)[-1:],
        direct=True,
    )


def pooler_signature(config: EngineConfig, pooling: Pooling) -> Signature:
    """Return the signature of a pooling model's head, which computes a request's result from a pooled hidden state."""
    return Signature(
        ("pooled_RW",),
        (StepTensor("pooled_RW", ("tokens", pooling.head[0].in_size), torch.float32),),
        {"result_RL": "model.pooler(pooled_RW)"},
        returns=("result_RL",),
        ranges=compile_ranges(config)[-1:],
        direct=True,
    )
