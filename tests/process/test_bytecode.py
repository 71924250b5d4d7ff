"""Bytecode of PyTorch is kept in the cache where its installation has none: here a small package of that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_engine.process import bytecode as bytecode_module
from compiled_engine.process.bytecode import bytecode_kept

IMPORTS = """
import os, sys
from compiled_engine.process.bytecode import bytecode_kept
from compiled_engine.process.child import start_process

if "read-only" in sys.argv:
    os.access = lambda path, mode: mode != os.W_OK
before = sys.pycache_prefix, sys.dont_write_bytecode
with bytecode_kept():
    import torch
    start_process("torch.child", [], []).wait()
assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
print(torch.__cached__)
"""
NONE_WRITTEN = {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package without bytecode."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "child.py").write_text("def main(): pass\n")
    return folder


def imported(package: Path, cache: Path | str, *arguments: str, **environment: str) -> Path:
    """Import the package in a new process; return where its bytecode belongs there."""
    path = os.pathsep.join([str(package.parent), *sys.path])
    changed = {"PYTHONPATH": path, "COMPILED_ENGINE_CACHE_DIR": str(cache), **environment}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-P", "-c", IMPORTS, *arguments]
    return Path(subprocess.check_output(command, env=kept | changed, text=True, cwd=package.parent).strip())


def bytecode(folder: Path) -> dict[str, int]:
    """Return the bytecode files below a folder, with their modification times."""
    return {path.name.partition(".")[0]: path.stat().st_mtime_ns for path in folder.rglob("*.pyc")}


def test_it_is_written_once_and_read_from_then_on(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    place = imported(package, cache, **NONE_WRITTEN)
    assert place.is_file()
    assert place.is_relative_to(cache / "bytecode")
    assert (cache / "bytecode").stat().st_mode & 0o777 == 0o700
    first = bytecode(place.parent)
    assert set(first) == {"__init__", "child"}  # a process that this one starts does as it does
    assert imported(package, cache, **NONE_WRITTEN) == place
    assert bytecode(place.parent) == first
    assert not bytecode(package)


@pytest.mark.parametrize("has_some", [False, True])
def test_where_python_has_its_own_it_is_left_to_it(has_some: bool, package: Path, tmp_path: Path) -> None:
    if has_some:
        imported(package, tmp_path / "another")
    place = imported(package, tmp_path / "cache", **(NONE_WRITTEN if has_some else {}))
    assert place.is_file()
    assert place.is_relative_to(package)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_the_user_has_named_stays(package: Path, tmp_path: Path) -> None:
    place = imported(package, tmp_path / "cache", PYTHONPYCACHEPREFIX=str(tmp_path / "own"), **NONE_WRITTEN)
    assert place.is_relative_to(tmp_path / "own")
    assert not place.exists()
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_others_can_write_to_is_not_used(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert imported(package, tmp_path / "cache", **NONE_WRITTEN).is_relative_to(package)
    assert not bytecode(tmp_path)


@pytest.mark.parametrize("without", ["a folder", "a home"])
def test_a_cache_that_cannot_be_made_is_no_error(without: str, package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # Without HOME Python asks who the user is, and a container may not know.
    environment = {"XDG_CACHE_HOME": "", "HOME": "~nobody-of-this-name"} if without == "a home" else {}
    cache = "" if environment else tmp_path / "file" / "cache"
    assert imported(package, cache, **environment, **NONE_WRITTEN).is_relative_to(package)


def test_a_read_only_installation_has_its_bytecode_in_the_cache(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert imported(package, cache, "read-only").is_relative_to(cache / "bytecode")


def test_a_cache_below_the_working_directory_stays_where_it_is(package: Path) -> None:
    assert imported(package, "cache", **NONE_WRITTEN).is_relative_to(package.parent / "cache" / "bytecode")


def test_another_installation_in_the_same_place_has_its_own(package: Path, tmp_path: Path) -> None:
    """Its files may have the times and sizes of the previous installation's."""
    places = []
    for version in ("1", "2"):
        (package.parent / f"torch-{version}.dist-info").mkdir()
        places.append(imported(package, tmp_path / "cache", **NONE_WRITTEN))
    assert places[0] != places[1]


def test_starts_in_threads_give_python_back_what_it_had(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode_module, "_lacks_bytecode", lambda: package.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    first, second = bytecode_kept(), bytecode_kept()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.pycache_prefix is not None
    assert not sys.dont_write_bytecode
    second.__exit__(None, None, None)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, True)
