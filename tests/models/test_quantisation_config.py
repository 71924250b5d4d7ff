"""quantization_config of a checkpoint: which rules it states, and what is refused, with what is allowed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantised_checkpoints import GROUP, LAYOUTS, TOKEN, compressed

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.quantisation_config import as_compressed_tensors, read_quantisation
from compiled_engine.models.checkpoint.quantised_tensors import find_stored
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding, Rule, online

SCHEMES = {
    "compressed-tensors, channel and token": "e4m3 1x*, inputs e4m3 1x*",
    "compressed-tensors, tensor, static": "e4m3 *x*, inputs e4m3 static",
    "compressed-tensors, tensor and token": "e4m3 *x*, inputs e4m3 1x*",
    "compressed-tensors, channel, weights alone": "e4m3 1x*",
    "compressed-tensors, block": "e4m3 128x128, inputs e4m3 1x128",
    "compressed-tensors, int8, channel and token": "int8 1x*, inputs int8 1x*",
    "compressed-tensors, int8, static": "int8 1x*, inputs int8 static",
    "fp8, block": "e4m3 128x128, inputs e4m3 1x128",
    "fp8, tensor": "e4m3 *x*, inputs e4m3 1x*",
    "fp8, static": "e4m3 *x*, inputs e4m3 static",
    "modelopt": "e4m3 *x*, inputs e4m3 static",
}
BLOCK = LAYOUTS["fp8, block"].config([])
CHANNEL = compressed("channel", TOKEN)([])
ROUNDS_OUTPUTS = CHANNEL["config_groups"]["group_0"] | {"output_activations": {"num_bits": 8, "type": "float"}}


def read(config: dict[str, Any], folder: Path = Path(".")) -> Quantisation | None:
    return read_quantisation(JsonFields("config.json", {"quantization_config": config}), folder)


@pytest.mark.parametrize("name", SCHEMES)
def test_each_format_states_its_scheme(name: str) -> None:
    found = read(LAYOUTS[name].config(["model.layers.1.mlp.up_proj"]))
    assert found is not None
    assert str(found.scheme_of("model.layers.0.mlp.up_proj")) == SCHEMES[name]
    assert found.scheme_of("model.layers.1.mlp.up_proj") is None
    assert found.scale_name == LAYOUTS[name].scale_name


def test_the_groups_of_inputs_are_as_wide_as_stated() -> None:
    found = read(compressed("channel", GROUP | {"group_size": 64})([]))
    assert found is not None
    assert str(found.scheme_of("model.layers.0.mlp.up_proj")) == "e4m3 1x*, inputs e4m3 1x64"


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    section = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    found = read_quantisation(JsonFields("config.json", {}), tmp_path)
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") is None
    assert str(found.scheme_of("model.layers.0.self_attn.q_proj")) == "e4m3 *x*, inputs e4m3 static"


@pytest.mark.parametrize("field", ["exclude_modules", "ignore"])
def test_what_modelopt_leaves_out_has_two_names(field: str) -> None:
    found = read({"quant_method": "modelopt", "quant_algo": "FP8", field: ["*.mlp.*"]})
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") is None
    assert found.scheme_of("lm_head") is not None
    without = read({"quant_method": "modelopt", "quant_algo": "FP8", field: []})
    assert without is not None
    assert without.scheme_of("lm_head") is without.scheme_of("model.layers.0.mlp.gate") is None


def test_names_come_before_expressions_and_these_before_classes() -> None:
    rules = [("Linear", "e4m3 1x*"), ("re:.*down", "e4m3 *x*"), ("a.down_proj", "e4m3 128x128")]
    found = Quantisation("x", tuple(Rule((target,), scheme) for target, scheme in rules), ("re:.*head",))
    schemes = {name: str(found.scheme_of(name)) for name in ("a.up_proj", "b.down_proj", "a.down_proj", "lm_head")}
    assert list(schemes.values()) == ["e4m3 1x*", "e4m3 *x*", "e4m3 128x128", "None"]
    assert found.why_not("lm_head") == "re:.*head is to be ignored"


@pytest.mark.parametrize(
    "named",
    [
        {"modules_to_not_convert": ["layers.1", "gate"]},
        {"ignored_layers": ["layers.1", "gate"]},
        {"modules_to_not_convert": ["gate"], "ignored_layers": ["layers.1"]},
    ],
)
def test_what_is_named_of_fp8_may_be_a_module_with_others_in_it(named: dict[str, list[str]]) -> None:
    found = read(BLOCK | named)
    assert found is not None
    names = ("model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "model.layers.2.mlp.gate", "lm_head")
    assert [found.scheme_of(name) is None for name in names] == [True, False, True, True]
    without = read(BLOCK)
    assert without is not None
    assert without.scheme_of("lm_head") is without.scheme_of("model.layers.2.mlp.gate") is None


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quant_method": "quark"}, ("quant_method", "'quark'", "compressed-tensors, fp8")),
        (BLOCK | {"fmt": "e5m2"}, ("fmt", "e4m3", "'e5m2'")),
        (BLOCK | {"scale_fmt": "ue8m0"}, ("scale_fmt", "'ue8m0'", "quantization='fp8'")),
        (BLOCK | {"weight_block_size": [128]}, ("weight_block_size", "[128]")),
        (BLOCK | {"activation_scheme": "static"}, ("activation_scheme", "dynamic")),
        (CHANNEL | {"format": "marlin-24"}, ("format", "'marlin-24'", "a checkpoint in FP8")),
        (CHANNEL | {"sparsity_config": {"format": "24"}}, ("sparsity_config", "empty")),
        (CHANNEL | {"config_groups": {}}, ("config_groups", "at least one group")),
        (CHANNEL | {"config_groups": {"a": ROUNDS_OUTPUTS}}, ("config_groups: a: output_activations", "null")),
        (compressed("channel", TOKEN, num_bits=4)([]), ("num_bits", "got 4")),
        (compressed("channel", TOKEN, type="int")([]), ("type", "got 'int'")),
        (compressed("channel", TOKEN | {"type": "float"}, "int")([]), ("input_activations: type must be int",)),
        (compressed("channel", TOKEN, "int", num_bits=4)([]), ("weights: num_bits must be 8", "got 4")),
        (
            compressed("channel", TOKEN | {"symmetric": False}, "int")([]),
            ("input_activations: symmetric must be true", "got False", "a checkpoint in FP8"),
        ),
        (compressed("channel", TOKEN, symmetric=False)([]), ("symmetric", "got False")),
        (compressed("channel", TOKEN | {"symmetric": False})([]), ("input_activations: symmetric", "got False")),
        (compressed("group", TOKEN)([]), ("strategy", "tensor, channel, block")),
        (compressed("channel", {"strategy": "tensor", "dynamic": True})([]), ("strategy", "token or group")),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, ("quant_algo", "'MXFP8'", "FP8")),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0],
)
def test_another_format_is_refused_with_what_is_allowed(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^config\.json") as caught:
        read(config)
    assert all(part in str(caught.value) for part in parts)


sizes = st.integers(0, 300)
roundings = st.builds(Rounding, st.just("e4m3"), sizes, sizes, st.just(False))


@given(roundings, st.none() | roundings | st.just(Rounding("e4m3", 0, 0, True)), st.booleans())
def test_schemes_are_text_and_back(weight: Rounding, inputs: Rounding | None, reordered: bool) -> None:
    scheme = LinearScheme(weight, inputs, reordered)
    assert LinearScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("compressed-tensors")])
def test_what_is_written_states_the_same_rules(name: str) -> None:
    found = read(LAYOUTS[name].config(["lm_head", "re:.*gate$"]))
    assert found is not None
    assert read(as_compressed_tensors(found)) == found


@given(st.integers(1, 400), st.integers(0, 400))
def test_smaller_tiles_divide_the_stored_ones_and_the_share(rows: int, columns: int) -> None:
    scheme = online("fp8_block", ()).scheme_of("x")
    assert scheme is not None
    tile = scheme.dividing(rows, columns).weight
    assert 128 % tile.rows == rows % tile.rows == 128 % tile.columns == columns % tile.columns == 0


def test_scales_of_blocks_are_not_read_in_another_order() -> None:
    """The right number of scales in another shape, such as the transposed one, is refused."""
    rules = read(BLOCK)
    codes = torch.zeros(256, 384, dtype=torch.float8_e4m3fn)
    for shape, problems in (((2, 3), []), ((3, 2), ["x.weight_scale_inv ([3, 2] instead of [2, 3])"])):
        found, wrong = find_stored({"x.weight": codes, "x.weight_scale_inv": torch.ones(shape)}, rules)
        assert found.keys() == {"x.weight"}
        assert wrong["of another shape"] == problems


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("weight_scale", math.nan, "nan instead of finite numbers"),
        ("weight_scale", math.inf, "inf instead of finite numbers"),
        ("weight_scale", 0.0, "0 alone instead of at least one other number"),
        ("input_scale", -math.inf, "-inf instead of finite numbers"),
        ("input_scale", 0.0, "0.0 instead of a number above 0"),
        ("input_scale", -0.5, "-0.5 instead of a number above 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_scales_must_not_have_are_named(name: str, value: float, expected: str, dtype: torch.dtype) -> None:
    tensors = {"x.weight": torch.ones(4, 8, dtype=torch.int8), "x.weight_scale": torch.ones(4, 1, dtype=dtype)}
    tensors["x.input_scale"] = torch.ones(1)
    rules = read(LAYOUTS["compressed-tensors, int8, static"].config([]))
    assert not any(find_stored(tensors, rules)[1].values())
    tensors["x.weight_scale"][0] = 0.0  # a row of zeros
    assert not any(find_stored(tensors, rules)[1].values())
    tensors[f"x.{name}"].fill_(value)
    assert find_stored(tensors, rules)[1]["of a value that is not allowed"] == [f"x.{name} ({expected})"]


def test_what_is_no_regular_expression_is_named() -> None:
    with pytest.raises(ValueError, match=r"quantization_ignore has 're:\(': missing \)"):
        online("fp8", ("lm_head", "re:("))
    with pytest.raises(ValueError, match=r"quantization_config has 're:\['"):
        read(compressed("channel", TOKEN)(["re:["]))
