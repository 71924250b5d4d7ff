"""Reports about the compile cache: entries, the nearest of them, differences in words, and why one is absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cache_cases import (
    FACTORS,
    KEYS,
    LOADED,
    NOBODY,
    NOW,
    VARIANTS,
    Builder,
    build_once,
    changed,
    leftovers,
    load,
    three_entries,
    truncate,
    use_was,
)

from compiled_engine.graphs.cache.diff import Difference, differences, flatten, why_absent
from compiled_engine.graphs.cache.entry import DamagedEntry, factors_key, read_factors
from compiled_engine.graphs.cache.folder import CacheFolder, open_cache
from compiled_engine.graphs.cache.lookup import find_or_build
from compiled_engine.graphs.cache.report import (
    EntryReport,
    existing_cache,
    find_key,
    folder_bytes,
    nearest,
    report,
    short,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> CacheFolder:
    return three_entries(root)


def entry_of(key: str, last_used: float = 0.0, **factors: Any) -> EntryReport:
    return EntryReport(key, Path(key), factors, [], 1, 0.0, last_used, None)


def test_a_report_has_size_times_and_factors(root: Path, cache: CacheFolder) -> None:
    os.utime(cache.entry(KEYS[0]), (NOW - 500, NOW - 500))
    found = report(cache, KEYS[0])
    assert (found.key, found.path, found.damage) == (KEYS[0], cache.entry(KEYS[0]), None)
    assert (found.created, found.last_used) == (NOW - 500, NOW - 30)
    assert found.factors == VARIANTS[0]
    assert found.passes_off == ["silu_mul"]
    assert found.size_bytes == sum(path.stat().st_size for path in found.path.rglob("*") if path.is_file())


def test_factors_that_are_not_those_of_the_key_are_not_reported(cache: CacheFolder) -> None:
    (cache.entry(KEYS[0]) / "factors.json").write_text(json.dumps(VARIANTS[1]))
    found = report(cache, KEYS[0])
    assert (found.factors, found.damage) == ({}, "its factors are not those of its key")
    truncate(cache.entry(KEYS[1]))
    damaged = report(cache, KEYS[1])
    assert (damaged.factors, damaged.damage) == (VARIANTS[1], "pieces/a.bin was changed")


@pytest.mark.parametrize(
    ("ranks", "texts", "off"),
    [
        (None, ['[{"name": "sequence_parallel", "enabled": false}]'], []),
        (1, ['[{"name": "all_reduce_residual_rms_norm", "enabled": false}]'], []),
        (2, ['[{"name": "sequence_parallel", "enabled": false}]'], ["sequence_parallel"]),
        (1, ['[{"name": "a", "enabled": false}, {"name": "b", "enabled": true}]'], ["a"]),
        (1, ["[", '[{"name": "a", "enabled": false}]'], ["a"]),
        (1, ['[{"name": "a"}]'], []),
        (1, ["7"], []),
        (1, [], []),
    ],
)
def test_passes_that_were_off_are_those_of_the_first_list_that_can_be_read(
    ranks: int | None, texts: list[str], off: list[str], tmp_path: Path
) -> None:
    config = {} if ranks is None else {"parallel.tensor_parallel_size": ranks}
    factors = {"config": config, "number": len(texts)}

    def build(folder: Path) -> None:
        for number, text in enumerate(texts):
            (folder / str(number)).mkdir()
            (folder / str(number) / "passes.json").write_text(text)

    key = find_or_build(tmp_path, factors, build).key
    assert report(open_cache(tmp_path), key).passes_off == off


def test_the_size_of_a_folder_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 1000)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(b"x" * 7)
    (folder / "file").write_bytes(b"x" * 5)
    assert folder_bytes(folder) == 12
    (folder / "link").symlink_to(tmp_path / "outside")
    assert folder_bytes(folder) == 12 + (folder / "link").lstat().st_size


def test_a_cache_that_was_never_used_is_none_and_is_not_made(root: Path) -> None:
    assert existing_cache(root) is None
    assert not root.exists()
    build_once(root)
    found = existing_cache(root)
    assert found is not None
    assert found == open_cache(root)


def test_keys_are_found_by_how_they_begin() -> None:
    keys = ["ab" + "0" * 30, "ab" + "1" * 30, "cd" + "2" * 30]
    assert find_key(keys, "c") == find_key(keys, keys[2]) == keys[2]
    assert find_key(keys, "ab1") == keys[1]
    with pytest.raises(ValueError, match=r"KEY is 'ab', but 2 entries begin with it: ab0000, ab1111$"):
        find_key(keys, "ab")
    with pytest.raises(ValueError, match=r"KEY is 'ab', but the cache has no entries$"):
        find_key([], "ab")
    with pytest.raises(ValueError, match=f"KEY is 'ce', but no entry begins with it; the nearest: {short(keys[2])}, "):
        find_key(keys, "ce")
    assert short(keys[0]) == keys[0][:12]


def test_the_nearest_entry_differs_in_the_fewest_factors_the_code_is_one_of_them() -> None:
    ours = {"config": {"a": 1, "b": 1}, "source": {"x": "1", "y": "1", "z": "1"}, "passes": {"p": "1"}}
    code = entry_of("code", 1, **ours | {"source": {"x": "2", "y": "2", "z": "1"}, "passes": {"p": "2"}})
    one = entry_of("one", 1, **ours | {"config": {"a": 2, "b": 1}})
    two = entry_of("two", 9, **ours | {"config": {"a": 2, "b": 2}})
    both = entry_of("both", 9, **ours | {"config": {"a": 2, "b": 1}, "source": {"x": "2", "y": "1", "z": "1"}})
    assert nearest([], ours) is None
    assert nearest([entry_of("unreadable")], ours) is None
    for entries, expected in (
        *(
            ([two, one, both], "one"),
            ([two, both], "two"),
            ([two, code], "code"),
            ([entry_of("unreadable"), two], "two"),
        ),
        *(
            ([one, entry_of("later", 2, **code.factors)], "later"),
            ([code, entry_of("later", 2, **one.factors)], "later"),
        ),
    ):
        found = nearest(entries, ours)
        assert found is not None
        assert found.entry.key == expected
    found = nearest([two], ours)
    assert found is not None
    assert found.differences == [Difference("config.a", 1, 2), Difference("config.b", 1, 2)]


# Differences in words


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (Difference("config.scheduler.max_num_seqs", 8, 4), "scheduler.max_num_seqs: 8 here, 4 there"),
        (Difference("settings.inductor.x", True, None), "inductor.x: True here, not set there"),
        (Difference("versions.torch", "2.13", "2.14"), "versions.torch: '2.13' here, '2.14' there"),
        (Difference("device.index", None, 0), "device.index: not set here, 0 there"),
        (Difference("source.a/b.py", "1", "2"), "source code: compiled_engine/a/b.py was changed"),
        (Difference("source.a/b.py", "1", None), "source code: compiled_engine/a/b.py is only here"),
        (Difference("source.a/b.py", None, "2"), "source code: compiled_engine/a/b.py is only there"),
        (Difference("passes.silu_mul", "1", "2"), "pass silu_mul was changed"),
        (Difference("passes.silu_mul", "1", None), "pass silu_mul is only here"),
        (Difference("config.l", ["a", "b"], ["b", "c"]), "l: a only here; c only there"),
        (Difference("config.l", ["a", "b", "c"], ["b"]), "l: a, c only here"),
        (Difference("config.l", [], [1, 2]), "l: 1, 2 only there"),
        (Difference("config.l", ["a", "b"], ["b", "a"]), "l: ['a', 'b'] here, ['b', 'a'] there"),
        (Difference("config.l", ["a"], None), "l: ['a'] here, not set there"),
        (Difference("config.l", None, ["a"]), "l: not set here, ['a'] there"),
    ],
)
def test_a_difference_in_words(difference: Difference, words: str) -> None:
    assert difference.in_words("here", "there") == words


def test_differences_are_sorted_and_a_pass_that_one_side_runs_is_said_by_the_list_of_passes() -> None:
    ours = {"passes": {"a": "1", "b": "1"}, "config": {"z": 1, "y": {"x": None}}, "device": "cpu"}
    theirs = {"passes": {"a": "2", "c": "1"}, "config": {"z": 2}, "device": "cpu"}
    assert differences(ours, theirs) == [Difference("config.z", 1, 2), Difference("passes.a", "1", "2")]
    assert differences(theirs, ours) == [Difference("config.z", 2, 1), Difference("passes.a", "2", "1")]
    assert flatten(ours) == {"passes.a": "1", "passes.b": "1", "config.z": 1, "config.y.x": None, "device": "cpu"}


def test_why_an_entry_is_absent_is_told_by_the_most_similar_one(root: Path, cache: CacheFolder) -> None:
    layers = changed("config", model__num_layers=77)
    assert why_absent(cache, layers) == "no entry of the same config.model.num_layers"
    far = layers | {"device": {"type": "cuda"}, "versions": {"torch": "9"}}
    three = "no entry of the same config.model.num_layers, device.type, versions.torch"
    assert why_absent(cache, far) == three
    farther = far | {"settings": {"inductor": {"a": 1}}, "source": {"x": "1"}}
    assert why_absent(cache, farther) == (
        "no entry of the same config.model.num_layers, device.type, settings.inductor.a and 3 more"
    )
    build_once(root, far)
    (cache.entry(factors_key(far)) / "factors.json").write_text("{")
    assert why_absent(cache, farther).startswith("no entry of the same config.model.num_layers, device.type")
    for key in cache.entry_keys():
        shutil.rmtree(cache.entry(key))
    assert why_absent(cache, far) == "the cache is empty"


def test_a_lookup_says_why_nothing_was_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_or_build(root, FACTORS, Builder(), load).why == "the cache is empty"
    truncate(open_cache(root).entry(factors_key(FACTORS)))
    assert find_or_build(root, FACTORS, Builder(), load).why == "the entry was damaged"
    found = find_or_build(root, FACTORS, Builder(), load, uid=NOBODY)
    assert (found.status, found.why, found.folder) == ("off", "the folder cannot be used", found.work.path)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CacheFolder, "store", full)
    other = changed("device", type="cuda")
    found = find_or_build(root, other, Builder(), load)
    assert (found.status, found.why, found.folder) == ("off", "it could not be kept", found.work.path)
    assert found.key == factors_key(other)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "full"), True),
        (OSError(errno.EFBIG, "full"), True),
        (RuntimeError(f"ld: {os.strerror(errno.EDQUOT)}"), True),
        (OSError(errno.EACCES, "denied"), False),
        (RuntimeError("syntax error"), False),
    ],
)
@pytest.mark.parametrize("depth", ["itself", "cause", "context"])
def test_a_build_without_space_is_made_again_in_the_temporary_folder(
    depth: str, error: Exception, again: bool, root: Path
) -> None:
    build = Builder()

    def fail(folder: Path) -> None:
        build(folder)
        if not folder.is_relative_to(root):
            return
        if depth == "itself":
            raise error
        try:
            raise error
        except Exception as inner:
            if depth == "cause":
                raise KeyError from inner
            raise KeyError  # noqa: B904

    if again:
        found = find_or_build(root, FACTORS, fail, load)
        assert (found.status, found.loaded, build.builds) == ("miss", LOADED, 2)
        assert not found.work.path.is_relative_to(root)
    else:
        with pytest.raises(type(error) if depth == "itself" else KeyError):
            find_or_build(root, FACTORS, fail, load)
        assert build.builds == 1
    assert leftovers(root) == []


@pytest.mark.parametrize(("free", "here"), [((256 << 20) - 1, False), (256 << 20, True)])
def test_the_compiler_works_beside_the_cache_where_there_is_space(
    free: int, here: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    found = find_or_build(root, FACTORS, Builder(), load)
    assert found.status == "miss"
    assert found.work.path.is_relative_to(root) is here


def test_a_build_is_a_use_though_its_lock_is_old(root: Path) -> None:
    cache = open_cache(root)
    (cache.path / f"{KEYS[0]}.lock").touch()
    use_was(root, KEYS[0], 30)
    assert cache.last_used(KEYS[0]) == NOW - 30
    build_once(root, VARIANTS[0])
    assert cache.last_used(KEYS[0]) > NOW


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (None, "factors.json is missing"),
        (b"{", "its factors cannot be read"),
        (bytes(range(256)), "its factors cannot be read"),
        (b"[]", "its factors are not a list of names and values"),
    ],
)
def test_factors_that_cannot_be_read_are_damage(content: bytes | None, damage: str, cache: CacheFolder) -> None:
    path = cache.entry(KEYS[0]) / "factors.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedEntry, match=damage):
        read_factors(cache.entry(KEYS[0]))
    found = report(cache, KEYS[0])
    assert found.factors == {}
    assert damage in str(found.damage)


def test_a_file_that_cannot_be_read_is_damage(cache: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == "a.bin":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert report(cache, KEYS[0]).damage == f"pieces/a.bin cannot be read: {os.strerror(errno.EIO)}"
