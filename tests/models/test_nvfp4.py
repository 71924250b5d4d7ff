"""Weights in NVFP4 against values written code by code, and tensors that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvfp4_checkpoints import COMPRESSED, FORMATS, MODELOPT, Tensors, config_of, pack_weight, value_of
from test_packed_weights import NAME, edit, refusal
from test_packed_weights import decoded as packed_decoded

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.nvfp4 import WHOLE, combined, read_nvfp4
from compiled_engine.models.checkpoint.quantisation_config import read_quantisation
from compiled_engine.models.checkpoint.quantised_tensors import find_stored, place_quantised
from compiled_engine.models.foreign.placement import Placement
from compiled_engine.passes.framework.parameter import SCALES, Parameter
from compiled_engine.passes.framework.rounding import unpack, values_of
from compiled_engine.quantisation import Quantisation, Rounding

E2M1 = Rounding("e2m1", 1, 16)


def read(config: dict[str, Any]) -> Quantisation:
    found = read_quantisation(JsonFields("config.json", {"quantization_config": config}), Path("."))
    assert found is not None
    return found


def rules_of(form: str) -> Quantisation:
    return read(config_of(form, ["lm_head"]))


def stored(form: str, num_rows: int = 24, num_columns: int = 256) -> tuple[Tensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    tensors, values_NK = pack_weight(torch.randn(num_rows, num_columns, generator=generator), form)
    return {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, values_NK


def decoded(tensors: Tensors, rules: Quantisation) -> torch.Tensor:
    return packed_decoded(tensors, rules, read_nvfp4)


def test_every_code_has_its_value() -> None:
    codes = torch.tensor([[low | high << 4 for high in range(16) for low in range(16)]], dtype=torch.uint8)
    expected = [value_of(code) for high in range(16) for low in range(16) for code in (low, high)]
    assert values_of(unpack(codes, E2M1), E2M1).tolist() == [expected]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(24, 256), (7, 48), (5, 40)])
def test_values_are_those_written(form: str, num_rows: int, num_columns: int) -> None:
    """Also where the last group is shorter. Scales of the inputs are not read."""
    tensors, values_NK = stored(form, num_rows, num_columns)
    assert torch.equal(decoded(tensors, rules_of(form)), values_NK)
    found, packed = read_nvfp4(tensors, rules_of(form), Path("folder"))
    scales, whole = (found.pop(f"{NAME}.{name}") for name in ("weight_scale", WHOLE))
    assert found.keys() == {f"{NAME}.weight"}
    assert scales is tensors[f"{NAME}.weight_scale"]
    assert (whole.shape, whole.dtype) == ((1,), torch.float64)
    codes = packed[f"{NAME}.weight"].stored
    assert codes is not None
    assert codes.shape == (num_rows, num_columns // 2)


def test_scales_of_a_weight_that_is_split_are_combined_once() -> None:
    """Several parameters have parts of the weight, as q, k and v have of one linear; each reads the same scales."""
    rules = rules_of(MODELOPT)
    tensors, _ = read_nvfp4(stored(MODELOPT)[0], rules, Path("folder"))
    weight, scales = f"{NAME}.weight", f"{NAME}.weight_scale"
    expected = combined(tensors[scales], tensors[f"{NAME}.{WHOLE}"])
    beside, problems = find_stored(tensors, rules)
    assert not any(problems.values())
    for start in (0, 8, 16):
        leaf = Parameter(f"part{start}.scales", (8, 16), "float32", SCALES, scheme=str(E2M1))
        part = Placement(weight, ((start, start + 8), (0, 256)), leaf.name, ((0, 8), (0, 256)))
        (placed,) = place_quantised(leaf, [part], beside, tensors)
        assert (placed.source, placed.taken) == (scales, ((start, start + 8), (0, 16)))
        assert torch.equal(tensors[scales], expected)


def test_a_scale_of_the_whole_weight_that_leaves_no_finite_number_is_refused() -> None:
    for form, name, factor in ((COMPRESSED, "weight_global_scale", 1e-37), (MODELOPT, "weight_scale_2", 1e38)):
        tensors, _ = stored(form)
        tensors[f"{NAME}.{name}"] = torch.full((1,), factor)
        found, _ = read_nvfp4(tensors, rules_of(form), Path("folder"))
        _, problems = find_stored(found, rules_of(form))
        assert "inf instead of finite numbers" in problems["of a value that is not allowed"][0], (form, problems)


def test_another_reading_is_another_weight() -> None:
    """The values that are compared depend on each part of the format."""
    for form, of_codes, of_whole in (
        (COMPRESSED, "weight_packed", "weight_global_scale"),
        (MODELOPT, "weight", "weight_scale_2"),
    ):
        tensors, values_NK = stored(form, 16, 256)  # as many rows as groups, for scales that are transposed
        codes, scales, scale = (tensors[f"{NAME}.{name}"] for name in (of_codes, "weight_scale", of_whole))
        of_bytes = scales.view(torch.uint8)
        for name, changed in (
            (of_codes, codes << 4 | codes >> 4),
            (of_codes, codes.roll(1, 1)),
            (of_codes, codes ^ 0x11),
            (of_codes, codes ^ 0x88),
            ("weight_scale", of_bytes.t().contiguous().view(scales.dtype)),
            ("weight_scale", of_bytes.roll(1, 1).view(scales.dtype)),
            ("weight_scale", of_bytes.roll(1, 0).view(scales.dtype)),
            (of_whole, 1 / scale),
            (of_whole, 2 * scale),
        ):
            other = decoded(tensors | {f"{NAME}.{name}": changed}, rules_of(form))
            assert not torch.allclose(other, values_NK, rtol=1e-3, atol=0.0), (form, name)


@pytest.mark.parametrize(
    ("form", "change", "expected"),
    [
        (COMPRESSED, edit("weight_scale", None), "weight_scale is missing"),
        (COMPRESSED, edit("weight_global_scale", None), "weight_global_scale is missing"),
        (MODELOPT, edit("weight_scale_2", None), "weight_scale_2 is missing"),
        (MODELOPT, edit("weight_scale_2", lambda t: 0 * t), "weight_scale_2 must be one number above 0, got 0.0"),
        (COMPRESSED, edit("weight_global_scale", lambda t: t.expand(2)), "weight_global_scale must be one number"),
        (
            COMPRESSED,
            edit("weight_global_scale", lambda t: 0 * t + 1e-39),
            "must have a reciprocal that float32 holds",
        ),
        (MODELOPT, edit("weight_scale", lambda t: t.float()), "weight_scale must be torch.float8_e4m3fn, got torch.fl"),
        (COMPRESSED, edit("weight_scale", lambda t: t[:, :8]), "weight_scale must be [24, 16], got [24, 8]"),
        (COMPRESSED, edit("weight_packed", lambda t: t[0]), "weight_packed must have two dimensions, got [128]"),
        (COMPRESSED, edit("weight_packed", lambda t: t.view(torch.int8)), "weight_packed must be torch.uint8, got"),
        (MODELOPT, edit("weight", lambda t: t.view(torch.int8)), "weight must be torch.uint8, got torch.int8"),
        (
            COMPRESSED,
            lambda tensors: tensors.update(
                {f"lm_head.{name.removeprefix(NAME)[1:]}": tensors[name] for name in [*tensors]}
            ),
            "lm_head.weight_packed is packed, but lm_head is to be ignored",
        ),
        (
            COMPRESSED,
            lambda tensors: tensors.update({f"{NAME}.weight": torch.zeros(24, 256)}),
            "weight_packed is a second copy of",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_contradicts_itself_is_one_line(form: str, change: Callable[[Tensors], None], expected: str) -> None:
    tensors, _ = stored(form)
    change(tensors)
    assert expected in refusal(tensors, rules_of(form), read_nvfp4)


def test_the_formats_state_their_scheme(tmp_path: Path) -> None:
    for form in FORMATS:
        found = rules_of(form)
        assert str(found.scheme_of(NAME)) == "e2m1 1x16"
        assert found.scheme_of("lm_head") is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    beside = read_quantisation(JsonFields("config.json", {}), tmp_path)
    assert beside is not None
    assert str(beside.scheme_of(NAME)) == "e2m1 1x16"
    config = config_of(COMPRESSED, [])
    preset = read(config | {"config_groups": {"NVFP4A16": ["Linear"]}})
    assert str(preset.scheme_of(NAME)) == "e2m1 1x16"


def changed(**weights: Any) -> dict[str, Any]:
    config = config_of(COMPRESSED, [])
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (changed(group_size=32), ("group_size must be 16", "got 32", "a checkpoint in FP8")),
        (changed(num_bits=6), ("num_bits must be 4", "got 6")),
        (changed(strategy="group"), ("strategy must be tensor_group", "'group'")),
        (config_of(MODELOPT, []) | {"group_size": 32}, ("group_size must be 16", "got 32")),
        (config_of(MODELOPT, []) | {"quant_algo": "NVFP4_AWQ"}, ("quant_algo must be one of FP8", "'NVFP4_AWQ'")),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0],
)
def test_other_numbers_are_refused_with_what_is_allowed(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^config\.json") as caught:
        read(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_tensors_of_other_modules_stay() -> None:
    """A module whose rule asks for another format keeps its tensors, and so does one without a rule."""
    tensors, _ = stored(COMPRESSED)
    others = {"model.norm.weight_scale": torch.ones(3), "lm_head.weight": torch.ones(3, 2)}
    found, packed = read_nvfp4(tensors | others, rules_of(COMPRESSED), Path("folder"))
    assert others.items() <= found.items()
    assert packed.keys() == {f"{NAME}.weight"}
    assert read_nvfp4(others, None, Path("folder")) == (others, {})
