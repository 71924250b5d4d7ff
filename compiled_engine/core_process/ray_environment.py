"""What a node and the driver must have in common for the same configuration to mean the same on both."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("compiled-engine", "torch", "triton", "ray", "msgspec")


def own_environment(device_type: str) -> dict[str, str]:
    """Versions, and which GPU there is: of this process."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found


def differences(driver: Mapping[str, str], node: Mapping[str, str]) -> list[str]:
    """What is not the same, in words."""
    names = dict.fromkeys((*driver, *node))
    return [
        f"{name} is {node.get(name, 'not there')}, the driver's is {driver.get(name, 'not there')}"
        for name in names
        if driver.get(name) != node.get(name)
    ]
