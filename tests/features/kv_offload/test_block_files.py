"""Files of blocks have what was written or are not there, whatever ends a process or fills a disk."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled_engine.features.kv_offload.block_files import HEADER, BlockFiles
from compiled_engine.features.kv_offload.file_index import STATE_SUFFIX, FileIndex

SIZE = 100_000


def row(seed: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8).data


def read(files: BlockFiles, name: str) -> memoryview | None:
    found = np.zeros(SIZE, np.uint8).data
    return found if files.read(name, found) else None


def test_a_block_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path)
    assert files.write("ab01", row(1))
    assert files.write("ab02", row(2))
    assert files.write("ab02", row(3))
    for name, seed in (("ab01", 1), ("ab02", 3)):
        found = read(files, name)
        assert found is not None
        assert found == row(seed)
    files.remove("ab01")
    files.remove("ab01")
    assert read(files, "ab01") is None


class ShortReads(FileIO):
    """A file whose reads end before what was asked for, as those of more than 2 GiB do."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:999]) or 0


def test_a_block_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path)
    files.write("ab01", row(1))
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: ShortReads(path, mode))
    assert read(files, "ab01") == row(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"1",
        lambda data: data[: HEADER.size - 1],
        lambda data: b"",
        lambda data: b"X" + data[1:],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data[:5] + bytes([data[5] ^ 1]) + data[6:],
    ],
)
def test_a_damaged_file_is_not_used(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    files = BlockFiles(tmp_path)
    files.write("ab01", row(1))
    path = files.path_of("ab01")
    path.write_bytes(damage(path.read_bytes()))
    if len(path.read_bytes()) > HEADER.size + SIZE:
        return  # what follows a block does not matter
    assert read(files, "ab01") is None
    assert not path.exists()
    assert files.write("ab01", row(1))
    assert read(files, "ab01") is not None


def test_a_full_disk_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of file sizes fails in the middle of a write, as a full disk does."""
    files, limits = BlockFiles(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
    try:
        assert [files.write(f"ab0{number}", row(1)) for number in range(3)] == [False] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [*tmp_path.glob("*/*")] == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text
    assert files.write("ab00", row(1))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = BlockFiles(tmp_path / "file")
    assert not files.write("ab01", row(1))
    assert read(files, "ab01") is None


def test_a_start_says_that_the_folder_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = tmp_path / "file"
    with pytest.raises(ValueError, match=f"kv_offloading_folder is '{given}', which cannot be used: .*; allowed: a "):
        FileIndex(given / "blocks" / "model", 9, 1, most_bytes=1)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from compiled_engine.features.kv_offload.block_files import BlockFiles
files, number = BlockFiles(Path(sys.argv[1])), 0
while True:
    files.write(f"{number % 7:02}", np.full(20_000_000, number % 251, np.uint8).data)
    number += 1
"""


def test_a_killed_process_leaves_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "0" / "0"
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)])
        deadline = time.monotonic() + 60
        while len([*folder.glob("*/??")]) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.kill()
        writer.wait()
    index = FileIndex(tmp_path / "model", 100, 1, most_bytes=1 << 30)
    assert {path.name for path in folder.glob("*/*")} == {f"{number:02}" for number in range(7)}
    found = np.zeros(20_000_000, np.uint8)
    for number in range(7):
        assert f"{number:02}" in index
        assert BlockFiles(folder).read(f"{number:02}", found.data)
        assert (found == found[0]).all()
    index.close()


def test_an_index_keeps_what_was_used_last(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "model" / "0" / "0")
    for number in range(5):
        files.write(f"ab0{number}", row(number))
        time.sleep(0.02)
    assert read(files, "ab01") is not None
    index = FileIndex(tmp_path / "model", 3, 1, most_bytes=1 << 30)
    assert [f"ab0{number}" in index for number in range(5)] == [False, True, False, True, True]
    assert {path.name for path in (tmp_path / "model" / "0" / "0").glob("*/*")} == {"ab01", "ab03", "ab04"}
    index.use("ab03")
    assert index.add("ab09") == ["ab04"]
    index.drop("ab09")
    assert len(index) == 2
    index.close()


def test_a_snapshot_takes_the_place_of_several_blocks(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "model" / "0" / "0")
    for name in ("ab01", "ab02", f"ab02{STATE_SUFFIX}", "ab03"):
        files.write(name, row(1))
        time.sleep(0.02)
    index = FileIndex(tmp_path / "model", 5, 1, most_bytes=1 << 30, state_weight=3)
    assert [name in index for name in ("ab01", "ab02", f"ab02{STATE_SUFFIX}", "ab03")] == [False, True, True, True]
    assert index.add("ab04") == ["ab02"]
    index.use(f"ab02{STATE_SUFFIX}")
    assert index.add(f"ab04{STATE_SUFFIX}") == ["ab03", "ab04", f"ab02{STATE_SUFFIX}"]
    index.drop(f"ab04{STATE_SUFFIX}")
    assert len(index) == 0
    assert index.add("ab05") == []
    index.close()


def test_a_block_needs_the_files_of_all_ranks(tmp_path: Path) -> None:
    ranks = [BlockFiles(tmp_path / "model" / "0" / str(rank)) for rank in range(2)]
    ranks[0].write("ab01", row(1))
    for files in ranks:
        files.write("ab02", row(2))
    index = FileIndex(tmp_path / "model", 9, 2, most_bytes=1 << 30)
    assert ("ab01" in index, "ab02" in index) == (False, True)
    assert read(ranks[0], "ab01") is None
    index.close()


def test_replicas_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (FileIndex(tmp_path / "model", 9, 1, most_bytes=1 << 30) for _ in range(2))
    assert (first.folder.name, second.folder.name) == ("0", "1")
    first.close()
    third = FileIndex(tmp_path / "model", 9, 1, most_bytes=1 << 30)
    assert third.folder.name == "0"
    for index in (second, third):
        index.close()


def test_files_of_other_models_make_room(tmp_path: Path) -> None:
    """The longest unused ones first, none of a running model, and nothing that is no folder of blocks."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_bytes(b"1" * SIZE)
    running = FileIndex(tmp_path / "running", 9, 1, most_bytes=1 << 30)
    BlockFiles(running.folder / "0").write("ab01", row(1))
    for name in ("old", "new"):
        index = FileIndex(tmp_path / name, 9, 1, most_bytes=1 << 30)
        BlockFiles(index.folder / "0").write("ab01", row(1))
        index.close()
        time.sleep(0.02)
    own = FileIndex(tmp_path / "own", 9, 1, most_bytes=3 * SIZE + 1000)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "running", "new", "own"}
    own.close()
    own = FileIndex(tmp_path / "own", 9, 1, most_bytes=SIZE)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "running", "own"}
    own.close()
    running.close()
