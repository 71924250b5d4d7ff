"""Bidirectional models of transformers, with the engine's calling convention.

Texts are packed into one sequence; only attention keeps them apart. A classifier's head runs transformers' code, which
receives pooled hidden states as if they were texts of one token.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.models.foreign.compat import mixed
from compiled_engine.models.foreign.interfaces import PACKED_NAME, Step
from compiled_engine.models.foreign.mechanisms import first_position, missing_mechanisms
from compiled_engine.models.foreign.observation import Observation, UnsupportedModelError, observe
from compiled_engine.models.foreign.own_attention import ENCODERS, adapt_own_attention


class Encoder(nn.Module):
    """A bidirectional model: wraps `model`, a model of transformers.

    step: holds the arguments of attention. token_types: number of token types; 0 if the model's code reads none. For
    layers_path, layer_signatures and layers_in_tuple see `Observation`.
    """

    def __init__(self, model: Any, observation: Observation, token_types: int) -> None:
        super().__init__()
        self.model, self.token_types = model, token_types
        self.first_position = first_position(model)
        self.step = Step([layer.sliding_window for layer in observation.attention])
        names = {id(module): name for name, module in self.named_modules()}
        self.layers_path = ""
        if observation.layers_path:
            self.layers_path = names[id(model.base_model.get_submodule(observation.layers_path))]
        self.layer_signatures, self.layers_in_tuple = observation.signatures, observation.in_tuple
        for module, layer in zip(observation.modules, observation.attention, strict=True):
            module.step, module.packed_window = self.step, layer.sliding_window  # type: ignore[assignment]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        token_types_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D]. kv_caches: not used. token_types_T: None: the types of all tokens are 0."""
        self.step.inputs = attention_inputs
        arguments = {}
        if self.token_types:
            types_T = torch.zeros_like(input_ids_T) if token_types_T is None else token_types_T
            arguments["token_type_ids"] = types_T.unsqueeze(0)
        if self.first_position:
            positions_T = self._counted(input_ids_T, positions_T)
        output = self.model.base_model(
            input_ids=input_ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), **arguments
        )
        return output[0].squeeze(0)

    def _counted(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return positions [T] as RoBERTa counts them, from first_position on, without counting padding tokens.

        Padding tokens may also occur within a text. All of them have the position first_position - 1.
        """
        padding = self.first_position - 1
        is_padding_T = (input_ids_T == padding).to(positions_T.dtype)
        places_T = torch.arange(positions_T.shape[0], dtype=positions_T.dtype, device=positions_T.device)
        starts_T = (places_T - positions_T).clamp(min=0)  # index of the first token of each token's text
        num_padding_T = is_padding_T.cumsum(0, dtype=positions_T.dtype)
        before_T = num_padding_T[starts_T] - is_padding_T[starts_T]
        counted_T = positions_T + self.first_position - (num_padding_T - before_T)
        return torch.where(is_padding_T == 1, padding, counted_T)


class Classifier(Encoder):
    """An encoder with a classification head, which computes in fp32."""

    @property
    def heads(self) -> list[nn.Module]:
        """The modules that compute logits from pooled hidden states."""
        return _heads(self.model)

    def pooler(self, pooled_RW: torch.Tensor) -> torch.Tensor:
        """Return logits [R, L] of L labels from pooled hidden states [R, W]."""
        return self.model(inputs_embeds=pooled_RW.unsqueeze(1), hand_on=True).logits


class Base:
    """Mixin for a classifier's base model, which allows the classifier's head to run alone.

    With hand_on=True, forward does not run the layers: it returns its input embeddings as hidden states, together with
    the pooler's output for them.
    """

    pooler: Any

    def forward(self, *arguments: Any, hand_on: bool = False, **keywords: Any) -> Any:
        if hand_on:
            return HandedOn(keywords["inputs_embeds"], getattr(self, "pooler", None))
        return super().forward(*arguments, **keywords)  # type: ignore[misc]


class HandedOn:
    """Takes the place of the base model's output when a classifier's head runs alone.

    last_hidden_state: hidden states that were computed earlier. pooler_output: the pooler's result for them; None if
    there is no pooler. All other outputs are None.
    """

    hidden_states = attentions = cross_attentions = cache = past_key_values = None

    def __init__(self, last_hidden_state: torch.Tensor, pooler: Any) -> None:
        self.last_hidden_state = last_hidden_state
        self.pooler_output = None if pooler is None else pooler(last_hidden_state, in_head=True)

    def __getitem__(self, index: int) -> Any:
        return (self.last_hidden_state, self.pooler_output)[index]


class PoolerOfHead:
    """Mixin for the pooler of a classifier's base model: runs only as a part of the classifier's head.

    With in_head=True, forward returns the pooler's result. Otherwise the base model calls it, and it returns None.
    """

    def forward(self, hidden_states: torch.Tensor, *, in_head: bool = False) -> Any:
        return super().forward(hidden_states) if in_head else None  # type: ignore[misc]


def make_encoder(
    config: PreTrainedConfig, auto: Any, dtype: torch.dtype, *, classifies: bool
) -> tuple[Encoder, Observation] | None:
    """Build a bidirectional model on the meta device and observe it. Returns None if its attention is causal.

    auto: the Auto class of transformers that builds the model. classifies: whether the model has a classifier's head.
    Raises UnsupportedModelError for features that the engine lacks.
    """
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, attn_implementation=PACKED_NAME, trust_remote_code=False)
    model = model.eval().requires_grad_(False)
    base = model.base_model
    if missing := missing_mechanisms(config, model, encodes=True):
        raise UnsupportedModelError(f"it needs {', '.join(missing)}, which the engine does not have")
    if "position_ids" not in (known := inspect.signature(base.forward).parameters):
        raise UnsupportedModelError("its code takes no positions")
    adapt_own_attention(base, ENCODERS)
    observation = observe(base, config.num_hidden_layers, encodes=True)
    if observation.attention[0].causal:
        return None
    if not classifies:
        if getattr(base, "pooler", None) is not None:
            base.pooler = None
        return Encoder(model, observation, _token_types(config, known)), observation
    _adapt_head(model)
    made = Classifier(model, observation, _token_types(config, known))
    logits = made.pooler(torch.empty(2, config.hidden_size, dtype=torch.float32, device="meta"))
    if logits.shape != (2, config.num_labels):
        raise UnsupportedModelError(f"its head makes {list(logits.shape)} of two texts with {config.num_labels} labels")
    return made, observation


def _token_types(config: PreTrainedConfig, parameters: Any) -> int:
    count = getattr(config, "type_vocab_size", 0)
    return count if isinstance(count, int) and "token_type_ids" in parameters else 0


def _heads(model: Any) -> list[nn.Module]:
    base = model.base_model
    pooler = getattr(base, "pooler", None)
    return [*(child for child in model.children() if child is not base), *([] if pooler is None else [pooler])]


def _adapt_head(model: Any) -> None:
    base = model.base_model
    for head in _heads(model):
        head.to(torch.float32)
    if (pooler := getattr(base, "pooler", None)) is not None:
        pooler.__class__ = mixed(PoolerOfHead, type(pooler))
    base.__class__ = mixed(Base, type(base))
