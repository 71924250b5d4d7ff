"""Linears that the package compressed-tensors compresses are read as the values that it decompresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.quantisation_config import read_quantisation
from compiled_engine.models.checkpoint.quantised_tensors import decode_scaled, encoded, find_stored
from compiled_engine.models.checkpoint.weight_formats import read_weights
from compiled_engine.models.foreign.placement import whole

NAME = "model.layers.0.mlp.up_proj"
PRESETS = {
    "W8A8": "int-quantized",
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
}


def of_tiles(weight_NK: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest values of each tile."""
    tiles = weight_NK.unflatten(1, (-1, arguments.group_size or weight_NK.shape[1]))
    return tiles.amin(-1), tiles.amax(-1)


@pytest.mark.parametrize("preset", PRESETS)
def test_values_are_those_that_are_decompressed(preset: str) -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(PRESETS[preset])
    weight_NK = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    state: dict[str, torch.Tensor] = {"weight": weight_NK}
    if preset.startswith("NVFP4"):
        state["weight_global_scale"] = generate_gparam(weight_NK.min(), weight_NK.max()).view(1)
        state["input_global_scale"] = torch.ones(1)
    least, largest = of_tiles(weight_NK, scheme.weights)
    scales, zeros = calculate_qparams(least, largest, scheme.weights, state.get("weight_global_scale"))
    state |= {"weight_scale": scales} | ({} if scheme.weights.symmetric else {"weight_zero_point": zeros})
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"].float()
    group = scheme.model_dump(mode="json") | {"format": PRESETS[preset]}
    section = {"quant_method": "compressed-tensors", "format": PRESETS[preset], "config_groups": {"group_0": group}}
    rules = read_quantisation(JsonFields("config.json", {"quantization_config": section}), Path("."))
    named = {f"{NAME}.{name}": tensor for name, tensor in compressed.items()}
    tensors, packed = read_weights(named, rules, Path("."))
    name = f"{NAME}.weight"
    stored, problems = find_stored(tensors, rules)
    assert not any(problems.values()), problems
    placement, codes = encoded(whole(name, name, tensors[name].shape), stored), packed.get(name)
    target = torch.full(weight_NK.shape, torch.nan)
    first = tensors[name] if codes is None else codes.to(torch.device("cpu"))
    decode_scaled(placement, [first, *(tensors[each].float() for each in placement.beside)], target)
    assert float((target - weight_NK).abs().max()) < 0.75
    torch.testing.assert_close(target, expected, rtol=1e-2 if preset.startswith("NVFP4") else 1e-6, atol=0.0)
