"""Checkpoints of integers in four and 8 bits, written code by code from the descriptions of their formats, and the
model to compare with.

Nothing of the engine is used. The oracle is transformers' model in fp32 with the values that the codes stand for.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantised_checkpoints import load_all
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
# Returns the tensors of a linear by the last part of their names, and the values that they stand for, [N, K].
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
# Names of an expert's projections in older families.
OLD_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Packing:
    """A format of packed integer weights."""

    method: str  # of quantization_config
    columns: int  # of a group; 0: whole rows
    is_symmetric: bool
    is_reordered: bool = False  # groups have any columns, the same in all linears with as many columns
    scale_dtype: torch.dtype = torch.float16
    bits: int = 4

    @property
    def middle(self) -> int:
        """The code that stands for zero in formats without zero points."""
        return 2 ** (self.bits - 1)

    def config(self, ignore: list[str]) -> dict[str, Any]:
        if self.method == "compressed-tensors":
            weights = {
                "num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric, "dynamic": False,
                "strategy": "group" if self.columns else "channel", "group_size": self.columns or None,
                "actorder": "group" if self.is_reordered else None,
            }  # fmt: skip
            group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
            return {
                "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore,
                "config_groups": {"group_0": group},
            }  # fmt: skip
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.columns or -1, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": ignore,
            }  # fmt: skip
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.columns or -1, "sym": self.is_symmetric,
            "desc_act": self.is_reordered, "checkpoint_format": self.method, "lm_head": "lm_head" not in ignore,
            "dynamic": {f"-:{name.replace('.', chr(92) + '.')}$": {} for name in ignore if name != "lm_head"},
        }  # fmt: skip


PACKINGS = {
    "compressed-tensors, groups": Packing("compressed-tensors", 32, True, scale_dtype=torch.bfloat16),
    "compressed-tensors, zero points": Packing("compressed-tensors", 128, False, scale_dtype=torch.bfloat16),
    "compressed-tensors, rows": Packing("compressed-tensors", 0, False),
    "compressed-tensors, reordered": Packing("compressed-tensors", 64, True, True),
    "gptq": Packing("gptq", 128, True),
    "gptq, zero points": Packing("gptq", 32, False),
    "gptq, rows": Packing("gptq", 0, True),
    "gptq, reordered": Packing("gptq", 64, False, True),
    "gptq_v2": Packing("gptq_v2", 64, False),
    "awq": Packing("awq", 128, False),
    "awq, small groups": Packing("awq", 32, False),
    "compressed-tensors, 8 bits": Packing("compressed-tensors", 0, True, scale_dtype=torch.bfloat16, bits=8),
    "compressed-tensors, 8 bits, zero points": Packing("compressed-tensors", 32, False, True, bits=8),
    "gptq, 8 bits": Packing("gptq", 128, True, True, bits=8),
    "gptq, 8 bits, zero points": Packing("gptq", 32, False, bits=8),
}


def groups_of(packing: Packing, num_columns: int) -> list[int]:
    """Return the number of the group of each column."""
    size = packing.columns or num_columns
    groups = [column // size for column in range(num_columns)]
    if not packing.is_reordered:
        return groups
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns)).tolist()
    found = [0] * num_columns
    for place, column in enumerate(order):
        found[column] = groups[place]
    return found


def round_weight(
    weight_NK: torch.Tensor, packing: Packing, groups: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a weight. Returns unsigned codes [N, K], scales and zero points [N, G] of the groups.

    Scales are rounded to the dtype in which they are stored.
    """
    N, G = len(weight_NK), max(groups) + 1
    of_group = [torch.tensor([k for k, group in enumerate(groups) if group == g]) for g in range(G)]
    codes_NK = torch.zeros(weight_NK.shape, dtype=torch.int64)
    scales_NG, zeros_NG = torch.zeros(N, G), torch.zeros(N, G, dtype=torch.int64)
    for g, columns in enumerate(of_group):
        part = weight_NK[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        most, middle = 2**packing.bits - 1, packing.middle
        scale = part.abs().amax(1) / (most / 2) if packing.is_symmetric else (high - low) / most
        scale = scale.clamp(min=1e-5).to(packing.scale_dtype).float()
        zero = torch.full((N,), float(middle)) if packing.is_symmetric else (-low / scale).round().clamp(1, most)
        codes_NK[:, columns] = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, most).long()
        scales_NG[:, g], zeros_NG[:, g] = scale, zero.long()
    return codes_NK, scales_NG, zeros_NG


def words_of(rows: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack neighbouring values of each row into words of 32 bits. Rows are filled up with zeros.

    order: the value that each place of a word holds, from the lowest bits on; empty: in ascending order.
    """
    count = 32 // bits
    missing = -rows.shape[1] % count
    rows = torch.cat([rows, torch.zeros(len(rows), missing, dtype=rows.dtype)], 1)
    words = torch.zeros(len(rows), rows.shape[1] // count, dtype=torch.int64)
    for place, value in enumerate(order or range(count)):
        words += rows[:, value::count] * 2 ** (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_weight(weight_NK: torch.Tensor, packing: Packing) -> tuple[Tensors, torch.Tensor]:
    """Return a linear's tensors by the last parts of their names, and the values that they stand for, [N, K]."""
    groups = groups_of(packing, weight_NK.shape[1])
    codes_NK, scales_NG, zeros_NG = round_weight(weight_NK, packing, groups)
    values_NK = (codes_NK - zeros_NG[:, groups]).float() * scales_NG[:, groups]
    scales = scales_NG.to(packing.scale_dtype)
    if packing.method == "compressed-tensors":
        shape = torch.tensor(weight_NK.shape)
        found = {"weight_packed": words_of(codes_NK, packing.bits), "weight_scale": scales, "weight_shape": shape}
        if not packing.is_symmetric:
            found["weight_zero_point"] = words_of(zeros_NG.t(), packing.bits).t()
        if packing.is_reordered:
            found["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    elif packing.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {"qweight": words_of(codes_NK.t(), 4, order), "qzeros": words_of(zeros_NG.t(), 4, order)}
        found["scales"] = scales.t()
    else:
        less = 1 if packing.method == "gptq" else 0
        zeros = words_of(zeros_NG.t() - less, packing.bits)
        found = {"qweight": words_of(codes_NK, packing.bits).t(), "qzeros": zeros}
        found |= {"scales": scales.t(), "g_idx": torch.tensor(groups, dtype=torch.int32)}
    return {name: tensor.contiguous() for name, tensor in found.items()}, values_NK


def write_packed(source: Path, folder: Path, packing: Packing, ignore: list[str]) -> nn.Module:
    """Write a checkpoint of transformers in a format, and return the oracle. ignore: see `write_linears`."""
    model = write_linears(source, folder, lambda weight_NK: pack_weight(weight_NK, packing), ignore)
    write_section(folder, packing.config(ignore))
    return model


def write_linears(
    source: Path, folder: Path, pack: Pack, ignore: list[str], kind: Any = AutoModelForCausalLM
) -> nn.Module:
    """Write a checkpoint with packed linears, without a section about them. See `write_packed`.

    ignore: names of modules in the checkpoint, with `*` for any text, or `re:` and a regular expression. kind: the
    oracle's class.
    """
    model: Any = kind.from_pretrained(source, dtype=torch.float32).eval().requires_grad_(False)
    tensors = load_all(source)
    patterns = [re.compile(each[3:] if each.startswith("re:") else fnmatch.translate(each)) for each in ignore]

    def replaced(name: str) -> torch.Tensor | None:
        """Replace a weight by its packed tensors. Returns their values; None if the weight stays."""
        module = name.removesuffix(".weight")
        if name not in tensors or any(pattern.match(module) for pattern in patterns):
            return None
        packed, values_NK = pack(tensors.pop(name).float())
        tensors.update({f"{module}.{kind}": tensor for kind, tensor in packed.items()})
        return values_NK

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (values_NK := replaced(f"{path}.weight")) is not None:
            module.weight.copy_(values_NK)
    for name in [name for name in tensors if OF_EXPERT.fullmatch(name)]:
        path, expert, part = OF_EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        if (values_NK := replaced(name)) is not None:
            matrix_of(model, path, int(expert), part).copy_(values_NK)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, folder / "model.safetensors")
    return model


def matrix_of(model: Any, path: str, expert: int, part: str) -> torch.Tensor:
    """Return a projection of an expert in transformers' model, by the names of the checkpoint."""
    experts = model.get_submodule(path.replace("block_sparse_moe", "mlp"))
    part = OLD_NAMES.get(part, part)
    matrices = experts.down_proj if part == "down_proj" else experts.gate_up_proj.chunk(2, 1)[part == "up_proj"]
    matrix: torch.Tensor = matrices[expert]
    return matrix


def write_section(folder: Path, section: dict[str, Any]) -> None:
    """Write quantization_config of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
