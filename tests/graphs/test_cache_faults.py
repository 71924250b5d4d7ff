"""Whatever happens to the cache folder: reported, set aside, built again or done without; no crash, no wrong hit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_cases import FACTORS, LOADED, NOBODY, Builder, build_once, changed, leftovers, load, truncate

from compiled_engine.graphs.cache.entry import DamagedEntry, check_files, factors_key
from compiled_engine.graphs.cache.lookup import find_or_build

KEY = factors_key(FACTORS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def flip_a_byte(entry: Path) -> None:
    (entry / "pieces" / "a.bin").write_bytes(b"artifacT")


def remove_a_file(entry: Path) -> None:
    (entry / "1-2048" / "plan.json").unlink()


def add_a_file(entry: Path) -> None:
    (entry / "pieces" / "b.bin").write_bytes(b"")


def replace_a_file_by_a_folder(entry: Path) -> None:
    (entry / "pieces" / "a.bin").unlink()
    (entry / "pieces" / "a.bin").mkdir()


def replace_a_file_by_a_pipe(entry: Path) -> None:
    (entry / "pieces" / "a.bin").unlink()
    os.mkfifo(entry / "pieces" / "a.bin")


def empty_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{}")


def cut_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"1-2048/plan.json": ')


def fill_the_manifest_with_garbage(entry: Path) -> None:
    (entry / "manifest.json").write_bytes(bytes(range(256)))


def make_the_manifest_a_list(entry: Path) -> None:
    (entry / "manifest.json").write_text('["1-2048/plan.json"]')


def make_the_manifest_name_a_file_outside(entry: Path) -> None:
    outside = entry.parent / "outside"
    outside.write_bytes(b"outside")
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["../outside"] = hashlib.sha256(b"outside").hexdigest()
    (entry / "manifest.json").write_text(json.dumps(manifest))


def remove_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def edit_the_factors(entry: Path) -> None:
    (entry / "factors.json").write_text(json.dumps(changed("device", type="cuda")))


def edit_the_factors_and_the_manifest(entry: Path) -> None:
    """A consistent entry under a key that is not its own."""
    text = json.dumps(changed("device", type="cuda"))
    (entry / "factors.json").write_text(text)
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["factors.json"] = hashlib.sha256(text.encode()).hexdigest()
    (entry / "manifest.json").write_text(json.dumps(manifest))


def link_the_entry(entry: Path) -> None:
    real = entry.parent / "real"
    entry.rename(real)
    entry.symlink_to(real)


def link_a_folder(entry: Path) -> None:
    real = entry.parent / "real"
    (entry / "pieces").rename(real)
    (entry / "pieces").symlink_to(real)


def link_a_file(entry: Path) -> None:
    outside = entry.parent / "outside.bin"
    (entry / "pieces" / "a.bin").rename(outside)
    (entry / "pieces" / "a.bin").symlink_to(outside)


def make_the_entry_a_file(entry: Path) -> None:
    entry.rename(entry.parent / "real")
    entry.write_text("not a folder")


DAMAGE = [
    flip_a_byte,
    truncate,
    remove_a_file,
    add_a_file,
    replace_a_file_by_a_folder,
    replace_a_file_by_a_pipe,
    empty_the_manifest,
    cut_the_manifest,
    fill_the_manifest_with_garbage,
    make_the_manifest_a_list,
    make_the_manifest_name_a_file_outside,
    remove_the_manifest,
    edit_the_factors,
    edit_the_factors_and_the_manifest,
    link_the_entry,
    link_a_folder,
    link_a_file,
    make_the_entry_a_file,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_never_read_but_set_aside_and_built_again(
    root: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(build_once(root))
    build = Builder()
    loaded_after: list[int] = []

    def load_and_count(folder: Path) -> tuple[bytes, str]:
        loaded_after.append(build.builds)
        return load(folder)

    found = find_or_build(root, FACTORS, build, load_and_count)
    assert (found.status, found.loaded, build.builds) == ("miss", LOADED, 1)
    assert loaded_after == [1]
    assert "is damaged" in caplog.text
    assert KEY in caplog.text
    assert [name.startswith(f"damaged_{KEY}_") for name in leftovers(root) if name.startswith("damaged_")] == [True]
    assert find_or_build(root, FACTORS, build, load).status == "hit"


def test_only_the_newest_of_the_damaged_is_kept(root: Path) -> None:
    for _ in range(3):
        truncate(build_once(root))
    build_once(root)
    assert len(leftovers(root)) == 1


def test_an_entry_of_another_user_is_not_used(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_once(root)
    build = Builder()
    found = find_or_build(root, FACTORS, build, load, uid=NOBODY)
    assert (found.status, found.loaded, build.builds) == ("off", LOADED, 1)
    assert "belongs to another user" in caplog.text
    assert str(root) in caplog.text


@pytest.mark.parametrize("what", [".", "pieces", "pieces/a.bin", "manifest.json"])
def test_one_foreign_file_makes_an_entry_damaged(root: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    entry = build_once(root)
    if os.geteuid() == 0:
        os.chown(entry / what, NOBODY, NOBODY)
        assert find_or_build(root, FACTORS, Builder(), load).status == "miss"
        assert "another user owns" in caplog.text
    else:  # who cannot give files away: to somebody else all of the entry is foreign
        with pytest.raises(DamagedEntry, match="another user owns"):
            check_files(entry, os.geteuid() + 1)


def test_a_root_that_is_a_link_is_not_used(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = build_once(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    assert find_or_build(link, FACTORS, Builder(), load).status == "off"
    assert f"{link} is a symbolic link" in caplog.text
    caplog.clear()
    entry.parent.rename(tmp_path / "real")
    entry.parent.symlink_to(tmp_path / "real")
    assert find_or_build(root, FACTORS, Builder(), load).status == "off"
    assert "is a symbolic link" in caplog.text


def test_a_lock_that_is_a_link_is_not_used(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = build_once(root).with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "target")
    assert find_or_build(root, FACTORS, Builder(), load).status == "off"
    assert "cannot be used" in caplog.text
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o707])
def test_a_root_that_others_can_write_to_is_not_used(mode: int, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.mkdir()
    root.chmod(mode)
    assert find_or_build(root, FACTORS, Builder(), load).status == "off"
    assert "other users can write to" in caplog.text
    root.chmod(0o1777)  # as /tmp: who does not own a folder cannot replace it
    assert find_or_build(root, FACTORS, Builder(), load).status == "miss"


def test_a_root_below_a_file_means_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "cache"):
        build = Builder()
        found = find_or_build(root, FACTORS, build, load)
        assert (found.status, found.loaded, build.builds) == ("off", LOADED, 1)
        assert f"compile cache {root} cannot be used" in caplog.text


def test_an_entry_that_cannot_be_loaded_is_built_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_once(root)
    build = Builder()

    def fail_first(folder: Path) -> str:
        if build.builds == 0:
            raise OSError("file too short")
        return "loaded"

    found = find_or_build(root, FACTORS, build, fail_first)
    assert (found.status, found.loaded, build.builds) == ("miss", "loaded", 1)
    assert "it cannot be loaded: file too short" in caplog.text
