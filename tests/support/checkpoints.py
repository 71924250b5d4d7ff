"""Tiny random checkpoints, built by transformers: what the tests load, and the model to compare with."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "qwen3_moe": Qwen3MoeConfig,
}

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 56,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_checkpoint(
    path: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> PreTrainedModel:
    """Write config.json and safetensors files of a random model; return that model in fp32, ready to use.

    family: a key of CONFIGS. dtype: what the files hold; the returned model has the values rounded to it.
    config_overrides: fields that differ from TINY. Nothing is left at zero or one: biases and norm weights
    are random as well, and matrices are scaled up so that next-token distributions are peaked.
    """
    config = CONFIGS[family](**(TINY | config_overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 3 / math.sqrt(parameter.shape[1]), generator=generator)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return load_checkpoint(path, torch.float32)


def load_checkpoint(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model as transformers loads it: parameters in `dtype`, rotary frequencies in fp32.

    Model.to would round the frequencies.
    """
    # By default transformers 5.17 leaves out the soft cap of Gemma 2.
    capped = getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None)
    attention = {"attn_implementation": "eager"} if capped else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **attention).eval().requires_grad_(False)


def write_first_layers(source: Path, folder: Path, num_layers: int) -> Path:
    """Write a checkpoint of the first layers of another one, in one file; return its folder."""
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers]}
    (folder / "config.json").write_text(json.dumps(config))
    later = tuple(f"model.layers.{layer}." for layer in range(num_layers, 100))
    tensors = load_file(source / "model.safetensors").items()
    save_file({name: each for name, each in tensors if not name.startswith(later)}, folder / "model.safetensors")
    return folder


def write_idle_layers(source: Path, folder: Path, num_layers: int) -> Path:
    """Write a checkpoint of the same shape whose layers behind the first ones add nothing; return its folder.

    It computes what `write_first_layers` does, and shares what is compiled for its source.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    idle = re.compile(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
    for name, each in tensors.items():
        if (match := idle.fullmatch(name)) and int(match[1]) >= num_layers:
            each.zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
