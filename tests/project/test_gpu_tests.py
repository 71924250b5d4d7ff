"""The run of the GPU's tests, with tests that need none: what it says of them, whole, out of time, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_tests
import pytest
from gpu_tests import Stage, run_all, stages_of
from interpreter import python_path

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
AS_A_PROCESS = """
import signal, sys
from pathlib import Path
import gpu_tests
signal.signal(signal.SIGTERM, signal.default_int_handler)
stages = gpu_tests.stages_of(Path(sys.argv[1]))
facts = {"machine": {}}
print("begins", flush=True)
sys.exit(gpu_tests.run_all(stages, Path(sys.argv[2]), None, [], facts))
"""


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
    assert [path.name for path in pairs.files] == ["test_gpu_ranks.py", "test_gpu_windows.py"]
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


def test_long_tests_begin_first_in_all_processes() -> None:
    """Starts in one half of four processes, engines in the other, a test's cases in one process; then the kernels, in
    order."""
    engines = [*items_of("gpu/test_gpu_engine.py", 1, 3), *items_of("models/test_models.py", 1, 3)]
    starts = items_of("gpu/test_gpu_starts.py", 1, 5)
    kernels = items_of("attention/test_attention.py", 3, 10)
    order = gpu_tests.dealt([*kernels[:7], *engines, *starts, *kernels[7:]], 4)
    first, second, third, fourth = (order[start:] for start in (0, 10, 20, 30))
    assert (first[:3], second[:2]) == (starts[::2], starts[1::2])
    assert (third[:3], fourth[:3]) == (engines[:3], engines[3:])
    assert [item for item in order if item in kernels] == kernels


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

    assert run_all([slow, quick], result, gpu_tests.FAREWELL_S + 6, [], FACTS) == 1
    stages = json.loads(result.read_text())["stages"]
    cut = stages["test_slow"]
    assert cut["cut"] == "the time was over"
    assert (cut["passed"], cut["not_run"]) in ((1, 2), (0, 3), (0, None))  # as fast as the machine is
    said = capsys.readouterr().out
    assert "its tests did not run: the time was over\n" in said
    assert said.endswith("not all were run\n")


def test_an_interrupted_run_has_a_result_too(folder: Path) -> None:
    """Side by side."""
    (folder / "test_gpu_starts.py").unlink()
    result = folder / "result.json"
    command = [sys.executable, "-c", AS_A_PROCESS, str(folder), str(result)]
    process = subprocess.Popen(command, cwd=gpu_tests.TESTS, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    stage = json.loads(result.read_text())["stages"]["together"]
    assert stage["cut"] == "interrupted"
    assert said.endswith("not all were run\n")


def test_a_stage_that_cannot_begin_is_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_wrong.py").write_text("import nothing_of_this_name\nmark.gpu")
    stage = Stage("wrong", (folder / "test_wrong.py",), "gpu_alone", alone=True)
    assert run_all([stage], folder / "result.json", None, [], FACTS) == 1
    assert "failed: wrong: pytest ended with status 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("visible", "count", "share", "expected"), [("4,6", 2, 1, "6"), (None, 5, 2, "2,3")], ids=["one", "two of five"]
)
def test_processes_side_by_side_have_their_gpus(visible: str | None, count: int, share: int, expected: str) -> None:
    environment = os.environ | {
        "PYTEST_XDIST_WORKER": "gw3",
        gpu_tests.COUNT_VARIABLE: str(count),
        gpu_tests.SHARE_VARIABLE: str(share),
        "PYTHONPATH": python_path(__file__),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    code = "import conftest, os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=gpu_tests.TESTS, env=environment)
    assert said.stdout.split() == [expected]
