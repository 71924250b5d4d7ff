"""What was compiled is found again: by its factors, wherever the folder is, by several processes and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from cache_cases import FACTORS, LOADED, Builder, build_once, changed, load
from folders import SUPPORT

from compiled_engine.graphs.cache.entry import factors_key, read_factors
from compiled_engine.graphs.cache.folder import CacheFolder, open_cache
from compiled_engine.graphs.cache.lookup import find_or_build
from compiled_engine.llm import LLM
from compiled_engine.process.cache_root import default_root
from compiled_engine.sampling.params import SamplingParams


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file: where it is on the disk, when it was written, and what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_the_second_lookup_is_a_hit(root: Path) -> None:
    build = Builder()
    first = find_or_build(root, FACTORS, build, load)
    assert (first.status, first.loaded) == ("miss", LOADED)
    found = find_or_build(root, FACTORS, build, load)
    assert (found.status, found.loaded, found.folder, build.builds) == ("hit", LOADED, first.folder, 1)
    assert found.key == factors_key(FACTORS)
    assert read_factors(found.folder) == FACTORS
    assert (first.why, found.why) == ("the cache is empty", "found")


def test_other_factors_are_another_entry(root: Path) -> None:
    build = Builder()
    other = changed("device", type="cuda")
    assert find_or_build(root, FACTORS, build).folder != find_or_build(root, other, build).folder
    assert build.builds == 2
    assert find_or_build(root, changed("device", type="other"), build).why == "no entry of the same device.type"
    assert find_or_build(None, FACTORS, build).why == "switched off"


def test_the_folder_is_private_and_the_users_own_keeps_its_mode(root: Path) -> None:
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    assert find_or_build(root, FACTORS, Builder()).status == "miss"
    assert (root.stat().st_mode & 0o777) == 0o755
    assert ((root / "compiled").stat().st_mode & 0o777) == 0o700
    (root / "compiled").chmod(0o755)
    assert find_or_build(root, FACTORS, Builder()).status == "hit"
    assert ((root / "compiled").stat().st_mode & 0o777) == 0o700


def test_a_moved_folder_stays_valid(root: Path, tmp_path: Path) -> None:
    build_once(root)
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    assert find_or_build(moved, FACTORS, Builder()).status == "hit"


def test_without_a_root_nothing_is_kept() -> None:
    build = Builder()
    found = find_or_build(None, FACTORS, build, load)
    assert (found.status, found.loaded) == ("off", LOADED)
    folder = found.folder
    del found
    assert not folder.exists()
    assert find_or_build(None, FACTORS, build).status == "off"
    assert build.builds == 2


def test_nothing_that_is_written_where_an_engine_works_gets_into_the_entry(root: Path) -> None:
    """Compilers write beside their artifacts when these are loaded and when they first run."""

    def load_and_write(folder: Path) -> Path:
        (folder / "pieces" / "a.bin").write_bytes(b"something else")
        (folder / "pieces" / "tuned.best_config").write_text("{}")
        return folder

    entry = build_once(root)
    before = contents(entry)
    first = find_or_build(root, FACTORS, Builder(), load_and_write)
    second = find_or_build(root, FACTORS, Builder(), load_and_write)
    assert (first.status, second.status) == ("hit", "hit")
    assert first.loaded != second.loaded
    (first.loaded / "later.so").write_bytes(b"while it runs")
    assert contents(entry) == before
    folders = first.loaded, second.loaded
    del first, second
    assert not any(folder.exists() for folder in folders)


def test_what_the_first_load_writes_is_kept_with_the_entry(root: Path) -> None:
    """So that what it had to find out about the machine is known to the next one."""

    def load_and_probe(folder: Path) -> bool:
        probe = folder / "probe.so"
        known = probe.exists()
        probe.write_bytes(b"probe")
        return known

    assert find_or_build(root, FACTORS, Builder(), load_and_probe).loaded is False
    assert find_or_build(root, FACTORS, Builder(), load_and_probe).loaded is True


def test_tritons_lists_of_files_name_the_folder_that_they_are_in(root: Path) -> None:
    """Triton looks up a kernel's files by absolute paths, and compiles it again where these lead nowhere."""

    def build_kernel(folder: Path) -> None:
        kernel = folder / "triton" / "ABCD"
        kernel.mkdir(parents=True)
        (kernel / "norm.cubin").write_bytes(b"cubin of " + bytes(folder))
        (kernel / "__grp__norm.json").write_text(json.dumps({"child_paths": {"norm.cubin": f"{kernel}/norm.cubin"}}))

    def listed(folder: Path) -> Path:
        (group,) = folder.rglob("__grp__*")
        return Path(json.loads(group.read_text())["child_paths"]["norm.cubin"])

    built = find_or_build(root, FACTORS, build_kernel)
    folder = built.work.path
    del built
    found = find_or_build(root, FACTORS, build_kernel)
    assert found.status == "hit"
    assert listed(found.work.path) == found.work.path / "triton" / "ABCD" / "norm.cubin"
    assert listed(found.work.path).read_bytes() == b"cubin of " + bytes(folder)
    assert str(root) not in listed(found.folder).as_posix()


def test_what_cannot_be_loaded_is_not_kept(root: Path) -> None:
    def fail(folder: Path) -> None:
        raise ImportError("cannot read file data")

    with pytest.raises(ImportError, match="cannot read"):
        find_or_build(root, FACTORS, Builder(), fail)
    build = Builder()
    assert (find_or_build(root, FACTORS, build, load).status, build.builds) == ("miss", 1)


def test_a_failed_build_leaves_only_its_lock(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"half")
        raise RuntimeError("compiler failed")

    with pytest.raises(RuntimeError, match="compiler failed"):
        find_or_build(root, FACTORS, fail)
    assert [path.name for path in (root / "compiled").iterdir()] == [f"{factors_key(FACTORS)}.lock"]


def test_use_is_recorded_beside_the_entry(root: Path) -> None:
    key = build_once(root).name
    cache = open_cache(root)
    os.utime(root / "compiled" / f"{key}.lock", (1000, 1000))
    assert cache.last_used(key) == 1000
    before = time.time()
    assert find_or_build(root, FACTORS, Builder()).status == "hit"
    assert cache.last_used(key) >= before - 1


def test_threads_that_want_the_same_build_it_once(root: Path) -> None:
    build = Builder()
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_or_build(root, FACTORS, build, load).status))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.builds == 1
    assert sorted(found) == ["hit", "hit", "hit", "miss"]


OTHER_PROCESS = """
import sys, logging
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_cases import FACTORS, Builder, load
from compiled_engine.graphs.cache.lookup import find_or_build
logging.basicConfig()
def build(folder):
    print("building", flush=True)
    sys.stdin.readline()
    Builder()(folder)
print(find_or_build(Path({root!r}), FACTORS, build, load, notice_after_s=0.2).status, flush=True)
"""


def other_process(root: Path, stdin: int) -> subprocess.Popen[str]:
    """stdin: where a build waits for a line."""
    command = [sys.executable, "-c", OTHER_PROCESS.format(tests=str(SUPPORT), root=str(root))]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_process_waits_says_so_and_finds_it(root: Path) -> None:
    first = other_process(root, subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = other_process(root, subprocess.DEVNULL)
    assert second.stderr is not None
    at_the_latest = threading.Timer(60, first.kill)
    at_the_latest.start()
    assert "waiting for another process that compiles the same model" in second.stderr.readline()
    said, logged = first.communicate("\n", timeout=60)
    at_the_latest.cancel()
    assert (said, logged) == ("miss\n", "")
    said, _ = second.communicate(timeout=60)
    assert said == "hit\n"


def test_a_lock_that_was_removed_while_one_waited_is_taken_anew(root: Path) -> None:
    """Else the one who waited and the next to come would both hold a lock, of two files."""
    cache = open_cache(root)
    key = factors_key(FACTORS)
    held: list[str] = []

    def wait(cache: CacheFolder = cache) -> None:
        with cache.locked(key, notice_after_s=60):
            held.append("waited")
            with pytest.raises(BlockingIOError), cache.locked(key, wait=False):
                held.append("both")

    with cache.locked(key):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        (root / "compiled" / f"{key}.lock").unlink()
    thread.join()
    assert held == ["waited"]


def test_the_default_root_follows_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ENGINE_CACHE_DIR", "/a/b")
    assert default_root() == Path("/a/b")
    monkeypatch.delenv("COMPILED_ENGINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_root() == Path("/c/compiled_engine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/d")
    assert default_root() == Path("/home/d/.cache/compiled_engine")


OPTIONS: dict[str, Any] = {
    "mode": "compiled",
    "device": "cpu",
    "progress": False,
    "max_num_seqs": 2,
    "num_blocks": 16,
    "max_model_len": 64,
}
# Two entries of the compile cache that tests of `compiled-engine inspect` and of other engines have as well.
FIRST: dict[str, Any] = {"max_num_batched_tokens": 64, "compile_ranges": ()}
SECOND: dict[str, Any] = {"max_num_batched_tokens": 32}
PARAMS = SamplingParams(temperature=0, max_tokens=4)


def complete(llm: LLM) -> tuple[int, ...]:
    return tuple(llm.generate("def f(", PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.usefixtures("one_thread")
def test_two_engines_and_the_callers_own_compile_keep_to_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = tmp_path / "callers"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(callers))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    with LLM(**OPTIONS, **FIRST) as first, LLM(**OPTIONS, **SECOND) as second:
        entries = [Path(llm.metrics()["cache_entry"]) for llm in (first, second)]
        before = [contents(entry) for entry in entries]
        assert entries[0] != entries[1]
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(callers)
        assert "TRITON_CACHE_DIR" not in os.environ
        with inductor_config.patch(cpp_cache_precompile_headers=False):  # which take longer than all else here
            torch.testing.assert_close(torch.compile(doubled)(torch.ones(3)), torch.full((3,), 3.0))
        assert complete(first) == complete(second)
    assert list(callers.rglob("*.py"))
    assert [contents(entry) for entry in entries] == before
    with LLM(**OPTIONS, **FIRST) as again:
        metrics = again.metrics()
        assert (metrics["cache"], metrics["traces"], metrics["compiles"]) == ("hit", 0, 0)
        assert complete(again)
