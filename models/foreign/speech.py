"""Speech models of transformers (Whisper), with the engine's calling convention and attention.

The encoder encodes clips of a fixed length. A step of the decoder packs the tokens of several requests; in
cross-attention, each token attends to the clip of its request. In a trace, the decoder computes the clips' keys and
values from the encoder's result, and the pass `hoist_encoder` moves this computation out of the graph. In eager mode,
the decoder reads keys and values that the engine has stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForSpeechSeq2Seq, PreTrainedConfig

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import packed_attention
from compiled_engine.models.foreign.compat import fill_buffers, mixed
from compiled_engine.models.foreign.description import LayerShape
from compiled_engine.models.foreign.interfaces import Step, attend
from compiled_engine.models.foreign.observation import Observation, UnsupportedModelError
from compiled_engine.passes.speech.cross_attention import cross_attention
from compiled_engine.speech import SpeechDescription

NAME = "compiled_engine_speech"
# The architectures that are tested. transformers' other speech models differ in positions, masks or features.
ARCHITECTURES = ("WhisperForConditionalGeneration",)


class SpeechStep(Step):
    """Holds the arguments of attention for a step of the decoder, and for a call of the encoder.

    num_layers: of the decoder. length: tokens of the encoder's result for a clip.
    """

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__([None] * num_layers)
        self.length = length
        self.clip_T: torch.Tensor | None = None  # the clip of each token, see `cross_attention`
        self.clips: AttentionInputs | None = None  # the encoder's, with a clip in the place of a request
        # Keys and values of each layer's cross-attention, [slots * length, H, d] each, which eager code reads; empty in
        # a trace.
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []


def attend_in_role(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in the encoder or decoder. Returns ([N, tokens, heads, d], None).

    query, key, value: [N, heads, tokens, d]; N is the number of clips in the encoder, and 1 in the decoder. module: the
    attention module, which has a `step` and a `role`: "encoder", "decoder" or "cross" (the decoder's cross-attention).
    others: arguments that do not affect the result.
    """
    own: Any = module
    step: SpeechStep = own.step
    if own.role == "decoder":
        return attend(module, query, key, value, attention_mask, scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THd, k_EHd, v_EHd = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if own.role == "encoder":
        assert step.clips is not None
        return packed_attention(q_THd, k_EHd, v_EHd, step.clips, scale).unflatten(0, (-1, step.length)), None
    assert step.clip_T is not None
    if step.kept:
        k_EHd, v_EHd = step.kept[own.layer_idx]
    return cross_attention(q_THd, k_EHd, v_EHd, step.clip_T, step.length, scale).unsqueeze(0), None


AttentionInterface.register(NAME, attend_in_role)


class SpeechModel:
    """Mixin for a speech model's class, with the engine's `forward` and `logits`, and with methods for the encoder.

    step: holds the arguments of attention. layers_path, layer_signatures, layers_in_tuple: describe the decoder's
    layers, see `Observation`. stacks_without_caches: the path and signatures of the encoder's layers.
    """

    step: SpeechStep
    model: Any
    proj_out: nn.Module
    layers_path: str
    layer_signatures: Sequence[int]
    layers_in_tuple: bool
    stacks_without_caches: Sequence[tuple[str, Sequence[int]]]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        clip_T: torch.Tensor,
        encoded_ED: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D] of the decoder, after its last norm. Writes keys and values into kv_caches.

        clip_T: int32, the clip of each token, -1 for none. encoded_ED: the encoder's result for the clips, from which
        the keys and values of cross-attention are computed; None: they are read from SpeechStep.kept.
        """
        step = self.step
        step.inputs, step.kv_caches, step.clip_T = attention_inputs, kv_caches, clip_T
        # torch 2.11 does not know the range of T while tracing; with it, a slice from -T is the whole tensor.
        torch._check(positions_T.shape[0] >= 1)
        decoder = self.model.decoder
        if encoded_ED is None:
            encoded_ED = decoder.embed_tokens.weight.new_empty((0, decoder.config.d_model))
        output = decoder(
            input_ids=input_ids_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            encoder_hidden_states=encoded_ED.unsqueeze(0),
            use_cache=False,
        )
        return output[0].squeeze(0)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of hidden states of the decoder."""
        return self.proj_out(hidden_RD)  # type: ignore[no-any-return]

    def encode(self, features_CMF: torch.Tensor, attention_inputs: AttentionInputs) -> torch.Tensor:
        """Return the encoder's result [C * length, D] for the features of C clips.

        attention_inputs: describe each clip as a request with `length` tokens.
        """
        self.step.clips = attention_inputs
        return self.model.encoder(features_CMF)[0].flatten(0, 1)

    def hoisted(self, encoded_ED: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of cross-attention, computed from the encoder's result [E, D].

        The tensors are the first layer's keys, its values, the second layer's keys, and so on, [E, H, d] each. The pass
        `hoist_encoder` makes a callable of this computation.
        """
        found: list[torch.Tensor] = []
        for layer in self.model.decoder.layers:
            own = layer.encoder_attn
            found += [linear(encoded_ED).unflatten(-1, (-1, own.head_dim)) for linear in (own.k_proj, own.v_proj)]
        return tuple(found)


def is_speech(config: PreTrainedConfig, name: str) -> bool:
    """Return whether `name` is the class name of transformers' speech model for a configuration.

    Raises UnsupportedModelError if it is, but the engine does not run this model.
    """
    mapping: Any = AutoModelForSpeechSeq2Seq._model_mapping
    if type(config) not in mapping or mapping[type(config)].__name__ != name:
        return False
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name} is a speech model whose encoder the engine does not run; allowed: {', '.join(ARCHITECTURES)}"
        )
    return True


def describe_speech(config: Any) -> SpeechDescription:
    """Return the description of a speech model's encoder. config: transformers' configuration of the model."""
    return SpeechDescription(
        num_mel_bins=config.num_mel_bins,
        num_frames=2 * config.max_source_positions,  # the second convolution has stride 2
        length=config.max_source_positions,
        num_heads=config.encoder_attention_heads,
        head_dim=config.d_model // config.encoder_attention_heads,
    )


def build_speech_model(config: Any, dtype: torch.dtype) -> tuple[Any, Observation]:
    """Build a speech model on the meta device, with its buffers on the CPU.

    Returns the model, and an Observation that describes the decoder. config: transformers' configuration.
    """
    with torch.device("meta"):
        model: Any = AutoModelForSpeechSeq2Seq.from_config(
            config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    model = model.eval().requires_grad_(False)
    model.__class__ = mixed(SpeechModel, type(model))
    model.step = step = SpeechStep(config.decoder_layers, config.max_source_positions)
    for path, module in model.named_modules():
        if hasattr(module, "is_causal"):
            module.step = step
            module.role = "cross" if path.endswith(".encoder_attn") else path.split(".")[1]
    num_heads = config.decoder_attention_heads
    heads = LayerShape(num_heads, num_heads, config.d_model // num_heads, None, 0.0, sinks=False)
    layers = (heads,) * config.decoder_layers
    observation = Observation(layers, (), (), "model.decoder.layers", (0,) * len(layers), in_tuple=False)
    model.layers_path, model.layer_signatures = observation.layers_path, observation.signatures
    model.layers_in_tuple = observation.in_tuple
    model.stacks_without_caches = (("model.encoder.layers", (0,) * config.encoder_layers),)
    fill_buffers(model)
    return model, observation
