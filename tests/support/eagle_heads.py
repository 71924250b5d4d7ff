"""EAGLE-3 heads in the spellings of their checkpoints: random ones, one of the bundled model, and one that is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkpoints import load_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

HEADS, HEAD_DIM = 4, 16
Tensors = dict[str, torch.Tensor]


def head_config(target: Path, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a head for a model, in the format of EAGLE-3's authors."""
    model = json.loads((target / "config.json").read_text())
    num_layers = model.get("num_hidden_layers")
    if num_layers is None:  # some families' files have the kinds of the layers in place of their number
        num_layers = AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 32,  # fewer than the model's
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [0, 1, num_layers - 1],
        **changes,
    }


def random_tensors(
    config: dict[str, Any], seed: int = 0, *, num_aux_layers: int = 3, norm_before_fc: bool = False
) -> Tensors:
    """Return all tensors of a head except an embedding, under the names of speculators' format."""
    size, vocab = config["hidden_size"], config.get("draft_vocab_size", config["vocab_size"])
    wide, rows = config.get("target_hidden_size", size) * num_aux_layers, config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc.weight": (size, wide),
        "layers.0.self_attn.q_proj.weight": (query, 2 * size),
        "layers.0.self_attn.k_proj.weight": (key, 2 * size),
        "layers.0.self_attn.v_proj.weight": (key, 2 * size),
        "layers.0.self_attn.o_proj.weight": (size, query),
        "layers.0.mlp.gate_proj.weight": (rows, size),
        "layers.0.mlp.up_proj.weight": (rows, size),
        "layers.0.mlp.down_proj.weight": (size, rows),
        "lm_head.weight": (vocab, size),
    }
    norms = ["layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for name in norms}
    if norm_before_fc:
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(wide, generator=generator)
    if vocab < config["vocab_size"]:
        known = torch.randperm(config["vocab_size"], generator=generator)[:vocab].sort().values
        tensors["d2t"] = known - torch.arange(vocab)
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors, *, layer: str = "layers.0") -> Path:
    """Write a head's folder, and return it.

    layer: the name of the decoder layer in the file, `midlayer` in all formats but speculators'.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {name.replace("layers.0", layer): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a head's config.json in speculators' format."""
    own = ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "norm_before_residual", "norm_before_fc")
    layer = {name: value for name, value in config.items() if name not in (*own, "architectures")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        **{name: config[name] for name in own if name in config},
    }


def specforge_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a head's config.json as SpecForge writes it, with layers counted by their outputs."""
    others = {name: value for name, value in config.items() if name != "eagle_aux_hidden_state_layer_ids"}
    ids = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
    return others | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


def sharp_attention(config: dict[str, Any], tensors: Tensors, values: torch.Tensor, sharpness: float = 30.0) -> None:
    """Let each position attend to itself alone: equal queries and keys, which only their rotation tells apart.

    values: [D, 2D], from the normalised embedding and the normalised features to what attention adds.
    """
    size = config["hidden_size"]
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": size, "attention_bias": True}
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.zeros(2 * size, 2 * size)
        tensors[f"layers.0.self_attn.{name}.bias"] = torch.zeros(2 * size)
    tensors["layers.0.self_attn.v_proj.weight"] += torch.eye(2 * size)
    for name in ("q_proj", "k_proj"):
        tensors[f"layers.0.self_attn.{name}.bias"] += sharpness * size**-0.25
    tensors["layers.0.self_attn.o_proj.weight"] = values
    tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(size)
    tensors["layers.0.mlp.down_proj.weight"] = torch.zeros(size, config["intermediate_size"])
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"layers.0.{name}.weight"] = torch.ones(size)


def make_bigram_model(folder: Path) -> None:
    """Change the model in a folder so that a token's logits depend on the token before it alone: layers add nothing."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})


def write_exact_head(folder: Path, target: Path, factor: float = 1.0) -> Path:
    """Write a head that always drafts the tokens of a model changed by `make_bigram_model`. factor: of its logits.

    Attention puts the normalised embedding in the place of the features, whose norm does not change them.
    """
    model = load_file(target / "model.safetensors")
    config = head_config(target)
    tensors = random_tensors(config)
    one = torch.eye(config["hidden_size"])
    sharp_attention(config, tensors, torch.cat((one, -one), 1))
    tensors["fc.weight"].zero_()
    tensors["norm.weight"] = model["model.norm.weight"]
    tensors["lm_head.weight"] = factor * model.get("lm_head.weight", model["model.embed_tokens.weight"])
    return write_head(folder, config, tensors)


def write_fitted_head(folder: Path, target: Path, token_ids: torch.Tensor) -> Path:
    """Write a head for a model that is right in some drafts and wrong in others.

    It is the best linear function, over the tokens [N, L], from the input of the last layer and the next token's
    embedding to the last hidden state.
    """
    model = load_checkpoint(target, torch.float32)
    with torch.no_grad():
        states = model(token_ids, output_hidden_states=True).hidden_states
        found: dict[str, torch.Tensor] = {}
        model.model.norm.register_forward_pre_hook(lambda module, given: found.update(last=given[0]))
        model(token_ids)
    last, embedded = states[-2][:, :-1].flatten(0, 1), states[0][:, 1:].flatten(0, 1)
    wanted = found["last"][:, 1:].flatten(0, 1)
    normalised = embedded * (embedded.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    known = torch.cat((last, normalised), 1)
    size = last.shape[1]
    square = known.T @ known + 1e-2 * len(known) * torch.eye(2 * size)
    fitted = torch.linalg.solve(square, known.T @ wanted).T
    config = head_config(target)
    tensors = random_tensors(config)
    sharp_attention(config, tensors, torch.cat((fitted[:, size:], torch.zeros(size, size)), 1))
    tensors["fc.weight"] = torch.cat((torch.zeros(size, 2 * size), fitted[:, :size]), 1)
    tensors["norm.weight"] = model.model.norm.weight.detach().clone()
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    return write_head(folder, config, tensors)


class Reference:
    """A head in plain torch, which computes whole sequences without a cache."""

    def __init__(self, target: Path, config: dict[str, Any], tensors: Tensors) -> None:
        self.model, self.config, self.tensors = load_checkpoint(target, torch.float32), config, tensors

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def layer(self, token_ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """Return the head's hidden states [T, D] of positions from 0 on."""
        config, tensors = self.config, {name.removeprefix("layers.0."): each for name, each in self.tensors.items()}
        d = config["head_dim"]
        embedded = self.model.get_input_embeddings()(torch.tensor(token_ids))
        normalised = self.norm("layers.0.hidden_norm", features)
        x = torch.cat((self.norm("layers.0.input_layernorm", embedded), normalised), -1)
        q, k, v = (
            (x @ tensors[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, d)).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(len(token_ids))[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        q, k = (y * cos + torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        residual = normalised if config.get("norm_before_residual") else features
        x = residual + attended @ tensors["self_attn.o_proj.weight"].T
        y = self.norm("layers.0.post_attention_layernorm", x)
        gated = F.silu(y @ tensors["mlp.gate_proj.weight"].T) * (y @ tensors["mlp.up_proj.weight"].T)
        return x + gated @ tensors["mlp.down_proj.weight"].T

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the `count` most probable tokens after token_ids, whose last token the model has not computed."""
        features, behind, found = self.features(token_ids[:-1]), token_ids[1:], []
        for _ in range(count):
            hidden = self.layer(behind, features)
            best = int(self.logits(hidden[-1]).argmax())
            found.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            features, behind = torch.cat((features, hidden[-1:])), [*behind, found[-1]]
        return found

    def features(self, token_ids: list[int]) -> torch.Tensor:
        """Return the head's features [T, D] at each of these tokens, from the model's hidden states."""
        states = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        aux_hidden_states = torch.cat(
            [states[layer][0] for layer in self.config["eagle_aux_hidden_state_layer_ids"]], -1
        )
        if self.config.get("norm_before_fc"):
            aux_hidden_states = self.norm("input_norm", aux_hidden_states)
        return aux_hidden_states @ self.tensors["fc.weight"].T

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary."""
        return self.norm("norm", hidden) @ self.tensors["lm_head.weight"].T
