"""Runs causal language models with transformers' code, and with the engine's calling convention and attention.

A step uses only the arithmetic of transformers' modules. Positions, KV caches and attention inputs are arguments; there
are no masks and no cache objects. Tensors have a batch dimension of size 1, which the passes remove from the graph.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.models.foreign.alibi import LONGEST, fill_slopes
from compiled_engine.models.foreign.angles import (
    RotaryByLength,
    adapt_rotary_modules,
    add_frequencies,
    config_with_factors,
    length_angles,
    longest_text,
)
from compiled_engine.models.foreign.compat import (
    causal_lm_class,
    causal_lm_name,
    encoder_names,
    fill_buffers,
    mixed,
    supported_version,
)
from compiled_engine.models.foreign.description import (
    Description,
    TensorDescription,
    UnknownArchitectureError,
)
from compiled_engine.models.foreign.encoder import Encoder, make_encoder
from compiled_engine.models.foreign.interfaces import NAME, Step, UnknownExpertsError, experts_by_columns
from compiled_engine.models.foreign.latents import LatentAttention
from compiled_engine.models.foreign.mechanisms import first_position, missing_mechanisms, num_layers_of
from compiled_engine.models.foreign.observation import Observation, UnsupportedModelError, observe
from compiled_engine.models.foreign.own_attention import adapt_own_attention
from compiled_engine.models.foreign.positions import adapt_positions
from compiled_engine.models.foreign.recurrence import StepFunctions, use_functions
from compiled_engine.models.foreign.relative_biases import fill_buckets
from compiled_engine.models.foreign.speech import SpeechModel, build_speech_model, describe_speech, is_speech

# Length of BLOOM's training texts, in tokens (BigScience 2022), which newer configurations do not state.
BLOOM_LENGTH = 2048
_OWN_ATTENTION = "its attention does not go through transformers' AttentionInterface"


class CausalLM:
    """Mixin for transformers' class of a causal language model, with the engine's `forward`, `logits` and others.

    step: holds the arguments of attention. other_inputs: the names of the arguments `others` of `forward`, which are
    attributes of `step`. For layers_path, layer_signatures and layers_in_tuple see `Observation`.
    """

    step: Step
    other_inputs: Sequence[str]
    first_position: int  # of a text's first token; if it is not 0, first_position - 1 is that of padding tokens
    base_model: nn.Module
    layers_path: str
    layer_signatures: Sequence[int]
    layers_in_tuple: bool

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        *others: torch.Tensor,
    ) -> torch.Tensor:
        """Return hidden states [T, D] after the final norm.

        Writes this step's keys and values into kv_caches, and updates the states of recurrences in place. others: the
        tensors that `other_inputs` names; the first ones may be left out.
        """
        first = len(self.other_inputs) - len(others)
        for name, tensor in zip(self.other_inputs[first:], others, strict=True):
            setattr(self.step, name, tensor)
        return self._decode({"input_ids": input_ids_T}, positions_T, attention_inputs, kv_caches)

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, D] of tokens."""
        return self.get_input_embeddings()(input_ids_T)  # type: ignore[attr-defined,no-any-return]

    def decode(
        self,
        embedded_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return hidden states [T, D] as `forward` does, but from embeddings [T, D] instead of token ids.

        The model must not have recurrences.
        """
        return self._decode({"inputs_embeds": embedded_TD}, positions_T, attention_inputs, kv_caches)

    def _decode(
        self,
        tokens: dict[str, torch.Tensor],
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        self.step.inputs, self.step.kv_caches = attention_inputs, kv_caches
        self.step.positions_T = positions_T
        # torch 2.11 does not know the range of T while tracing; with it, a slice from -T is the whole tensor.
        torch._check(positions_T.shape[0] >= 1)
        ((name, tensor),) = tokens.items()
        if self.first_position:
            positions_T = positions_T + self.first_position
            if name == "input_ids":
                padding = self.first_position - 1
                positions_T = torch.where(tensor == padding, padding, positions_T)
        output = self.base_model(**{name: tensor.unsqueeze(0)}, position_ids=positions_T.unsqueeze(0), use_cache=False)
        return output[0].squeeze(0)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of hidden states [R, D], including the model's own steps such as a scale or a cap."""
        self.step.hands_on = True
        try:
            output = super().forward(inputs_embeds=hidden_RD.unsqueeze(0), use_cache=False)  # type: ignore[misc]
        finally:
            self.step.hands_on = False
        return output.logits.squeeze(0)


class Decoder:
    """Mixin for transformers' decoder class, which allows the model's head to run alone.

    While `step.hands_on` is set, forward does not run the layers: it returns its input embeddings as hidden states.
    """

    step: Step

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self.step.hands_on:
            return HandedOn(keywords["inputs_embeds"])
        return super().forward(*arguments, **keywords)  # type: ignore[misc]


class TextAngles:
    """Mixin for rotary embeddings that take three positions per token (for time, height and width).

    The angles are computed from the first position only, since a text token's three positions are equal.
    """

    inv_freq: torch.Tensor
    attention_scaling: float

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [1, T, d] in the dtype of x, from positions [3, 1, T]."""
        angles = position_ids[0, ..., None].float() * self.inv_freq.float()
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.attention_scaling).to(x.dtype), (both.sin() * self.attention_scaling).to(x.dtype)


class OrderedHeads:
    """Mixin for Qwen3-Next's gated delta nets: splits projections by ops whose shapes torch 2.11 can infer."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def fix_query_key_value_ordering(self, mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor) -> list[torch.Tensor]:
        """Split the fused projections, whose parts are grouped by key head.

        Returns q, k, v and z [1, T, heads, elements], then b and a [1, T, value heads].
        """
        group, batch = self.num_v_heads // self.num_k_heads, mixed_ba.shape[:2]
        width = group * self.head_v_dim
        by_head = mixed_qkvz.view(*batch, self.num_k_heads, 2 * self.head_k_dim + 2 * width)
        q, k, *wide = by_head.split([self.head_k_dim, self.head_k_dim, width, width], dim=-1)
        narrow = mixed_ba.view(*batch, self.num_k_heads, 2 * group).split([group, group], dim=-1)
        values = [x.contiguous().view(*batch, self.num_v_heads, self.head_v_dim) for x in wide]
        return [
            q.contiguous(),
            k.contiguous(),
            *values,
            *(x.contiguous().view(*batch, self.num_v_heads) for x in narrow),
        ]


class AllTokens:
    """Mixin for Gemma 4's decoder, whose code may drop tokens that later layers need not compute: keeps all tokens.

    The decoder does not know which tokens are needed. Its own code compares the number of tokens with 1, which a trace
    for any number of tokens cannot do.
    """

    def _maybe_slice_kv_shared_inputs(
        self, hidden_states: Any, per_layer_inputs: Any, position_embeddings: Any, masks: Any, *others: Any, **more: Any
    ) -> tuple[Any, Any, Any, Any]:
        return hidden_states, per_layer_inputs, position_embeddings, masks


class HandedOn:
    """Takes the place of the decoder's output when the head runs alone. It has hidden states; all else is None."""

    cache = past_key_values = hidden_states = attentions = cross_attentions = router_logits = None
    shared_kv_states = None

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def read_hf_config(config_json: str) -> PreTrainedConfig:
    """Return transformers' configuration for the text of a config.json.

    Raises UnknownArchitectureError unless transformers has the architecture as a causal LM, a speech model, a model
    without a head or a classifier. Raises ValueError for invalid values or an unsupported version of transformers.
    """
    supported_version()
    values = json.loads(config_json, object_hook=_number_of)
    name = (values.get("architectures") or ["?"])[0]
    kind = values.pop("model_type", None)
    remote = (
        "; it needs code of the checkpoint's own (auto_map), which is never executed" if "auto_map" in values else ""
    )
    if kind not in CONFIG_MAPPING:
        raise UnknownArchitectureError(f"transformers has no model type {kind!r} (architecture {name!r}){remote}")
    try:
        config = config_with_factors(kind, values)
    except Exception as error:  # each field may raise errors of its own
        raise ValueError(f"it is no configuration of a {name}: {' '.join(str(error).split())}") from error
    if name not in (causal_lm_name(config), *encoder_names(config)) and not is_speech(config, name):
        raise UnknownArchitectureError(f"transformers has no causal language model {name!r} of type {kind!r}{remote}")
    return config


def _number_of(values: dict[str, Any]) -> Any:
    """Return the float for a JSON object {"__float__": "Infinity"}, as transformers writes infinities and NaN.

    Any other object is returned unchanged.
    """
    written = values.get("__float__") if len(values) == 1 else None
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else values


def build_foreign_model(config_json: str, dtype: torch.dtype) -> tuple[Any, Observation]:
    """Build a model on the meta device, with its buffers on the CPU. Returns the model and its Observation.

    If config.json states a speech model or a causal LM, this model is built. For any other architecture, it is an
    Encoder if attention is bidirectional, and otherwise the causal LM with the same decoder. Raises
    UnsupportedModelError, with the model's name, for a model that the engine cannot run, and the errors of
    `read_hf_config`.
    """
    whole = read_hf_config(config_json)
    stated = json.loads(config_json)["architectures"][0]
    if is_speech(whole, stated):
        return build_speech_model(whole, dtype)
    if stated != causal_lm_name(whole) and not _has_angles_by_length(whole, stated):
        encoder = _build_encoder(whole, stated, dtype)
        if encoder is not None:
            return encoder
    # For an encoder-decoder, get_text_config would rename the decoder's fields, but its code reads the original names.
    config = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    name = causal_lm_name(whole)
    if name is None:
        raise UnknownArchitectureError(f"transformers has no causal language model for {stated!r}")
    model: Any = None
    try:
        angles = length_angles(config)
        if causal_lm_name(config) is None:
            _require_mechanisms(config, None)
            raise UnsupportedModelError("transformers has no causal language model for its text model alone")
        model = _on_the_meta_device(config, dtype)
        _require_mechanisms(config, model)
        adapt_own_attention(model)
        adapt_positions(model)
        if angles is not None:
            adapt_rotary_modules(model, angles)
        if hasattr(model.base_model, "_maybe_slice_kv_shared_inputs"):
            model.base_model.__class__ = mixed(AllTokens, type(model.base_model))
        observation = observe(model, num_layers_of(model))
        if not observation.attention[0].causal:
            raise UnsupportedModelError("its mask is neither causal nor causal with a sliding window")
        _adapt(model, observation)
        _require_head_alone(model)
        if config is not whole:
            raise UnsupportedModelError("it is multimodal, and not among the models whose text model runs alone")
    except (UnsupportedModelError, UnknownExpertsError) as error:
        raise UnsupportedModelError(f"{name} cannot be run through transformers' code: {error}") from error
    except Exception as error:
        logging.getLogger(__name__).debug("%s", name, exc_info=True)
        try:
            _require_mechanisms(config, model)
            if model is None:
                cause = "its modules cannot be built with the values in config.json"
            elif not model._supports_attention_backend:
                cause = _OWN_ATTENTION
            else:
                cause = "it needs more than token ids and positions, or reads values of tensors"
        except UnsupportedModelError as missing:
            cause = str(missing)
        raise UnsupportedModelError(f"{name} cannot be run through transformers' code: {cause}") from error
    fill_buffers(model)
    add_frequencies(model)
    fill_slopes(model)
    _experts_by_columns(model)
    return model, observation


def _build_encoder(config: PreTrainedConfig, name: str, dtype: torch.dtype) -> tuple[Encoder, Observation] | None:
    """Build an Encoder, and return it with its Observation; None if the model's attention is causal.

    name: of the model's class. Raises UnsupportedModelError, with this name, if the engine cannot run the model.
    """
    try:
        found = make_encoder(config, encoder_names(config)[name], dtype, classifies=name.endswith("Classification"))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be run through transformers' code: {error}") from error
    except Exception as error:
        logging.getLogger(__name__).debug("%s", name, exc_info=True)
        cause = "it needs more than token ids and positions, or reads values of tensors"
        raise UnsupportedModelError(f"{name} cannot be run through transformers' code: {cause}") from error
    if found is not None:
        fill_buffers(found[0].model)
        fill_buckets(found[0].model)
    return found


def _experts_by_columns(model: Any) -> None:
    for module, attribute in experts_by_columns(model):
        transposed = getattr(module, attribute).mT.contiguous().mT
        setattr(module, attribute, nn.Parameter(transposed, requires_grad=False))


def _require_mechanisms(config: PreTrainedConfig, model: nn.Module | None) -> None:
    """Raise UnsupportedModelError, with their names, if the model needs mechanisms that the engine lacks."""
    if missing := missing_mechanisms(config, model):
        raise UnsupportedModelError(f"it needs {', '.join(missing)}, which the engine does not have")


def _has_angles_by_length(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a model's rotary angles depend on a request's length.

    name: of the model's class, for errors. Raises UnsupportedModelError if they do, but in only some layers or in a
    model that is no causal LM, since the rotary modules of encoders are not adapted.
    """
    try:
        if length_angles(config) is None:
            return False
        if causal_lm_name(config) is None:
            raise UnsupportedModelError("its rotary angles depend on a request's length, and it generates no text")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be run through transformers' code: {error}") from error
    return True


def _on_the_meta_device(config: PreTrainedConfig, dtype: torch.dtype, attention: str = NAME) -> Any:
    try:
        with torch.device("meta"):
            model: Any = causal_lm_class(config)._from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=NAME
            )
    except KeyError as error:  # the family has its own table of attention classes
        if error.args != (NAME,) or attention != NAME:
            raise
        model = _on_the_meta_device(config, dtype, "eager")
        model.config._attn_implementation = NAME
    if model.base_model is model:  # the class states the decoder's name in the multimodal model (Mllama)
        model.base_model_prefix = "model"
    return model.eval().requires_grad_(False)


def _require_head_alone(model: Any) -> None:
    """Raise UnsupportedModelError unless the model's head can compute logits from hidden states without the decoder."""
    config = model.config.get_text_config(decoder=True)

    def refuse(module: nn.Module, arguments: Any) -> None:
        raise UnsupportedModelError(f"its head calls the decoder in an unsupported way ({type(module).__name__})")

    hooks = [m.register_forward_pre_hook(refuse) for m in model.modules() if hasattr(m, "layer_idx")]
    head = model.get_output_embeddings()
    hidden_RD = torch.empty(2, config.hidden_size, dtype=head.weight.dtype, device="meta")
    try:
        logits_RV = model.logits(hidden_RD)
    finally:
        for hook in hooks:
            hook.remove()
    if logits_RV.shape != (2, config.vocab_size):
        raise UnsupportedModelError(
            f"its head makes {logits_RV.shape[-1]} logits of a vocabulary of {config.vocab_size}"
        )


def describe_model(config_json: str, dtype: torch.dtype) -> Description:
    """Build the model of a config.json and return its description. Raises the errors of `build_foreign_model`."""
    model, observation = build_foreign_model(config_json, dtype)
    inner, token_types, before = model, 0, getattr(model, "first_position", 0)
    if isinstance(model, Encoder):
        inner, token_types = model.model, model.token_types
    config = inner.config.get_text_config(decoder=True)
    angles = None if isinstance(model, Encoder) else length_angles(config)
    longest = _longest(config) if angles is None else longest_text(config)
    speech = None
    if isinstance(model, SpeechModel):
        speech, longest = describe_speech(inner.config), inner.config.max_target_positions
    if any(layer.linear_bias for layer in observation.attention):
        longest = min(longest, LONGEST)
    first: dict[int, str] = {}
    parameters = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        parameters.append(_described(name, parameter, tied="" if known == name else known))
    stored = model.state_dict().keys()
    buffers = [
        _described(name, buffer, persistent=name in stored, values=buffer.flatten().tolist())
        for name, buffer in model.named_buffers()
    ]
    return Description(
        architecture=type(inner).__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_one_integer(getattr(config, "intermediate_size", None)),
        max_position_embeddings=max(0, longest - before),
        layers=observation.attention,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        token_types=token_types,
        states=observation.states,
        length_angles=angles,
        speech=speech,
        padding_id=before - 1 if before and not isinstance(model, Encoder) else None,
    )


def _longest(config: PreTrainedConfig) -> int:
    """Return the length of the longest text, in tokens, that a configuration states; 0 if it states none."""
    if config.model_type == "bloom":  # positions are biases, so transformers' code has no bound
        return _one_integer(getattr(config, "seq_length", BLOOM_LENGTH))
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    return next((length for name in names if (length := _one_integer(getattr(config, name, None)))), 0)


def _described(name: str, tensor: torch.Tensor, **others: Any) -> TensorDescription:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return TensorDescription(name, shape, dtype, by_columns=not tensor.is_contiguous(), **others)


def _one_integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _adapt(model: Any, observation: Observation) -> None:
    # Changing the objects' classes, instead of wrapping the objects, keeps all parameter names.
    # Some heads call the decoder within the base model.
    layers = observation.attention
    reading = (number for number, layer in enumerate(layers) if layer.kv_layer is not None)
    step = Step([layer.sliding_window for layer in layers], reading)
    for decoder in (model.base_model, getattr(model.base_model, "decoder", None)):
        if isinstance(decoder, nn.Module):
            decoder.__class__ = mixed(Decoder, type(decoder))
            decoder.step = step  # type: ignore[assignment]
    model.__class__ = mixed(CausalLM, type(model))
    for module in model.modules():
        if module is model or hasattr(module, "layer_idx") or hasattr(module, "step"):
            module.step = step
        if hasattr(module, "recomposition_frequencies") and isinstance(getattr(module, "mrope_section", None), list):
            module.__class__ = mixed(TextAngles, type(module))
        if hasattr(module, "fix_query_key_value_ordering"):
            module.__class__ = mixed(OrderedHeads, type(module))
    attending = [layer for layer in observation.attention if layer.num_heads]
    for module, layer in zip(observation.modules, attending, strict=True):
        if layer.latent_dim:
            module.__class__ = mixed(LatentAttention, type(module))
    use_functions(model, StepFunctions(step))
    by_length = any(isinstance(module, RotaryByLength) for module in model.modules())
    model.other_inputs = (*["angle_lengths_T"] * by_length, *["rows_R"] * bool(observation.states))
    model.first_position = first_position(model)
    model.layers_path = observation.layers_path
    model.layer_signatures, model.layers_in_tuple = observation.signatures, observation.in_tuple
