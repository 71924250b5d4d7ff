"""What `pip install .` takes along: every module and every file that one reads. An editable install has them anyway."""

from __future__ import annotations

import tomllib
from pathlib import Path

from folders import REPOSITORY

SETUPTOOLS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    """As setuptools finds it: under the folder of the nearest parent that has one of its own."""
    nearest = max((parent for parent in SETUPTOOLS["package-dir"] if f"{package}.".startswith(f"{parent}.")), key=len)
    return REPOSITORY / SETUPTOOLS["package-dir"][nearest] / package[len(nearest) :].strip(".").replace(".", "/")


# Of a head of the bundled model, which is trained on a GPU.
NOT_IN_EVERY_VERSION = ("head/*.json", "head/*.safetensors")


def files() -> set[Path]:
    found = (path for root in SETUPTOOLS["package-dir"].values() for path in (REPOSITORY / root).rglob("*"))
    return {path for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_every_file_is_in_the_wheel() -> None:
    taken = {path for package in SETUPTOOLS["packages"] for path in folder_of(package).glob("*.py")}
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            matched = set(folder_of(package).glob(pattern))
            assert matched or pattern in NOT_IN_EVERY_VERSION, f"{package}: no file is {pattern!r}"
            taken |= matched
    missing = sorted(str(path.relative_to(REPOSITORY)) for path in files() - taken)
    assert not missing
