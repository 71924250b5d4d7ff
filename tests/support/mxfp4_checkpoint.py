"""GPT-OSS's experts in MXFP4, written value by value from the format's description, and the model to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from families import family, load_oracle, write_checkpoint
from safetensors.torch import load_file, save_file

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def write_mxfp4(folder: Path) -> Any:
    """Write a tiny GPT-OSS with random codes, and return transformers' model with what they stand for."""
    whole = folder / "whole"
    write_checkpoint(whole, family("gpt_oss"))
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
    E, R, G, _ = blocks.shape
    found = torch.zeros(E, 32 * G, R)
    stored, powers = blocks.tolist(), scales.tolist()
    for e in range(E):
        for row in range(R):
            for group in range(G):
                scale = 2.0 ** (powers[e][row][group] - 127)
                for place, byte in enumerate(stored[e][row][group]):
                    found[e, 32 * group + 2 * place, row] = VALUES[byte & 15] * scale
                    found[e, 32 * group + 2 * place + 1, row] = VALUES[byte >> 4] * scale
    return found
