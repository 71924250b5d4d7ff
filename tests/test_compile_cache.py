"""The cache folder: found, private, verified; whatever is wrong with it is set aside, never used, never fatal."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.graphs.cache import factors_key, find_or_build

FACTORS: dict[str, Any] = {"config": {"layers": 2}, "device": {"type": "cpu"}}


class Builder:
    """Writes an entry and counts how often it had to."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> None:
        self.builds += 1
        (folder / "pieces").mkdir()
        (folder / "pieces" / "a.bin").write_bytes(b"artifact")
        (folder / "plan.json").write_text("{}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build_once(root: Path) -> Path:
    return find_or_build(root, FACTORS, Builder()).folder


def test_second_lookup_is_a_hit(root: Path) -> None:
    build = Builder()
    assert find_or_build(root, FACTORS, build).status == "miss"
    found = find_or_build(root, FACTORS, build)
    assert (found.status, build.builds) == ("hit", 1)
    assert json.loads((found.folder / "factors.json").read_text()) == FACTORS
    assert (found.folder.parent.stat().st_mode & 0o777) == 0o700


def test_other_factors_are_another_entry(root: Path) -> None:
    build = Builder()
    other = FACTORS | {"device": {"type": "cuda"}}
    assert find_or_build(root, FACTORS, build).folder != find_or_build(root, other, build).folder
    assert build.builds == 2


def test_a_folder_of_the_users_keeps_its_mode(root: Path) -> None:
    root.mkdir(mode=0o755)
    assert find_or_build(root, FACTORS, Builder()).status == "miss"
    assert (root.stat().st_mode & 0o777) == 0o755


def test_a_moved_folder_stays_valid(root: Path, tmp_path: Path) -> None:
    build_once(root)
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    assert find_or_build(moved, FACTORS, Builder()).status == "hit"


def flip_a_byte(entry: Path) -> None:
    (entry / "pieces" / "a.bin").write_bytes(b"artifacT")


def truncate(entry: Path) -> None:
    (entry / "pieces" / "a.bin").write_bytes(b"art")


def remove_a_file(entry: Path) -> None:
    (entry / "plan.json").unlink()


def break_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"plan.json": ')


def replace_by_a_symlink(entry: Path) -> None:
    target = entry.parent / "real"
    entry.rename(target)
    entry.symlink_to(target)


def link_a_file(entry: Path) -> None:
    outside = entry.parent / "outside.bin"
    (entry / "pieces" / "a.bin").rename(outside)
    (entry / "pieces" / "a.bin").symlink_to(outside)


def lie_about_factors(entry: Path) -> None:
    """A consistent entry under a key that is not its own."""
    import hashlib

    text = json.dumps(FACTORS | {"device": {"type": "cuda"}})
    (entry / "factors.json").write_text(text)
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["factors.json"] = hashlib.sha256(text.encode()).hexdigest()
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        truncate,
        remove_a_file,
        break_the_manifest,
        replace_by_a_symlink,
        link_a_file,
        lie_about_factors,
    ],
)
def test_a_damaged_entry_is_set_aside_and_built_again(
    root: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(build_once(root))
    build = Builder()
    assert find_or_build(root, FACTORS, build).status == "miss"
    assert build.builds == 1
    assert "damaged" in caplog.text
    assert list(root.glob("compiled/damaged_*"))
    assert find_or_build(root, FACTORS, build).status == "hit"


def test_a_failed_build_leaves_nothing_behind(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"half")
        raise RuntimeError("compiler failed")

    with pytest.raises(RuntimeError, match="compiler failed"):
        find_or_build(root, FACTORS, fail)
    assert [path.name for path in (root / "compiled").iterdir()] == [f"{factors_key(FACTORS)}.lock"]


def test_a_root_that_is_a_file_means_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    found = find_or_build(tmp_path / "file", FACTORS, Builder())
    assert found.status == "off"
    assert "cannot be used" in caplog.text
    assert (found.folder / "plan.json").exists()


def test_a_root_of_another_user_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_once(root)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert find_or_build(root, FACTORS, Builder()).status == "off"
    assert "another user" in caplog.text


def test_no_root_keeps_nothing() -> None:
    build = Builder()
    assert find_or_build(None, FACTORS, build).status == "off"
    assert find_or_build(None, FACTORS, build).status == "off"
    assert build.builds == 2


def test_concurrent_lookups_build_once(root: Path) -> None:
    build = Builder()
    threads = [threading.Thread(target=find_or_build, args=(root, FACTORS, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.builds == 1


def test_an_entry_that_cannot_be_loaded_is_built_again(root: Path) -> None:
    build_once(root)
    build = Builder()

    def load(folder: Path) -> str:
        if build.builds == 0:
            raise ImportError("cannot read file data")
        return "loaded"

    found = find_or_build(root, FACTORS, build, load)
    assert (found.status, found.loaded, build.builds) == ("miss", "loaded", 1)


def test_an_empty_manifest_proves_nothing(root: Path) -> None:
    (build_once(root) / "manifest.json").write_text("{}")
    assert find_or_build(root, FACTORS, Builder()).status == "miss"
