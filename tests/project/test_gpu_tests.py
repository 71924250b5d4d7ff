"""The run of the GPU's tests, with tests that need none: which come last, that each runs once, what a result says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_tests
import pytest
from gpu_tests import Found, Stage, run_all, run_stage, stages_of

QUICK = """
import pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
@pytest.mark.parametrize("number", [1, 2])
def test_fails(number): assert number == 1
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
@pytest.mark.gpu_alone
def test_alone(): pass
"""
SLOW = """
import time, pytest
@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_takes_its_time(number): time.sleep(600 * (number > 0))
"""
FACTS: dict[str, Any] = {"commit": "abc", "machine": {"gpu": "a GPU"}, "versions": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_gpu_starts.py").write_text(QUICK)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "test_of_a_cpu.py").write_text("def test_of_a_cpu(): assert False")
    return tmp_path


def test_what_wants_the_gpu_for_itself_comes_last() -> None:
    together, pairs, alone = stages_of(gpu_tests.TESTS)
    assert {"test_gpu_starts.py", "test_gpu_engine.py", "test_attention.py"} <= {path.name for path in together.files}
    assert (alone.alone, set(alone.files) <= set(together.files)) == (True, True)
    assert [path.name for path in pairs.files] == [
        "test_gpu_ranks.py",
        "test_gpu_weight_updates.py",
        "test_gpu_windows.py",
    ]
    assert (pairs.gpus, pairs.alone) == (2, False)


@dataclass(frozen=True)
class Item:
    """As much of a test as decides about its place."""

    nodeid: str

    @property
    def path(self) -> Path:
        return Path(self.nodeid.partition("::")[0])


def items_of(name: str, tests: int, cases: int) -> list[Any]:
    """Tests of a file, which is in a folder."""
    return [Item(f"{name}::test_{test}[{case}]") for test in range(tests) for case in range(cases)]


@pytest.mark.parametrize("processes", [1, 2, 14])
def test_every_test_is_dealt_once(processes: int) -> None:
    """Also where there are more long tests than a process's share."""
    names = {"gpu/test_gpu_starts.py": (1, 9), "gpu/test_gpu_graphs.py": (2, 2), "passes/test_a.py": (1, 4)}
    items = [item for name, counts in names.items() for item in items_of(name, *counts)]
    order = gpu_tests.dealt(items, processes)
    assert len(order) == len(items)
    assert set(order) == set(items)


def test_what_does_not_fit_is_cut_and_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "MOST_PROCESSES", 1)
    monkeypatch.setattr(gpu_tests, "FAREWELL_S", 4.0)
    result = folder / "result.json"
    together, alone = stages_of(folder)
    slow, quick = (Stage(path.stem, (path,), together.marks) for path in sorted(together.files, reverse=True))
    assert run_all([quick, alone], result, None, [], FACTS) == 1
    found = json.loads(result.read_text())
    assert found["commit"] == "abc"
    counts = found["stages"]
    for measured in ("seconds", "processor_seconds"):
        assert min(counts["test_gpu_starts"].pop(measured), counts["alone"].pop(measured)) > 0
    failed = counts["test_gpu_starts"].pop("failed")
    assert [name.partition("::")[2] for name in failed] == ["test_error", "test_fails[2]"]
    slowest = [stage.pop("slowest") for stage in counts.values()]
    assert [len(seconds) for seconds in slowest] == [5, 1]
    for stage, of_tests in zip(counts.values(), slowest, strict=True):
        (of_file,) = stage.pop("files").values()
        assert of_file == pytest.approx(sum(of_tests.values()), abs=0.5)
    assert counts["test_gpu_starts"] == {"passed": 2, "skipped": 1, "not_run": 0, "cut": None}
    assert counts["alone"] == {"passed": 1, "skipped": 0, "failed": [], "not_run": 0, "cut": None}
    assert "3 passed, 2 failed, 1 skipped in " in capsys.readouterr().out

    assert run_all([slow, quick], result, gpu_tests.FAREWELL_S + 3, [], FACTS) == 1
    stages = json.loads(result.read_text())["stages"]
    cut = stages["test_slow"]
    assert cut["cut"] == "the time was over"
    assert (cut["passed"], cut["not_run"]) in ((1, 2), (0, 3), (0, None))  # as fast as the machine is
    said = capsys.readouterr().out
    assert "its tests did not run: the time was over\n" in said
    assert said.endswith("not all were run\n")


def test_a_stage_that_cannot_begin_is_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_wrong.py").write_text("import nothing_of_this_name\nmark.gpu")
    stage = Stage("wrong", (folder / "test_wrong.py",), "gpu_alone", alone=True)
    assert run_all([stage], folder / "result.json", None, [], FACTS) == 1
    assert "failed: wrong: pytest ended with status 2" in capsys.readouterr().out


def test_a_file_that_cannot_be_imported_is_a_failure_also_side_by_side(folder: Path) -> None:
    (folder / "test_wrong.py").write_text("import nothing_of_this_name\nmark.gpu")
    stage = Stage("beside", (folder / "test_wrong.py", folder / "test_gpu_starts.py"), "gpu and not gpu_alone")
    found = Found()
    run_stage(stage, 2, ["-k", "test_passes"], None, str(folder / "cache"), found)
    assert (len(found.failed), found.passed) == (1, 1)
