"""The rules of checkpoints with integer weights, and the fields that are refused with what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packed_checkpoints import PACKINGS

from compiled_engine.models.checkpoint.hub import MODEL_FILES
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.quantisation_config import as_compressed_tensors, read_quantisation
from compiled_engine.models.checkpoint.quantise_folder import require_unquantised
from compiled_engine.quantisation import Quantisation

SCHEMES = {
    "compressed-tensors, groups": "int4 1x32",
    "compressed-tensors, zero points": "uint4 1x128",
    "compressed-tensors, rows": "uint4 1x*",
    "compressed-tensors, reordered": "int4 1x64, columns reordered",
    "gptq": "int4 1x128",
    "gptq, zero points": "uint4 1x32",
    "gptq, rows": "int4 1x*",
    "gptq, reordered": "uint4 1x64, columns reordered",
    "gptq_v2": "uint4 1x64",
    "awq": "uint4 1x128",
    "awq, small groups": "uint4 1x32",
    "compressed-tensors, 8 bits": "int8 1x*",
    "compressed-tensors, 8 bits, zero points": "uint8 1x32, columns reordered",
    "gptq, 8 bits": "int8 1x128, columns reordered",
    "gptq, 8 bits, zero points": "uint8 1x32",
}
UP, GATE, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate", "lm_head"
PACKED, GPTQ, AWQ = (PACKINGS[name].config([HEAD]) for name in ("compressed-tensors, groups", "gptq", "awq"))
GROUP: dict[str, Any] = PACKED["config_groups"]["group_0"]


def read(config: dict[str, Any]) -> Quantisation:
    found = read_quantisation(JsonFields("config.json", {"quantization_config": config}), Path("."))
    assert found is not None
    return found


def packed(**weights: Any) -> dict[str, Any]:
    return PACKED | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize("name", PACKINGS)
def test_each_format_states_its_scheme(name: str) -> None:
    found = read(PACKINGS[name].config([HEAD, "model.layers.1.mlp.up_proj"]))
    assert str(found.scheme_of(UP)) == SCHEMES[name]
    assert found.scheme_of("model.layers.1.mlp.up_proj") is found.scheme_of(HEAD) is None


def test_gptq_may_name_modules_that_do_not_differ() -> None:
    found = read(GPTQ | {"dynamic": {r"+:.*\.down_proj": None}})
    assert found.scheme_of("model.layers.0.mlp.down_proj") == found.scheme_of(UP)


def test_gptq_names_modules_that_differ() -> None:
    changes = {r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"group_size": 32, "sym": False, "desc_act": True}}
    changes[r"+:.*\.v_proj"] = {"bits": 8}
    found = read(GPTQ | {"dynamic": changes, "lm_head": True})
    names = ("a.o_proj", "a.down_proj", "a.v_proj", UP, HEAD, GATE)
    schemes = [None, "uint4 1x32, columns reordered", "int8 1x128", "int4 1x128", "int4 1x128", None]
    assert [scheme and str(scheme) for scheme in map(found.scheme_of, names)] == schemes


def test_fields_have_other_names_and_defaults() -> None:
    short = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert str(read(short).scheme_of(UP)) == "int4 1x64"
    assert (read(short).layout, read(short | {"format": "gptq_v2"}).layout) == ("gptq", "gptq_v2")
    found = read({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"})
    assert str(found.scheme_of(UP)) == "uint4 1x64"
    assert found.scheme_of(HEAD) is found.scheme_of(GATE) is None
    whole_rows = read(GPTQ | {"group_size": -1, "desc_act": True})
    assert str(whole_rows.scheme_of(UP)) == "int4 1x*"
    assert {str(read(packed(actorder=order)).scheme_of(UP)) for order in (None, "weight", "static")} == {"int4 1x32"}
    preset = read(PACKED | {"config_groups": {"W4A16_ASYM": ["Linear"]}})
    assert (str(preset.scheme_of(UP)), preset.layout) == ("uint4 1x128", "pack-quantized")


def test_groups_of_one_checkpoint_may_differ_in_their_format() -> None:
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {
        "a": GROUP | {"format": "pack-quantized"},
        "b": {"targets": ["re:.*down_proj"], "format": "float-quantized", "weights": e4m3},
    }
    found = read(PACKED | {"format": "mixed-precision", "config_groups": groups})
    assert (str(found.scheme_of(UP)), str(found.scheme_of("a.down_proj"))) == ("int4 1x32", "e4m3 1x*")
    assert found.layout == "pack-quantized"


@pytest.mark.parametrize("name", [name for name in PACKINGS if name.startswith("compressed-tensors")])
def test_what_is_written_states_the_same_rules(name: str) -> None:
    found = read(PACKINGS[name].config([HEAD, "re:.*gate$"]))
    assert read(as_compressed_tensors(found)) == found


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        *(
            ({"quant_method": method}, ("quant_method", f"'{method}'", "one of", "gptq, awq", "with integers"))
            for method in ("bitsandbytes", "gguf", "torchao", "auto-round", "hqq")
        ),
        ({"load_in_4bit": True}, ("quant_method", "'bitsandbytes'", "gptq, awq", "with integers")),
        (GPTQ | {"bits": 2}, ("bits must be 4 or 8", "got 2", "a checkpoint in FP8")),
        (GPTQ | {"bits": 3}, ("bits must be 4 or 8", "got 3")),
        (GPTQ | {"checkpoint_format": "marlin"}, ("checkpoint_format", "gptq, gptq_v2", "'marlin'")),
        (GPTQ | {"is_marlin_format": True}, ("is_marlin_format must be false",)),
        (GPTQ | {"pack_dtype": "int16"}, ("pack_dtype must be int32",)),
        (GPTQ | {"group_size": 0}, ("group_size", "got 0")),
        (GPTQ | {"group_size": 33}, ("group_size must be an even number", "got 33")),
        (GPTQ | {"dynamic": {"+:a": {"bits": 5}}}, ("bits must be 4 or 8", "got 5")),
        (GPTQ | {"dynamic": {"+:a": {"rotation": "hadamard"}}}, ("dynamic: +:a: rotation must be absent",)),
        (AWQ | {"bits": 8}, ("bits must be 4", "got 8")),
        (AWQ | {"version": "gemv"}, ("version", "gemm", "'gemv'")),
        (AWQ | {"zero_point": False}, ("zero_point must be true",)),
        (AWQ | {"backend": "llm-awq"}, ("backend must be autoawq",)),
        (packed(num_bits=3), ("num_bits must be 4 or 8", "got 3")),
        (packed(type="float"), ("type must be int",)),
        (packed(strategy="tensor"), ("strategy must be one of group, channel",)),
        (packed(group_size=None), ("group_size is missing",)),
        (packed(actorder=["group"]), ("actorder must be null, weight, static, group or dynamic",)),
        (PACKED | {"format": "marlin-24"}, ("format must be one of float-quantized", "'marlin-24'")),
        (PACKED | {"format": "mixed-precision"} | {"config_groups": {"a": GROUP | {"format": "dense"}}}, ("'dense'",)),
        (
            PACKED | {"config_groups": {"a": GROUP | {"input_activations": {"num_bits": 8, "type": "int"}}}},
            ("input_activations must be null",),
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0],
)
def test_other_formats_are_refused_with_what_is_allowed(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^config\.json") as caught:
        read(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "scheme", "method"),
    [
        ("quantize_config.json", {"bits": 8, "group_size": 64, "desc_act": True, "sym": False}, "uint8 1x64", "gptq"),
        ("quantize_config.json", AWQ, "uint4 1x128", "awq"),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
            "uint4 1x64",
            "awq",
        ),
    ],
)
def test_older_folders_have_their_settings_in_a_file_of_their_own(
    name: str, settings: dict[str, Any], scheme: str, method: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(settings))
    found = read_quantisation(JsonFields("config.json", {}), tmp_path)
    assert found is not None
    assert str(found.scheme_of(UP)).removesuffix(", columns reordered") == scheme
    assert found.method == method
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=f"which is quantised already, with {method}; allowed: a checkpoint in float32"
    ):
        require_unquantised(tmp_path)
    assert name in MODEL_FILES  # else it would not be downloaded


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, None),
        ({"group_size": 64}, "group_size is 64, but quantization_config of config.json says 128"),
        ({"bits": 8}, "bits is 8, but quantization_config of config.json says 4"),
        ({"desc_act": True}, "desc_act is True, but quantization_config of config.json says False"),
        ({"damp_percent": 0.5, "checkpoint_format": "GPTQ"}, None),
    ],
    ids=str,
)
def test_settings_in_two_files_must_agree(settings: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    """Where both state what decides how tensors are read."""
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "sym": True} | settings))
    fields = JsonFields("config.json", {"quantization_config": GPTQ})
    if message is None:
        assert read_quantisation(fields, tmp_path) == read(GPTQ)
        return
    with pytest.raises(ValueError, match=message) as caught:
        read_quantisation(fields, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/quantize_config.json: ")
