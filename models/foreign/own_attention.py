"""Adapts attention modules of transformers that compute scores themselves, so that they call AttentionInterface.

Most model families pass queries, keys and values to `AttentionInterface`, which the engine implements. Older families
multiply them in their own code. A module of such a family gets a mixin, whose method computes queries, keys and values
with the module's own parameters and calls the interface. Tests compare the results of each adapted class with those of
transformers (tests/support/families.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from compiled_engine.models.foreign.alibi import Alibi, RoundedAlibi
from compiled_engine.models.foreign.compat import mixed
from compiled_engine.models.foreign.observation import UnsupportedModelError
from compiled_engine.models.foreign.relative_biases import BiasTable

_FUNCTIONS = AttentionInterface()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Call AttentionInterface, and return the result of attention, [1, T, heads, d].

    query, key, value: [1, heads, T, d]. mask: transformers' mask; None: a causal mask. scaling: None: 1 / sqrt(d).
    """
    causal = {} if mask is not None else {"is_causal": True}
    function = _FUNCTIONS[module.config._attn_implementation]
    out: torch.Tensor = function(module, query, key, value, mask, scaling=scaling, **causal, **others)[0]
    return out


def _heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


class OwnAttention:
    """Base class of the mixins for attention modules that compute scores themselves.

    `adapt_own_attention` sets `config` and, if the module lacks it, `layer_idx`. It removes buffers that the module's
    code would use as masks.
    """

    config: Any
    layer_idx: int


class LocalAttention(OwnAttention):
    """GPT-Neo's attention: scores are not scaled, and some layers have a sliding window."""

    attention_type: str

    def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
        window = self.config.window_size if self.attention_type == "local" else None
        out = _attend(self, query, key, value, attention_mask, 1.0, own_window=window)
        return out.transpose(1, 2), None


class JapaneseAttention(OwnAttention):
    """GPT-NeoX-Japanese's attention."""

    def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
        return _attend(self, query, key, value, attention_mask).transpose(1, 2), None


class FirstAttention(OwnAttention):
    """Attention of the first GPT, whose code transposes keys. The module's masks are ignored; attention is causal."""

    scale: bool

    def _attn(self, query: Any, key: Any, value: Any, *masks: Any) -> list[torch.Tensor]:
        out = _attend(self, query, key.transpose(-1, -2), value, None, None if self.scale else 1.0)
        return [out.transpose(1, 2)]


class EncoderAttention(OwnAttention):
    """Attention as in BERT (Megatron-BERT, RemBERT), and RoFormer's, which also rotates pairs of adjacent elements."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_head_size: int
    rotary_value: bool = False

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, sinusoidal_pos: Any = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's result [1, T, D]. sinusoidal_pos: RoFormer's sines and cosines of positions."""
        q, k, v = (_heads(each(hidden_states), self.attention_head_size) for each in (self.query, self.key, self.value))
        rotate: Any = getattr(self, "apply_rotary_position_embeddings", None)
        if rotate is not None and self.rotary_value:
            q, k, v = rotate(sinusoidal_pos, q, k, v)
        elif rotate is not None:
            q, k = rotate(sinusoidal_pos, q, k)
        return _attend(self, q, k, v, attention_mask).flatten(2), None


class ScaledAttention(OwnAttention):
    """Attention of XGLM, MVP and TrOCR: queries are scaled before they are multiplied by keys."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_prompt: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's result [1, T, D].

        Raises UnsupportedModelError if there is a learned prompt of keys and values (`attn_prompt`).
        """
        if attn_prompt is not None:
            raise UnsupportedModelError("its attention has keys and values of a learned prompt")
        q = self.q_proj(hidden_states) * self.scaling
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (_heads(x, self.head_dim) for x in (q, k, v))
        return self.out_proj(_attend(self, q, k, v, attention_mask, 1.0).flatten(2)), None


class GroupedAttention(RoundedAlibi, OwnAttention):
    """Falcon's attention: the weight's rows are grouped by key head; a group has its queries, its key and its value.

    If there are several groups, transformers repeats a key for each query head; this class does not. If the
    configuration has `alibi`, scores have biases by positions, and queries and keys are not rotated.
    """

    query_key_value: nn.Module
    dense: nn.Module
    num_heads: int
    num_kv_heads: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's result [1, T, D].

        Raises UnsupportedModelError if scores have biases (ALiBi) and heads share keys.
        """
        packed = self.query_key_value(hidden_states)
        group = self.num_heads // self.num_kv_heads
        packed = packed.view(*packed.shape[:2], self.num_kv_heads, group + 2, self.head_dim)
        q, k, v = packed.split((group, 1, 1), dim=3)
        q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
        if alibi is not None:
            if group > 1:
                raise UnsupportedModelError("its biases of scores (ALiBi) differ in heads that share keys")
            out = _attend(self, *self.with_positions(q, k), v, None, self.head_dim**-0.5, linear_bias=True)
            return self.dense(out.flatten(2)), None
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        q, k = (x * cos + _half_turned(x) * sin for x in (q, k))
        return self.dense(_attend(self, q, k, v, attention_mask).flatten(2)), None


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class BloomAttention(Alibi, OwnAttention):
    """Bloom's attention: the weight's rows are q, k and v of the first head, then of the second, and so on.

    Its forward adds the residual.
    """

    query_key_value: nn.Module
    dense: nn.Module

    @property
    def alibi_scale(self) -> float:  # type: ignore[override]
        return 1 / math.sqrt(self.head_dim)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, attention_mask: Any = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the sum of the attention's result and the residual, [1, T, D]."""
        packed = self.query_key_value(hidden_states)
        packed = packed.view(*packed.shape[:2], -1, 3, self.head_dim)
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(3))
        out = _attend(self, *self.with_positions(q, k), v, attention_mask, self.alibi_scale, linear_bias=True)
        return residual + self.dense(out.flatten(2)), None


class MosaicAttention(Alibi, OwnAttention):
    """MPT's attention, in which q, k and v may be clamped."""

    Wqkv: nn.Module
    out_proj: nn.Module
    softmax_scale: float
    clip_qkv: float | None

    @property
    def alibi_scale(self) -> float:  # type: ignore[override]
        return self.softmax_scale

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        """Return the attention's result [1, T, D]."""
        packed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            packed = packed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (_heads(x, self.head_dim) for x in packed.chunk(3, dim=2))
        out = _attend(self, *self.with_positions(q, k), v, None, self.alibi_scale, linear_bias=True)
        return self.out_proj(out.flatten(2)), None


class BucketedAttention(OwnAttention):
    """MPNet's attention, whose scores have biases by relative positions. Its stack of layers is a BiasTable."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    attention_head_size: int

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, position_bias: torch.Tensor, *others: Any, **more: Any
    ) -> tuple[torch.Tensor]:
        """Return the attention's result [1, T, D]. position_bias: the table of biases [H, W]."""
        q, k, v = (_heads(each(hidden_states), self.attention_head_size) for each in (self.q, self.k, self.v))
        out = _attend(self, q, k, v, attention_mask, biases_HW=position_bias)
        return (self.o(out.flatten(2)),)


class MosaicDecoder:
    """Mixin for MPT's decoder: its forward creates no mask and no table of biases, unlike transformers' forward."""

    wte: nn.Module
    blocks: nn.ModuleList
    norm_f: nn.Module

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **others: Any
    ) -> BaseModelOutputWithPast:
        """Return hidden states [1, T, D] after the final norm."""
        hidden_states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden_states = block(hidden_states, position_bias=None, attention_mask=None)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm_f(hidden_states))


# `folder.Class` of a class of transformers -> its mixin.
_ATTENTION: dict[str, type[OwnAttention]] = {
    "gpt_neo.GPTNeoSelfAttention": LocalAttention,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": JapaneseAttention,
    "openai.Attention": FirstAttention,
    "big_bird.BigBirdSelfAttention": EncoderAttention,
    "megatron_bert.MegatronBertSelfAttention": EncoderAttention,
    "rembert.RemBertSelfAttention": EncoderAttention,
    "roformer.RoFormerSelfAttention": EncoderAttention,
    "xglm.XGLMAttention": ScaledAttention,
    "mvp.MvpAttention": ScaledAttention,
    "trocr.TrOCRAttention": ScaledAttention,
    "falcon.FalconAttention": GroupedAttention,
    "bloom.BloomAttention": BloomAttention,
    "mpt.MptAttention": MosaicAttention,
}
# The same for encoders; those of the table above are compared as decoders alone.
ENCODERS: dict[str, type[OwnAttention]] = {"mpnet.MPNetSelfAttention": BucketedAttention}


def adapt_own_attention(model: PreTrainedModel, known: Mapping[str, type[OwnAttention]] = _ATTENTION) -> None:
    """Change attention modules that compute scores themselves in place, so that they call AttentionInterface.

    known: the mixins of modules, by `folder.Class`; modules of other classes are not changed.
    """
    count = 0
    for module in model.modules():
        if known is ENCODERS and _key_of(type(module)) == "mpnet.MPNetEncoder":
            stack: Any = module
            stack.__class__ = mixed(BiasTable, type(module))
            stack.hold_buckets()
        ours = known.get(_key_of(type(module)))
        if ours is None:
            continue
        own: Any = module
        module.__class__ = mixed(ours, type(module))
        own.config = model.config
        if not isinstance(getattr(own, "layer_idx", None), int):
            own.layer_idx, count = count, count + 1
        for name in [name for name in own._buffers if name == "bias"]:  # masks for the longest text
            del own._buffers[name]
        if isinstance(own, Alibi) and getattr(model.config, "alibi", True):
            own.hold_slopes(model.config.num_attention_heads)
    if _key_of(type(model.base_model)) == "mpt.MptModel":
        model.base_model.__class__ = mixed(MosaicDecoder, type(model.base_model))


def _key_of(module_class: type) -> str:
    """Return `folder.Class` for a class in transformers.models.FOLDER; "" for any other class."""
    package, models, folder, *_ = (*module_class.__module__.split("."), "", "", "")
    return f"{folder}.{module_class.__name__}" if (package, models) == ("transformers", "models") else ""
