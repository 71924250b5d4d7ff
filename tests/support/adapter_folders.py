"""Random LoRA adapters in PEFT's layout, and the same weights merged by plain torch, to compare outputs with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_checkpoint
from safetensors.torch import save_file
from torch import nn

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.models.checkpoint.adapter_folder import read_adapter

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# The shape of the model that engines have adapters for. With these options on a CPU they share what is compiled.
BASE: dict[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "num_blocks": 64,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 64,
    "max_cpu_loras": 3,
}


def make_adapter(
    path: Path,
    model: nn.Module,
    rank: int = 4,
    *,
    targets: Sequence[str] = LINEARS,
    seed: int = 0,
    size: float = 1.0,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter of the linears of `model` whose names end in `targets`; return its folder.

    ranks: of linears with these endings. size: of its changes, relative to the weights'. config: further fields. The
    weight of an output projection that is adapted is there too, as PEFT saves it.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.endswith(tuple(targets)):
            continue
        r = next((r for ending, r in (ranks or {}).items() if name.endswith(ending)), rank)
        rows, columns = module.weight.shape
        scale = size * float(module.weight.std()) / math.sqrt(r)
        a_RK = torch.randn(r, columns, generator=generator)
        b_NR = torch.randn(rows, r, generator=generator) * scale
        prefix = f"base_model.model.{name}"
        tensors |= {f"{prefix}.lora_A.weight": a_RK.to(dtype), f"{prefix}.lora_B.weight": b_NR.to(dtype)}
        if name == "lm_head":
            tensors[f"{prefix}.base_layer.weight"] = module.weight.detach().to(dtype, copy=True)
        if config.get("use_dora"):
            tensors[f"{prefix}.lora_magnitude_vector"] = 0.5 + torch.rand(rows, generator=generator).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": list(targets)}
    patterns = {"rank_pattern": dict(ranks)} if ranks else {}
    (path / "adapter_config.json").write_text(json.dumps(fields | patterns | config))
    return path


def digest_of(folder: Path) -> str:
    """Return the digest that an adapter's folder has now."""
    return read_adapter(folder, values=False).digest


def merged(base: Path, adapter: Path | None) -> nn.Module:
    """Return transformers' model with an adapter merged; the embedding stays as it is."""
    model = load_checkpoint(base, torch.float32)
    return model if adapter is None else merge(model, adapter)


def merge(model: nn.Module, adapter: Path) -> nn.Module:
    """Replace each adapted weight W of a model by W + scale * B A, in place."""
    for name, each in read_adapter(adapter).linears.items():
        module = model.get_submodule(name)
        changed_NK = module.weight + each.scale * (each.b_NR @ each.a_RK)
        module.weight = nn.Parameter(changed_NK, requires_grad=False)
    return model


def assert_is_of(model: nn.Module, output: RequestOutput) -> None:
    """Assert that an output has the model's prompt log-probabilities to 3e-4, and the model's most likely tokens."""
    ids, new = output.prompt_token_ids, output.outputs[0].token_ids
    logits = model(torch.tensor([[*ids, *new]])).logits[0]
    expected = logits.log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, token_id in enumerate(ids[1:], 1):
        found = output.prompt_logprobs[position]
        assert found is not None
        assert abs(found[token_id].logprob - float(expected[position - 1, token_id])) < 3e-4
    assert list(new) == logits[len(ids) - 1 : -1].argmax(-1).tolist()
