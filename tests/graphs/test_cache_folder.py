"""The folder of the compile cache: what is deleted and what is kept, locks, folders of work."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from cache_cases import KEYS, NOW, leftovers, three_entries, truncate

from compiled_engine.graphs.cache import folder as folder_module
from compiled_engine.graphs.cache.folder import CacheFolder
from compiled_engine.graphs.cache.prune import Pruned, prune
from compiled_engine.graphs.cache.report import folder_bytes
from compiled_engine.graphs.cache.work_folder import WorkFolder, is_in_use


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> CacheFolder:
    return three_entries(root)


def reasons(done: list[Pruned]) -> list[tuple[str, str]]:
    return [(item.path.name, item.reason) for item in done]


# Deletion

OLD, LARGE = "not used for so long", "the longest unused, to come down to the size"


@pytest.mark.parametrize(
    ("older_than_s", "kept"), [(None, KEYS), (31, KEYS), (30, KEYS), (29, KEYS[1:]), (20, KEYS[1:]), (5, [])]
)
def test_entries_go_that_were_last_used_before_then(
    older_than_s: float | None, kept: list[str], cache: CacheFolder
) -> None:
    size = folder_bytes(cache.entry(KEYS[0]))
    done = prune(cache, now=NOW, older_than_s=older_than_s)
    assert cache.entry_keys() == sorted(kept)
    gone = sorted(set(KEYS) - set(kept))
    assert done == [Pruned(key, cache.entry(key), OLD, size) for key in gone]
    assert cache.all_keys() == sorted(kept)  # the locks of the others are gone too


@pytest.mark.parametrize(
    ("fits", "more", "kept"), [(3, 0, KEYS), (3, -1, KEYS[1:]), (2, 0, KEYS[1:]), (1, 5, KEYS[2:]), (0, 0, [])]
)
def test_the_longest_unused_go_until_the_rest_fits(fits: int, more: int, kept: list[str], cache: CacheFolder) -> None:
    sizes = [folder_bytes(cache.entry(key)) for key in KEYS]
    done = prune(cache, now=NOW, max_bytes=sum(sizes[3 - fits :]) + more)
    assert cache.entry_keys() == sorted(kept)
    assert {item.reason for item in done} <= {LARGE}


def test_damaged_entries_go_whenever_they_were_used_and_count_for_no_size(cache: CacheFolder) -> None:
    truncate(cache.entry(KEYS[2]))
    sizes = [folder_bytes(cache.entry(key)) for key in KEYS]
    done = prune(cache, now=NOW, older_than_s=100, max_bytes=sizes[0] + sizes[1])
    assert reasons(done) == [(KEYS[2], "damaged: pieces/a.bin was changed")]


def leave(root: Path, key: str) -> list[str]:
    """What a damaged entry and a killed process leave; the names."""
    names = [f"damaged_{key}_x", f"work_{key}_x"]
    for name in names:
        (root / "compiled" / name).mkdir()
        (root / "compiled" / name / "file").write_bytes(b"four")
    return names


@pytest.mark.parametrize("has_entry", [True, False])
def test_what_is_left_over_goes_and_the_entry_beside_it_stays(has_entry: bool, root: Path, cache: CacheFolder) -> None:
    key = KEYS[0] if has_entry else "0" * 32
    names = leave(root, key)
    done = prune(cache, now=NOW, older_than_s=100)
    assert reasons(done) == list(zip(names, ("set aside as damaged", "left by a killed process"), strict=True))
    assert [item.size_bytes for item in done] == [4, 4]
    assert all(item.removed and item.key == key for item in done)
    assert leftovers(root) == []
    assert cache.entry_keys() == sorted(KEYS)
    assert cache.all_keys() == sorted(KEYS)


def test_a_dry_run_says_the_same_and_deletes_nothing(root: Path, cache: CacheFolder) -> None:
    names = leave(root, KEYS[0]) + leave(root, "0" * 32)
    before = sorted(path.name for path in cache.path.iterdir())
    would = prune(cache, now=NOW, older_than_s=25, dry_run=True)
    assert leftovers(root) == sorted(names)
    assert sorted(path.name for path in cache.path.iterdir()) in (before, sorted([*before, f"{'0' * 32}.lock"]))
    assert prune(cache, now=NOW, older_than_s=25) == would
    assert [item.path.name for item in would if item.reason == OLD] == [KEYS[0]]
    assert len(would) == 5


def test_pruning_uses_no_entry(cache: CacheFolder) -> None:
    (cache.path / f"{KEYS[0]}.lock").unlink()
    os.utime(cache.entry(KEYS[0]), (NOW - 99, NOW - 99))
    for _ in range(2):
        (would,) = prune(cache, now=NOW, older_than_s=50, dry_run=True)
        assert would.path.name == KEYS[0]


def test_an_entry_that_goes_while_others_are_read_is_no_error(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheFolder, "entry_keys", lambda folder: ["f" * 32, *KEYS])
    assert [item.key for item in prune(cache, now=NOW, older_than_s=25)] == [KEYS[0]]


def test_what_another_process_has_is_left_alone(root: Path, cache: CacheFolder) -> None:
    """Of what was not to be deleted nothing is said."""
    leave(root, KEYS[2])
    with cache.locked(KEYS[0]), cache.locked(KEYS[2]):
        done = prune(cache, now=NOW, older_than_s=15)
    assert {(item.key, item.removed) for item in done} == {(KEYS[0], False), (KEYS[1], True)}
    assert {item.size_bytes > 0 for item in done if item.removed} == {True}
    assert {item.size_bytes for item in done if not item.removed} == {0}
    assert cache.entry_keys() == sorted([KEYS[0], KEYS[2]])
    assert len(leftovers(root)) == 2


# The folder


def test_only_keys_are_entries_and_all_that_has_a_key_is_listed(root: Path, cache: CacheFolder) -> None:
    others = ["a", "b", "c", "d", "e"]
    keys = [letter * 32 for letter in others]
    for name in (f"{keys[0]}.lock", f"{keys[1]}_graphs_{keys[0]}.json", f"work_{keys[2]}_x", f"damaged_{keys[3]}_x"):
        (cache.path / name).touch()
    for name in ("notes.txt", "z" * 32, keys[4][1:], f"{keys[4]}x", f"x{keys[4]}", "work_", f"other_{keys[4]}"):
        (cache.path / name).touch()
    assert cache.entry_keys() == sorted(KEYS)
    assert cache.all_keys() == sorted([*KEYS, *keys[:4]])


def test_leftovers_are_those_of_all_keys(root: Path, cache: CacheFolder) -> None:
    names = leave(root, KEYS[0]) + leave(root, "0" * 32)
    running = cache.work_folder(KEYS[1])
    assert sorted(path.name for path in cache.leftovers()) == sorted(names)
    assert cache.set_aside(KEYS[0]) == [cache.path / f"damaged_{KEYS[0]}_x"]
    assert cache.abandoned(KEYS[0]) == [cache.path / f"work_{KEYS[0]}_x"]
    cache.remove_abandoned(KEYS[0])
    cache.remove_abandoned(KEYS[1])
    assert sorted(path.name for path in cache.leftovers()) == sorted(name for name in names if name != names[1])
    cache.remove_set_aside(KEYS[0])
    assert sorted(path.name for path in cache.leftovers()) == sorted(names[2:])
    assert running.path.is_dir()


def test_without_a_lock_an_entry_was_used_when_it_was_made(cache: CacheFolder) -> None:
    assert cache.last_used(KEYS[0]) == NOW - 30
    (cache.path / f"{KEYS[0]}.lock").unlink()
    os.utime(cache.entry(KEYS[0]), (NOW - 99, NOW - 99))
    assert cache.last_used(KEYS[0]) == NOW - 99
    cache.mark_used(KEYS[0])  # is no error
    cache.mark_used(KEYS[1])
    assert cache.last_used(KEYS[1]) > NOW
    assert cache.last_used(KEYS[2]) == NOW - 10


def test_a_removed_entry_takes_with_it_what_belongs_to_its_key_alone(root: Path, cache: CacheFolder) -> None:
    leave(root, KEYS[0])
    other = leave(root, KEYS[1])
    graphs = [cache.path / f"{key}_graphs_{'0' * 32}.json" for key in KEYS[:2]]
    for path in graphs:
        path.touch()
    running = cache.work_folder(KEYS[0])
    with cache.locked(KEYS[0]):
        cache.remove(KEYS[0])
    assert cache.entry_keys() == sorted(KEYS[1:])
    assert [path.exists() for path in graphs] == [False, True]
    assert not (cache.path / f"{KEYS[0]}.lock").exists()
    assert running.path.is_dir()
    running.close()
    assert leftovers(root) == sorted(other)
    cache.remove("0" * 32)  # of which there is nothing


def test_a_lock_is_held_alone_and_free_again(cache: CacheFolder) -> None:
    with cache.locked(KEYS[0]):
        with pytest.raises(BlockingIOError, match="another process uses it"), cache.locked(KEYS[0], wait=False):
            pass
        with cache.locked(KEYS[1], wait=False):  # another key's
            pass
    with pytest.raises(KeyError), cache.locked(KEYS[0], wait=False):
        raise KeyError
    with cache.locked(KEYS[0], wait=False):
        pass


def test_waiting_is_logged_once(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, tries = [0.0], iter([False] * 9 + [True])
    monkeypatch.setattr(folder_module, "_try_lock", lambda handle: next(tries))
    monkeypatch.setattr(folder_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(folder_module.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    said_at = []
    handler = logging.Handler()
    handler.emit = lambda record: said_at.append(clock[0])  # type: ignore[method-assign]
    logging.getLogger("compiled_engine").addHandler(handler)
    try:
        with cache.locked(KEYS[0], notice_after_s=0.22):
            pass
    finally:
        logging.getLogger("compiled_engine").removeHandler(handler)
    assert len(said_at) == 1
    assert 0.22 < said_at[0] < 0.4
    assert str(cache.path / f"{KEYS[0]}.lock") in caplog.text


def test_on_a_disk_that_can_only_be_read_a_lock_that_is_there_is_taken(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with cache.locked(KEYS[0]):
        pass
    with pytest.raises(OSError, match="Read-only"), cache.locked("0" * 32):
        pass


def test_a_folder_of_work_goes_with_its_object_and_is_in_use_until_then(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, "work_")
    assert work.path.is_dir()
    assert list(work.path.iterdir()) == []
    (outer,) = tmp_path.iterdir()
    assert outer.name.startswith("work_")
    assert is_in_use(outer)
    (work.path / "file").touch()
    work.close()
    work.close()
    assert list(tmp_path.iterdir()) == []
    assert not is_in_use(outer)
    outer.mkdir()
    assert not is_in_use(outer)  # without a lock
    (outer / "lock").touch()
    assert not is_in_use(outer)


def test_a_child_leaves_its_parents_folder_of_work(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, "work_")
    child = os.fork()
    if child == 0:
        work.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert work.path.is_dir()
    assert is_in_use(work.path.parent)
