"""A disk that is full or read-only, a process that is killed: what was compiled is used, and nothing half is kept."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_cases import FACTORS, LOADED, NOBODY, Builder, leftovers, load, truncate
from folders import SUPPORT

from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.lookup import find_or_build

KEY = factors_key(FACTORS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


WITHOUT_PRIVILEGES = """
import logging, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_cases import FACTORS, Builder, changed, load
from compiled_engine.graphs.cache.lookup import find_or_build
logging.basicConfig()
with tempfile.TemporaryDirectory() as home:
    if os.geteuid() == 0:  # who may write anywhere
        os.chown(home, {nobody}, {nobody})
        os.setgid({nobody})
        os.setuid({nobody})
    root, build = Path(home) / "cache", Builder()
    print(find_or_build(root, FACTORS, build, load).status)
    (root / "compiled").chmod(0o500)
    found = find_or_build(root, FACTORS, build, load)
    print(found.status, found.loaded, build.builds)
    found = find_or_build(root, changed("device", type="cuda"), build, load)
    print(found.status, found.loaded, build.builds)
    (root / "compiled").chmod(0o700)
"""


def test_a_read_only_folder_is_read_and_not_written_to() -> None:
    code = WITHOUT_PRIVILEGES.format(nobody=NOBODY, tests=str(SUPPORT))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["miss", f"hit {LOADED} 1", f"off {LOADED} 2"], result.stderr
    assert "/cache cannot be used" in result.stderr
    assert "Permission denied" in result.stderr


def test_a_disk_that_fills_up_while_compiling_costs_one_build_elsewhere(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()

    def fill(folder: Path) -> None:
        build(folder)
        if folder.is_relative_to(root):
            raise RuntimeError("g++ failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = find_or_build(root, FACTORS, fill, load)
    assert (found.status, found.loaded, build.builds) == ("miss", LOADED, 2)
    assert not found.work.path.is_relative_to(root)
    assert f"there is no space to compile in {root / 'compiled'}" in caplog.text
    assert leftovers(root) == []


def test_a_disk_full_everywhere_is_an_error(root: Path) -> None:
    build = Builder()

    def fill(folder: Path) -> None:
        build(folder)
        raise RuntimeError("ld: final link failed: No space left on device")

    with pytest.raises(RuntimeError, match="No space left"):
        find_or_build(root, FACTORS, fill, load)
    assert build.builds == 2


LIMITED = """
import errno, logging, os, resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_cases import FACTORS, Builder, load
from compiled_engine.graphs.cache.lookup import find_or_build
logging.basicConfig()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root, build = Path({root!r}), Builder()
def limited(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    build(folder)
    (folder / "large.bin").write_bytes(bytes(100_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
found = find_or_build(root, FACTORS, limited, load)
print(found.status, found.loaded, build.builds, (found.folder / "large.bin").stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
found = find_or_build(root, FACTORS, lambda folder: build(folder), load)
print(found.status, build.builds)
"""


def test_what_was_built_but_finds_no_room_in_the_cache_is_used_all_the_same(root: Path) -> None:
    """The kernel refuses to write a file as large as the build's."""
    code = LIMITED.format(tests=str(SUPPORT), root=str(root))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == [f"off {LOADED} 1 100000", "miss 2"], result.stderr
    assert f"compile cache {root / 'compiled'} cannot keep what was compiled" in result.stderr
    assert os.strerror(errno.EFBIG) in result.stderr


def test_a_lock_file_of_a_dead_process_is_no_obstacle(root: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from compiled_engine.graphs.cache.folder import open_cache\n"
        f"with open_cache(Path({str(root)!r})).locked({KEY!r}): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == -signal.SIGKILL
    assert (root / "compiled" / f"{KEY}.lock").exists()
    start = time.monotonic()
    assert find_or_build(root, FACTORS, Builder(), load).status == "miss"
    assert time.monotonic() - start < 30


SLOW_WRITER = """
import os, sys
from pathlib import Path
from compiled_engine.graphs.cache.lookup import find_or_build
def build(folder):
    for number in range(200):
        (folder / f"{{number}}.bin").write_bytes(bytes([number]) * 5000)
def load(folder):
    return [(folder / f"{{number}}.bin").read_bytes() for number in range(200)]
print("go", flush=True)
print(find_or_build(Path({root!r}), {{"some": "factors"}}, build, load).status, flush=True)
"""


@pytest.mark.parametrize("seed", range(8))
def test_a_process_killed_at_any_moment_leaves_no_wrong_hit(root: Path, seed: int) -> None:
    code = SLOW_WRITER.format(root=str(root))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "go\n"
    time.sleep(random.Random(seed).uniform(0, 0.12))
    writer.kill()
    finished = "miss" in writer.communicate()[0]
    whole = [bytes([number]) * 5000 for number in range(200)]

    def build(folder: Path) -> None:
        for number, content in enumerate(whole):
            (folder / f"{number}.bin").write_bytes(content)

    def read(folder: Path) -> list[bytes]:
        return [(folder / f"{number}.bin").read_bytes() for number in range(200)]

    found = find_or_build(root, {"some": "factors"}, build, read)
    assert found.loaded == whole
    assert found.status == "hit" or not finished
    del found
    assert leftovers(root) == []


def test_what_killed_engines_have_left_goes_with_the_next_start(root: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from cache_cases import FACTORS, Builder; from compiled_engine.graphs.cache.lookup import find_or_build\n"
        f"running = find_or_build(Path({str(root)!r}), FACTORS, Builder())\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = leftovers(root)
    found = find_or_build(root, FACTORS, Builder(), load)
    assert found.status == "hit"
    assert left not in leftovers(root)


def test_a_folder_in_use_is_not_taken_for_a_leftover(root: Path) -> None:
    running = find_or_build(root, FACTORS, Builder(), load)
    truncate(running.folder)
    assert find_or_build(root, FACTORS, Builder(), load).status == "miss"
    assert load(running.work.path) == LOADED
