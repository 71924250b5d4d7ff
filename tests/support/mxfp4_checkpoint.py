"""GPT-OSS's experts in MXFP4, written value by value from the format's description, and the model to compare with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import family, load_oracle, write_checkpoint
from safetensors.torch import load_file, save_file

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def write_mxfp4(folder: Path, num_layers: int = 2) -> Any:
    """Write a tiny GPT-OSS with random codes, and return transformers' model with what they stand for.

    num_layers: the first one has a window, the second none.
    """
    whole = folder / "whole"
    gpt_oss = family("gpt_oss")
    write_checkpoint(whole, replace(gpt_oss, changes={**gpt_oss.changes, "num_hidden_layers": num_layers}))
    tensors, values = load_file(whole / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = decoded(blocks, scales)
    packed = folder / "packed"
    packed.mkdir()
    config = json.loads((whole / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    save_file(tensors, packed / "model.safetensors")
    oracle = load_oracle(whole, torch.float32)
    oracle.load_state_dict(oracle.state_dict() | values)
    return oracle


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks [E, R, G, 16] and scales [E, R, G], as transformers orders them: [E, 32 G, R]."""
    codes_ERG32 = torch.stack((blocks & 15, blocks >> 4), -1).flatten(3)
    values_ERG32 = torch.tensor(VALUES)[codes_ERG32.long()] * 2.0 ** (scales.float() - 127)[..., None]
    return values_ERG32.flatten(2).transpose(1, 2).contiguous()
