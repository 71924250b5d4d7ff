"""Checkpoints in FP8 and int8, written from the descriptions of their formats alone, and the model to compare with.

Nothing of the engine is used. The oracle is transformers' model in fp32 with the values that the codes stand for; hooks
round what goes into its linears as the scheme says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

LARGEST = {"e4m3": 448.0, "int8": 127.0}
E4M3 = torch.float8_e4m3fn
Sizes = tuple[int, int]


def _tile_maxima(values: torch.Tensor, tile: Sizes) -> torch.Tensor:
    """Return the largest magnitude of each element's tile."""
    out = torch.empty_like(values)
    for top in range(0, values.shape[0], tile[0]):
        for left in range(0, values.shape[1], tile[1]):
            part = values[top : top + tile[0], left : left + tile[1]]
            out[top : top + tile[0], left : left + tile[1]] = part.abs().max()
    return out


def _codes(values: torch.Tensor, element: str) -> torch.Tensor:
    clamped = values.clamp(-128 if element == "int8" else -LARGEST[element], LARGEST[element])
    return clamped.to(E4M3) if element == "e4m3" else clamped.round().to(torch.int8)


@dataclass(frozen=True)
class Layout:
    """A format of quantised weights in 8 bits, and how inputs are rounded."""

    config: Callable[[list[str]], dict[str, Any]]
    tile: Callable[[Sizes], Sizes]  # sizes of a weight -> sizes of its tiles
    scale_name: str
    scale: Callable[[torch.Tensor], torch.Tensor]  # scales [N, K], equal in a tile -> the stored scales
    inputs: int | str | None  # columns that share a scale, 0: whole rows; "static": a stored scale; None: not rounded
    config_file: str = ""
    element: str = "e4m3"


def compressed(
    strategy: str, inputs: dict[str, Any] | None, of: str = "float", **weights: Any
) -> Callable[[list[str]], dict[str, Any]]:
    def config(ignore: list[str]) -> dict[str, Any]:
        kind = {"num_bits": 8, "type": of, "symmetric": True}
        activations = None if inputs is None else kind | inputs
        group = {
            "targets": ["Linear"],
            "weights": kind | {"strategy": strategy, "dynamic": False} | weights,
            "input_activations": activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{of}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }

    return config


def _fp8(**fields: Any) -> Callable[[list[str]], dict[str, Any]]:
    def config(ignore: list[str]) -> dict[str, Any]:
        return {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ignore, **fields}

    return config


def _modelopt(ignore: list[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [f"{name}*" for name in ignore]}


TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
BLOCK: Sizes = (128, 128)
LAYOUTS = {
    "compressed-tensors, channel and token": Layout(
        compressed("channel", TOKEN), lambda s: (1, s[1]), "weight_scale", lambda s: s[:, :1].bfloat16(), 0
    ),
    "compressed-tensors, tensor, static": Layout(
        compressed("tensor", STATIC), lambda s: s, "weight_scale", lambda s: s[0, :1], "static"
    ),
    "compressed-tensors, tensor and token": Layout(
        compressed("tensor", TOKEN), lambda s: s, "weight_scale", lambda s: s[0, 0], 0
    ),
    "compressed-tensors, channel, weights alone": Layout(
        compressed("channel", None), lambda s: (1, s[1]), "weight_scale", lambda s: s[:, :1], None
    ),
    "compressed-tensors, block": Layout(
        compressed("block", GROUP, block_structure=[128, 128]),
        lambda s: BLOCK, "weight_scale", lambda s: s[::128, ::128], 128,
    ),
    "compressed-tensors, int8, channel and token": Layout(
        compressed("channel", TOKEN, "int"), lambda s: (1, s[1]), "weight_scale", lambda s: s[:, :1].bfloat16(), 0,
        element="int8",
    ),
    "compressed-tensors, int8, static": Layout(
        compressed("channel", STATIC, "int"), lambda s: (1, s[1]), "weight_scale", lambda s: s[:, :1], "static",
        element="int8",
    ),
    "fp8, block": Layout(
        _fp8(activation_scheme="dynamic", weight_block_size=[128, 128]),
        lambda s: BLOCK, "weight_scale_inv", lambda s: s[::128, ::128], 128,
    ),
    "fp8, tensor": Layout(_fp8(activation_scheme="dynamic"), lambda s: s, "weight_scale", lambda s: s[0, 0], 0),
    "fp8, static": Layout(_fp8(activation_scheme="static"), lambda s: s, "weight_scale", lambda s: s[0, 0], "static"),
    "modelopt": Layout(_modelopt, lambda s: s, "weight_scale", lambda s: s[0, 0], "static"),
    "modelopt, hf_quant_config.json": Layout(
        _modelopt, lambda s: s, "weight_scale", lambda s: s[0, 0], "static", "hf_quant_config.json"
    ),
}  # fmt: skip


def write_quantised(
    source: Path,
    folder: Path,
    layout: Layout,
    ignore: list[str],
    round_inputs: bool = True,
    kind: Any = AutoModelForCausalLM,
) -> nn.Module:
    """Write a checkpoint of transformers in a layout, and return the oracle. ignore: names of modules. round_inputs:
    the oracle's are rounded as the layout says. kind: the oracle's class."""
    model: Any = kind.from_pretrained(source, dtype=torch.float32).eval().requires_grad_(False)
    tensors = load_all(source)
    named = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and f"{path}.weight" in tensors}
    linears = {path: m for path, m in named.items() if path not in ignore}
    inputs = dict.fromkeys(linears, 0.0) if layout.inputs != "static" else _largest_inputs(model, linears)
    for path, module in linears.items():
        weight = tensors.pop(f"{path}.weight").float()
        maxima = _tile_maxima(weight, layout.tile(tuple(weight.shape)))  # type: ignore[arg-type]
        # The scale is rounded to what is stored before anything is divided by it.
        stored_dtype = layout.scale(maxima).dtype
        scales = (maxima / LARGEST[layout.element]).to(stored_dtype).float()
        codes = _codes(weight / scales, layout.element)
        tensors |= {f"{path}.weight": codes, f"{path}.{layout.scale_name}": layout.scale(scales).contiguous()}
        module.weight.copy_(codes.float() * scales)
        if layout.inputs == "static":
            scale = torch.tensor([inputs[path] / LARGEST[layout.element]])
            tensors[f"{path}.input_scale"] = scale
            if round_inputs:
                module.register_forward_pre_hook(_rounding(lambda x, scale=scale: scale, layout.element))
        elif layout.inputs is not None and round_inputs:
            dynamic = _dynamic(int(layout.inputs), layout.element)
            module.register_forward_pre_hook(_rounding(dynamic, layout.element))
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if layout.config_file:
        text = json.dumps({"quantization": layout.config(ignore)})
        (folder / layout.config_file).write_text(text)
    else:
        config["quantization_config"] = layout.config(ignore)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _largest_inputs(model: Any, linears: dict[str, nn.Module]) -> dict[str, float]:
    """Return the largest input of each linear in a calibration with random tokens.

    Linears with the same input have the same value.
    """
    found: dict[str, float] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            found[path] = float(arguments[0].abs().max())

        return hook

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in linears.items()]
    model(torch.randint(1, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return found


def _dynamic(group: int, element: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        maxima = _tile_maxima(rows, (1, group or rows.shape[1]))
        return (maxima / LARGEST[element]).reshape(x.shape)

    return scale


def _rounding(scale: Callable[[torch.Tensor], torch.Tensor], element: str) -> Callable[..., Any]:
    def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (x,) = arguments
        scales = scale(x)
        return (_codes(x / scales, element).float() * scales,)

    return hook
