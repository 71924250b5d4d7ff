"""Measured device profiles, shipped as JSON files: the time that passes save, and the fastest tile sizes of kernels.

`compiled-engine tune` writes them. On a device without a profile every applicable pass runs, with default tile sizes.
The environment variable COMPILED_ENGINE_DEVICE_PROFILES names a folder of profiles to use instead of the shipped one.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compiled_engine.passes.framework.graph_pass import CompileRange

SHIPPED = Path(__file__).parent / "profiles"
FOLDER_VARIABLE = "COMPILED_ENGINE_DEVICE_PROFILES"


# A linear: largest token count of its bucket, rows and columns of its weight, and whether it ends in silu * up.
LinearKey = tuple[int, int, int, bool]

# Upper ends of the product buckets in older profiles, which do not record the lower ends.
EARLIER_BUCKETS = (128, 256, 288, 352, 384, 1024, 1152, 2048, 4096)


@dataclass(frozen=True)
class MeasuredProduct:
    """The fastest tile sizes of Hopper's kernel for many tokens, for a range of token counts and a weight's shape."""

    first: int
    last: int
    num_rows: int
    k: int
    gated: bool  # the rows are those of gate and up
    tiles: dict[str, Any]  # fields of ProductTiles


@dataclass(frozen=True)
class DeviceProfile:
    """The measurements of one GPU model: the time that passes save, and the fastest tile sizes of kernels."""

    device: str
    # Pass name -> {tokens: microseconds that the pass saves in a step}, the smallest over all measured shapes.
    gains_us: dict[str, dict[int, float]]
    noise_us: float  # a gain below minus this is a loss
    tiles: dict[LinearKey, dict[str, int]]  # fields of the small-batch kernels' Tiles
    # fields of HopperTiles, where that kernel is fastest
    hopper_tiles: dict[LinearKey, dict[str, int]] = field(default_factory=dict)
    products: tuple[MeasuredProduct, ...] = ()  # where Hopper's kernel for many tokens is fastest

    def why_not(self, pass_name: str, compile_range: CompileRange) -> str | None:
        """Return why a pass should not run in the range, as text: it was measured to be slower.

        Returns None if the pass is faster at some token count in the range, if it is slower only within the noise, or
        if it was not measured in the range.
        """
        measured = {
            tokens: gain for tokens, gain in self.gains_us.get(pass_name, {}).items() if tokens in compile_range
        }
        if not measured or max(measured.values()) > self.noise_us:
            return None
        tokens, gain = min(measured.items(), key=lambda item: item[1])
        if gain >= -self.noise_us:
            return None
        return f"it is slower on {self.device}: {-gain:.1f} microseconds in a step of {tokens} tokens"

    def product(self, num_tokens: int, num_rows: int, k: int, gated: bool) -> dict[str, Any] | None:
        """Return the fastest tile sizes (fields of ProductTiles) of Hopper's kernel for many tokens.

        The kernel multiplies inputs [num_tokens, k] by the transpose of a weight [num_rows, k]. gated: the weight holds
        the rows of gate and up. Returns None if another kernel is faster, or if the shape was not measured.
        """
        shape = num_rows, k, gated
        return next(
            (p.tiles for p in self.products if p.first <= num_tokens <= p.last and (p.num_rows, p.k, p.gated) == shape),
            None,
        )


def profiles_folder() -> Path:
    """Return the folder with device profiles: $COMPILED_ENGINE_DEVICE_PROFILES, or else the folder in the package.

    A device without a file in that folder has no profile. Raises ValueError if the variable does not name a folder.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named and not Path(named).is_dir():
        raise ValueError(f"{FOLDER_VARIABLE} is {named!r}; allowed: a folder of device profiles, which may be empty")
    return Path(named) if named else SHIPPED


def profile_path(device_name: str) -> Path:
    """Return the path of a device's profile, such as .../nvidia_h200.json. The file need not exist."""
    return profiles_folder() / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


def profile_of(device: torch.device) -> DeviceProfile | None:
    """Return the profile of a GPU's model. Returns None for a GPU without a profile and for any other device."""
    return load_profile(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def load_profile(device_name: str) -> DeviceProfile | None:
    """Return the profile of a device model, such as "NVIDIA H200"; None if `profiles_folder` has none.

    A file is read once in a process.
    """
    path = profile_path(device_name)
    return _read(path) if path.exists() else None


def profiles_of_others(device_name: str) -> list[DeviceProfile]:
    """Return the profiles that the package ships for other device models."""
    shipped = (parse_profile(path.read_text()) for path in sorted(SHIPPED.glob("*.json")))
    return [profile for profile in shipped if profile.device != device_name]


@cache
def _read(path: Path) -> DeviceProfile:
    return parse_profile(path.read_text())


def parse_profile(text: str) -> DeviceProfile:
    data: dict[str, Any] = json.loads(text)
    gains = {name: {int(tokens): gain for tokens, gain in by.items()} for name, by in data["gains_us"].items()}
    tiles, hopper_tiles = (
        {(row["tokens"], row["num_rows"], row["k"], row["silu_mul"]): row["tiles"] for row in data.get(name, ())}
        for name in ("linears", "hopper_linears")
    )
    products = tuple(map(_product, data.get("hopper_products", ())))
    return DeviceProfile(data["device"], gains, data["noise_us"], tiles, hopper_tiles, products)


def _product(row: dict[str, Any]) -> MeasuredProduct:
    last = row["tokens"]
    first = row.get("from") or 1 + max(tokens for tokens in EARLIER_BUCKETS if tokens < last)
    return MeasuredProduct(first, last, row["num_rows"], row["k"], row["silu_mul"], row["tiles"])
