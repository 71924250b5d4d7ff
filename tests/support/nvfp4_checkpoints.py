"""Checkpoints in NVFP4, written code by code from the descriptions of their formats, and the model to compare with.

Nothing of the engine is used. The oracle is transformers' model in fp32 with the values that the codes stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from packed_checkpoints import Tensors, write_linears, write_section
from torch import nn

COMPRESSED, MODELOPT, BESIDE = "compressed-tensors", "modelopt", "modelopt, hf_quant_config.json"
FORMATS = (COMPRESSED, MODELOPT, BESIDE)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 16


def value_of(code: int) -> float:
    """Return the value of an e2m1 code: a sign bit, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def config_of(form: str, ignore: list[str]) -> dict[str, Any]:
    if form != COMPRESSED:
        patterns = [f"{name}*" for name in ignore]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": GROUP, "exclude_modules": patterns}
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP}
    group = {
        "targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": "local"}, "output_activations": None,
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ignore}
    return config | {"config_groups": {"group_0": group}}


def pack_weight(weight_NK: torch.Tensor, form: str) -> tuple[Tensors, torch.Tensor]:
    """Return a linear's tensors by the last parts of their names, and the values that they stand for, [N, K]."""
    N, K = weight_NK.shape
    whole = weight_NK.abs().max() / (448.0 * 6.0)
    groups = [slice(start, min(start + GROUP, K)) for start in range(0, K, GROUP)]
    maxima_NG = torch.stack([weight_NK[:, columns].abs().amax(1) for columns in groups], 1)
    local_NG = (maxima_NG / 6.0 / whole).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn)
    divisor = 1 / whole
    effective_NG = local_NG.float() / divisor if form == COMPRESSED else local_NG.float() * whole
    scales_NK = torch.cat([effective_NG[:, g : g + 1].expand(N, c.stop - c.start) for g, c in enumerate(groups)], 1)
    scaled_NK = weight_NK / scales_NK
    codes_NK = (scaled_NK.abs()[..., None] - torch.tensor(MAGNITUDES)).abs().argmin(-1) + 8 * (scaled_NK < 0)
    values_NK = torch.tensor([value_of(code) for code in range(16)])[codes_NK] * scales_NK
    packed = (codes_NK[:, 0::2] + 16 * codes_NK[:, 1::2]).to(torch.uint8)
    if form == COMPRESSED:
        found = {"weight_packed": packed, "weight_scale": local_NG, "weight_global_scale": divisor.view(1)}
        return found | {"input_global_scale": torch.tensor([123.0])}, values_NK
    found = {"weight": packed, "weight_scale": local_NG, "weight_scale_2": whole}
    return found | {"input_scale": torch.tensor(0.01)}, values_NK


def write_nvfp4(source: Path, folder: Path, form: str, ignore: list[str]) -> nn.Module:
    """Write a checkpoint of transformers in a format, and return the oracle. ignore: see `write_linears`."""
    model = write_linears(source, folder, lambda weight_NK: pack_weight(weight_NK, form), ignore)
    section = config_of(form, ignore)
    if form == BESIDE:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    else:
        write_section(folder, section)
    return model
