"""Heads of the bundled model in training, one class for each method of drafting: an EAGLE-3 head and an MTP layer.

Both have the methods of `TrainedHead`. The textbook's modules hold their parameters, so that a trained head has the
names and the shapes that the engine reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.textbook.architectures import ARCHITECTURES
from compiled_engine.models.textbook.eagle3 import EAGLE3, Eagle3Head
from compiled_engine.models.textbook.llama import Attention
from compiled_engine.models.textbook.mtp import make_mtp_layer

# The layers whose inputs an EAGLE-3 head reads.
LAYERS = (1, 3, 5)
# Names of an MTP layer's modules in the checkpoint, by those in the textbook.
MTP_NAMES = {
    "mtp.embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "mtp.hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "mtp.proj.": "mtp.fc.",
    "model.layers.0.": "mtp.layers.0.",
    "model.norm.": "mtp.norm.",
}

# Computes attention of a module for its inputs.
Attend = Callable[[Attention, Tensor], Tensor]


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that determines the head besides model, corpus and machine; `metadata["help"]` describes each."""

    method: str = field(default="eagle3", metadata={"help": "eagle3: an EAGLE-3 head; mtp: an MTP layer"})
    steps: int = field(default=6000, metadata={"help": "training steps"})
    batch_tokens: int = field(default=16_384, metadata={"help": "tokens a step"})
    window: int = field(default=512, metadata={"help": "length of the training windows"})
    test_steps: int = field(default=4, metadata={"help": "steps of the head in each training step, the first included"})
    decay: float = field(default=0.8, metadata={"help": "factor of the loss from each of these to the next"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak; ends at zero"})
    draft_vocab: int = field(
        default=2048,
        metadata={"help": "most frequent tokens of the corpus that the head knows; an MTP layer knows all"},
    )
    intermediate_size: int = field(
        default=384, metadata={"help": "rows of the head's MLP; that of an MTP layer is as the model's"}
    )
    seed: int = field(default=0, metadata={"help": "of initial weights and windows"})

    def __post_init__(self) -> None:
        """Raise ValueError for the first field that is out of range."""
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("steps", "test_steps", "draft_vocab", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.test_steps + 2 <= self.window <= self.batch_tokens:
            raise ValueError(f"window must be from test_steps + 2 to batch_tokens, got {self.window}")


class TrainedHead(Protocol):
    """A head in fp32, made on the CPU. In shapes, B are windows, T positions, V the tokens that the head knows."""

    model: nn.Module  # all parameters, those of the bundled model too
    trained: nn.ModuleList  # the modules that are trained
    known_V: Tensor  # the model's token for each token of the head, int64

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return features [B, T, D]. hidden_states: the bundled model's, as transformers returns them."""

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the embeddings [B, T, D] of tokens."""

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the rotary angles, [T, 1, d] each."""

    def run(self, embedded_BTD: Tensor, features_BTD: Tensor, attend: Attend) -> Tensor:
        """Return the features [B, T, D] of the next position, from the embeddings of the next tokens."""

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits [B, T, V]. hidden_BTD: results of `run`."""

    def save(self, out: Path) -> None:
        """Write to a folder, in bf16, the checkpoint that `engine_options` names."""


class Eagle3:
    """An EAGLE-3 head: the model's embedding and rows of its output projection, and random weights."""

    def __init__(self, recipe: HeadRecipe, target: PreTrainedModel, known_V: Tensor) -> None:
        """Make the head. target: the bundled model. known_V: the tokens that the head knows, ascending."""
        model = bundled_shape()
        head = HeadConfig(target_size=model.hidden_size, num_aux_layers=len(LAYERS), vocab_size=len(known_V))
        self.shape = replace(
            one_layer(model),
            architecture=EAGLE3,
            intermediate_size=recipe.intermediate_size,
            tie_word_embeddings=False,
            head=head,
        )
        self.model, self.known_V = Eagle3Head(self.shape, head), known_V
        fill_at_random(self.model, recipe.seed)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(_weight(target.get_input_embeddings()))
            self.model.lm_head.weight.copy_(_weight(target.get_output_embeddings())[known_V])
        self.model.embed_tokens.requires_grad_(False)
        self.trained = nn.ModuleList([self.model.fc, self.model.layers, self.model.norm, self.model.lm_head])

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return self.model.combine(torch.cat([hidden_states[layer] for layer in LAYERS], -1))

    def embed(self, ids_BT: Tensor) -> Tensor:
        return self.model.embed_tokens(ids_BT)

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.rotary_emb(positions_T)

    def run(self, embedded_BTD: Tensor, features_BTD: Tensor, attend: Attend) -> Tensor:
        layer: Any = self.model.layers[0]
        both = torch.cat((layer.input_layernorm(embedded_BTD), layer.hidden_norm(features_BTD)), -1)
        x = features_BTD + attend(layer.self_attn, both)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return self.model.logits(hidden_BTD)

    def save(self, out: Path) -> None:
        """Write the head in the original's spelling, without the embedding, which is the model's."""
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in stored(self.model).items()
            if not name.startswith("embed_tokens.")
        }
        distances = self.known_V.cpu() - torch.arange(len(self.known_V))
        save_file(tensors | {"d2t": distances}, out / "model.safetensors", metadata={"format": "pt"})
        shape = self.shape
        fields = {
            "architectures": [EAGLE3],
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": len(self.known_V),
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_position_embeddings,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope.theta,
            "hidden_act": "silu",
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "torch_dtype": "bfloat16",
        }
        (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


class Mtp:
    """An MTP layer: the model's embedding, output projection and last norm, and random weights.

    The last norm is trained; embedding and output projection stay the model's.
    """

    def __init__(self, recipe: HeadRecipe, target: PreTrainedModel, known_V: Tensor) -> None:
        """Make the layer. target: the bundled model. known_V: not used, as the layer knows all tokens."""
        shape = bundled_shape()
        shape = replace(one_layer(shape), head=HeadConfig(shape.hidden_size, 0, shape.vocab_size))
        self.model = make_mtp_layer(ARCHITECTURES[shape.architecture](shape), shape)
        self.model.mtp.proj.to_empty(device="cpu")
        self.known_V = torch.arange(shape.vocab_size)
        fill_at_random(self.model, recipe.seed)
        with torch.no_grad():
            self.model.model.embed_tokens.weight.copy_(_weight(target.get_input_embeddings()))
            self.model.model.norm.weight.copy_(_weight(target.get_decoder().norm))
        self.trained = nn.ModuleList([self.model.mtp, self.model.model.layers, self.model.model.norm])
        self.model.requires_grad_(False)
        self.trained.requires_grad_(True)

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return hidden_states[-1]

    def embed(self, ids_BT: Tensor) -> Tensor:
        return self.model.embed(ids_BT)

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.model.rotary_emb(positions_T)

    def run(self, embedded_BTD: Tensor, features_BTD: Tensor, attend: Attend) -> Tensor:
        layer, norm = self.model.model.layers[0], self.model.model.norm
        x = self.model.mtp(embedded_BTD, features_BTD, norm.weight)
        x = x + attend(layer.self_attn, layer.input_layernorm(x))
        return norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return self.model.logits(hidden_BTD)

    def save(self, out: Path) -> None:
        """Write the bundled model, and beside it the layer in a file of its own, with an index of both."""
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(BUNDLED_MODEL_PATH / name, out / name)
        layer = {
            name.replace(own, theirs): tensor
            for name, tensor in stored(self.model).items()
            for own, theirs in MTP_NAMES.items()
            if name.startswith(own)
        }
        shutil.copyfile(BUNDLED_MODEL_PATH / "model.safetensors", out / "model.safetensors")
        save_file(layer, out / "mtp.safetensors", metadata={"format": "pt"})
        files = dict.fromkeys(load_file(out / "model.safetensors"), "model.safetensors")
        files |= dict.fromkeys(layer, "mtp.safetensors")
        index = {"metadata": {}, "weight_map": dict(sorted(files.items()))}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


METHODS: dict[str, type[Eagle3] | type[Mtp]] = {"eagle3": Eagle3, "mtp": Mtp}


def engine_options(method: str, out: Path, num_drafts: int) -> dict[str, Any]:
    """Return the options of an engine of the bundled model that drafts with the head in a folder."""
    if method == "mtp":
        return {"model": str(out), "speculative_config": {"method": method, "num_speculative_tokens": num_drafts}}
    drafts = {"method": method, "model": str(out), "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts}


def bundled_shape() -> ModelConfig:
    """Return the configuration of the bundled model in fp32."""
    model, _ = read_model_config(
        BUNDLED_MODEL_PATH, dtype="float32", max_model_len=None, load_format="auto", seed=0, device_type="cpu"
    )
    return model


def one_layer(model: ModelConfig) -> ModelConfig:
    return replace(model, num_layers=1, sliding_windows=(None,))


def fill_at_random(model: nn.Module, seed: int) -> None:
    """Fill matrices with normal noise, and other parameters with ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1.0)


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters by name, in bf16 on the CPU."""
    return {name: each.detach().cpu().bfloat16().contiguous() for name, each in model.named_parameters()}


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight
