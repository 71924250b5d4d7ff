"""Profiles of devices: when a pass does not pay, what is read from a file, and which file is a device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.profile import (
    FOLDER_VARIABLE,
    SHIPPED,
    DeviceProfile,
    MeasuredProduct,
    load_profile,
    parse_profile,
    profile_of,
    profile_path,
)


@pytest.mark.parametrize(
    ("gains", "loss"),
    [
        ({}, None),
        ({4: -2.0}, None),  # within the noise
        ({4: -2.1}, "2.1 microseconds in a step of 4 tokens"),
        ({4: -3.0, 8: -5.0}, "5.0 microseconds in a step of 8 tokens"),
        ({4: -5.0, 8: -3.0}, "5.0 microseconds in a step of 4 tokens"),
        ({4: -5.0, 8: 2.0}, "5.0 microseconds in a step of 4 tokens"),  # no gain beyond the noise
        ({4: -5.0, 8: 2.1}, None),
        ({1: 9.0, 4: -5.0, 9: 9.0}, "5.0 microseconds in a step of 4 tokens"),  # of other ranges
        ({1: -9.0, 4: 0.0, 9: -9.0}, None),
        ({4: 3.0}, None),
    ],
)
def test_a_pass_is_left_out_where_it_loses_more_than_the_noise_and_gains_nowhere(
    gains: dict[int, float], loss: str | None
) -> None:
    profile = DeviceProfile("a GPU", {"a": gains, "b": {4: -9.0}}, 2.0, {})
    assert profile.why_not("a", CompileRange(2, 8)) == (None if loss is None else f"it is slower on a GPU: {loss}")
    assert profile.why_not("c", CompileRange(2, 8)) is None


def linear(tokens: int, tiles: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "num_rows": 64, "k": 32, "silu_mul": True, "tiles": tiles} | more


TEXT = {
    "device": "a GPU",
    "noise_us": 1.5,
    "gains_us": {"rms_norm": {"1": 2.0, "64": -1.0}},
    "linears": [linear(8, {"tokens": 8})],
    "hopper_linears": [linear(16, {"groups": 1}), linear(32, {"groups": 2}, silu_mul=False)],
    "hopper_products": [linear(512, {"groups": 2}, **{"from": 449}), linear(1152, {"groups": 3})],
}


def test_a_profile_is_read() -> None:
    profile = parse_profile(json.dumps(TEXT))
    assert (profile.device, profile.noise_us) == ("a GPU", 1.5)
    assert profile.gains_us == {"rms_norm": {1: 2.0, 64: -1.0}}
    assert profile.tiles == {(8, 64, 32, True): {"tokens": 8}}
    assert profile.hopper_tiles == {(16, 64, 32, True): {"groups": 1}, (32, 64, 32, False): {"groups": 2}}
    assert profile.products == (
        MeasuredProduct(449, 512, 64, 32, True, {"groups": 2}),
        MeasuredProduct(1025, 1152, 64, 32, True, {"groups": 3}),
    )
    bare = {name: TEXT[name] for name in ("device", "noise_us", "gains_us")}
    assert parse_profile(json.dumps(bare)) == DeviceProfile("a GPU", profile.gains_us, 1.5, {})


@pytest.mark.parametrize(
    ("tokens", "rows", "k", "gated", "groups"),
    [
        (448, 64, 32, True, None),
        (449, 64, 32, True, 2),
        (512, 64, 32, True, 2),
        (513, 64, 32, True, None),
        (1025, 64, 32, True, 3),
        (1152, 64, 32, True, 3),
        (500, 32, 32, True, None),
        (500, 64, 64, True, None),
        (500, 64, 32, False, None),
    ],
)
def test_a_product_is_that_of_its_tokens_and_shape(
    tokens: int, rows: int, k: int, gated: bool, groups: int | None
) -> None:
    found = parse_profile(json.dumps(TEXT)).product(tokens, rows, k, gated)
    assert found == (None if groups is None else {"groups": groups})


def test_the_file_of_a_device_is_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_path("NVIDIA H200") == SHIPPED / "nvidia_h200.json"
    assert profile_path("NVIDIA H100 80GB HBM3 (PCIe)").name == "nvidia_h100_80gb_hbm3_pcie.json"
    assert load_profile("a GPU that nobody has measured") is None
    of_h200 = load_profile("NVIDIA H200")
    assert of_h200 is not None
    assert of_h200.device == "NVIDIA H200"
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: asked.append(device) or "NVIDIA H200")
    assert profile_of(torch.device("cpu")) is None
    assert profile_of(torch.device("cuda", 3)) is of_h200
    assert asked == [torch.device("cuda", 3)]


def test_another_folder_hides_the_profiles_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    shipped = profile_of(torch.device("cuda", 0))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert shipped is not None
    assert profile_of(torch.device("cuda", 0)) is None
    assert load_profile("a GPU") is None
    profile_path("another GPU").write_text(json.dumps(TEXT))
    assert load_profile("another GPU") == parse_profile(json.dumps(TEXT))
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert profile_of(torch.device("cuda", 0)) == shipped


def test_a_folder_of_profiles_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt folder would hide all profiles."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "prfiles"))
    with pytest.raises(ValueError, match=r"COMPILED_ENGINE_DEVICE_PROFILES is .*prfiles'; allowed: a folder"):
        load_profile("a GPU")
