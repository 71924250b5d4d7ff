"""Runs the tests of a GPU, as `make test-gpu` does: those that can share the GPU side by side, then those of two GPUs,
also side by side, then the others.

Says in a line how they went, and writes a result with the commit, the machine and the versions, also when it is
interrupted or out of time. Exit status 1 if a test failed, was cut off, or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
RESULT = TESTS.parent / "docs" / "measurements" / "gpu_tests.json"
MOST_PROCESSES = 16  # for each GPU
MOST_OF_PAIRS = 8  # for each two GPUs: their tests wait for each other's ranks
# Folders of tests that start engines: some take as long as a hundred of a kernel, and would keep the others waiting.
OF_ENGINES = ("gpu", "engine", "graphs", "models", "recurrence")
NUM_SLOWEST = 40  # tests of a stage whose seconds are kept
# Where compiled models and kernels are kept: one folder for all stages, never the user's.
CACHE_VARIABLE = "COMPILED_ENGINE_CACHE_DIR"
# Tests side by side have a core each, whatever of them is computed or compiled in threads.
ONE_CORE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Each process, and each that tests start, would compile our modules once more where Python may keep no bytecode.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
# Plugins that take their time in every process: Hypothesis's parses all modules for constants.
LEFT_OUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
# So long a stage that is cut has to end by itself.
FAREWELL_S = 10.0
# In a process of its own: one that has asked for the GPU's name keeps some of its memory.
PROVENANCE = """
import json, torch
from compiled_engine.bench.results import provenance
print(json.dumps(provenance(torch.device("cuda", 0))))
"""


@dataclass(frozen=True)
class Stage:
    """Tests that run together. marks: an expression of pytest's markers. alone: one after the other, as each wants the
    GPU for itself. gpus: that each process has, of those that run side by side."""

    name: str
    files: tuple[Path, ...]
    marks: str
    alone: bool = False
    gpus: int = 1


def stages_of(folder: Path) -> list[Stage]:
    """All tests with the marker `gpu`, in one stage, so that cores are busy until its end; then those that want two
    GPUs, or the GPU for themselves."""

    def having(mark: str) -> tuple[Path, ...]:
        paths = sorted(folder.rglob("test_*.py"))
        return tuple(path for path in paths if re.search(rf"mark\.{mark}\b", path.read_text()))

    stages = [
        Stage("together", having("gpu"), "gpu and not gpu_pair and not gpu_alone"),
        Stage("pairs", having("gpu_pair"), "gpu_pair", gpus=2),
        Stage("alone", having("gpu_alone"), "gpu_alone", alone=True),
    ]
    return [stage for stage in stages if stage.files]


@dataclass
class Found:
    """What became of a stage's tests. failed: names. not_run: how many did not end; None if that is not known, as
    nothing was collected. cut: why they did not. slowest: seconds by name, set-up and tear-down included; files: by
    file. processor_seconds: of all processes of the stage."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    not_run: int | None = None
    cut: str | None = None
    slowest: dict[str, float] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)


# --- a plugin of pytest: each test's end as a line, so that it is known whatever happens to the process afterwards ---

LINES_VARIABLE = "GPU_TESTS_LINES"
# Of GPUs, which processes side by side divide among themselves, and of those that each has, see conftest.py.
COUNT_VARIABLE, SHARE_VARIABLE = "GPU_TESTS_COUNT", "GPU_TESTS_SHARE"


def _say(**fields: Any) -> None:
    if path := os.environ.get(LINES_VARIABLE):
        with open(path, "a") as lines:
            lines.write(json.dumps(fields) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In processes side by side: the order that `dealt` gives."""
    if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        items[:] = dealt(items, int(processes))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Memory that the tests of a file leave cached is for other processes."""
    if torch.cuda.is_initialized() and (nextitem is None or nextitem.path != item.path):
        torch.cuda.empty_cache()


def dealt(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests for processes that have equal consecutive shares of them, and take what others have not begun.

    Long tests come first. One half of the processes begins with starts, which keep more than one core busy each and
    find the kernels that earlier starts have left; the other half with the tests of engines, whose folders are
    `OF_ENGINES`. All other tests stay in the order of their files, so that those of a kernel share a process.
    """
    starts: list[list[pytest.Item]] = []
    engines: dict[str, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        if item.path.name == "test_gpu_starts.py":
            starts.append([item])
        elif item.path.parent.name in OF_ENGINES:
            engines.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            others.append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    half = processes // 2
    for groups, takers in ((starts, shares[:half] or shares), (list(engines.values()), shares[half:])):
        for number, group in enumerate(groups):
            takers[number % len(takers)].extend(group)
    left = iter(others)
    num_left = len(items)
    for number, share in enumerate(shares):
        size = num_left // (processes - number)
        num_left -= size
        share.extend(islice(left, max(size - len(share), 0)))
    return [*(item for share in shares for item in share), *left]


def pytest_collection_finish(session: Any) -> None:
    if session.items:
        _say(collected=len(session.items))


def pytest_collectreport(report: Any) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        _say(not_collected=report.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that started the others hears of all tests
        _say(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration)


def read_lines(path: Path) -> Found:
    """What the lines of a stage say."""
    outcomes: dict[str, str] = {}
    ended: set[str] = set()
    seconds: Counter[str] = Counter()
    collected: int | None = None
    not_collected: set[str] = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        said = json.loads(line)
        if "collected" in said:
            collected = said["collected"]
            continue
        if "not_collected" in said:
            not_collected.add(said["not_collected"])
            continue
        name = said["test"]
        outcomes[name] = max(outcomes.get(name, "passed"), said["outcome"], key=("passed", "skipped", "failed").index)
        seconds[name] += said["seconds"]
        if said["when"] == "teardown" or said["outcome"] == "failed":
            ended.add(name)
    failed = sorted({name for name, outcome in outcomes.items() if outcome == "failed"} | not_collected)
    passed, skipped = (sum(outcomes[name] == kind for name in ended) for kind in ("passed", "skipped"))
    not_run = None if collected is None else max(collected - len(ended), 0)
    files: Counter[str] = Counter()
    for name, spent in seconds.items():
        files[name.partition("::")[0]] += spent
    slowest = {name: round(spent, 1) for name, spent in seconds.most_common(NUM_SLOWEST)}
    of_files = {name: round(spent, 1) for name, spent in files.most_common()}
    return Found(passed=passed, skipped=skipped, failed=failed, not_run=not_run, slowest=slowest, files=of_files)


# --- the run ---


def num_gpus() -> int:
    return torch.cuda.device_count()


def run_stage(
    stage: Stage, processes: int, more: Sequence[str], limit_s: float | None, cache: str, found: Found
) -> None:
    """Run a stage's tests, for limit_s at most, and write into `found` what became of them, also when interrupted.
    cache: the folder that stages share."""
    if limit_s is not None and limit_s <= 0:
        found.cut = "no time was left"
        return
    command = [sys.executable, "-m", "pytest", "-q", *LEFT_OUT, "-p", "gpu_tests"]
    command += ["-m", stage.marks]
    if not stage.alone and processes > 1:
        command += ["-n", str(processes), "--dist", "worksteal"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_WORKER")}
    environment = {CACHE_VARIABLE: cache} | ({} if stage.alone else ONE_CORE) | inherited
    start, processor_start = time.monotonic(), _processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        process = subprocess.Popen(
            [*command, *more, f"--rootdir={TESTS.parent}", *map(str, stage.files)],
            cwd=TESTS,  # where this file is found as a plugin
            env=environment
            | BYTECODE
            | {LINES_VARIABLE: str(lines), COUNT_VARIABLE: str(num_gpus()), SHARE_VARIABLE: str(stage.gpus)},
            start_new_session=True,
        )
        cut = "interrupted"
        try:
            process.wait(None if limit_s is None else max(limit_s - FAREWELL_S, 0.0))
            cut = None
        except subprocess.TimeoutExpired:
            cut = "the time was over"
        finally:
            if cut is not None:
                _end(process)
            vars(found).update(vars(read_lines(lines)), seconds=time.monotonic() - start, cut=cut)
            found.processor_seconds = round(_processor_seconds() - processor_start, 1)
            if cut is None and process.returncode not in (0, 1, 5):  # 5: further arguments left nothing
                found.failed.append(f"{stage.name}: pytest ended with status {process.returncode}")


def _processor_seconds() -> float:
    """Of processes that this one has started, and theirs, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and all its processes; what it has said stays."""
    for sent, wait_s in ((signal.SIGINT, FAREWELL_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def provenance() -> dict[str, Any]:
    said = subprocess.run([sys.executable, "-c", PROVENANCE], check=False, capture_output=True, text=True)
    return json.loads(said.stdout) if said.returncode == 0 else {"machine": {}, "versions": {}}


def commit() -> str | None:
    """Of the tests' repository, with "-dirty" where files were changed; None where there is none."""
    command = ["git", "-C", str(TESTS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def summary(stages: dict[str, Found], gpu: str) -> str:
    """Stages that were cut, and tests that failed, a line each; then the line that counts."""
    lines = []
    for name, found in stages.items():
        if found.cut is not None:
            left = "its" if found.not_run is None else f"{found.not_run} of its"
            lines.append(f"cut: {name}, {left} tests did not run: {found.cut}")
    lines += [f"failed: {name}" for found in stages.values() for name in found.failed]
    passed, failed, skipped = (
        sum(found.passed for found in stages.values()),
        sum(len(found.failed) for found in stages.values()),
        sum(found.skipped for found in stages.values()),
    )
    minutes = sum(found.seconds for found in stages.values()) / 60
    cut = ", not all were run" if any(found.cut for found in stages.values()) else ""
    return "\n".join(
        [*lines, f"{passed} passed, {failed} failed, {skipped} skipped in {minutes:.1f} minutes on {gpu}{cut}"]
    )


def run_all(
    stages: Sequence[Stage], output: Path, limit_s: float | None, more: Sequence[str], facts: dict[str, Any]
) -> int:
    """Run the stages one after the other and write the result after each. facts: what the result says beside them.
    Returns the exit status."""
    most = (os.cpu_count() or 2) * 7 // 8
    found = {stage.name: Found(cut="it was not begun") for stage in stages}
    deadline = None if limit_s is None else time.monotonic() + limit_s

    def write() -> None:
        minutes = sum(each.seconds for each in found.values()) / 60
        counts = {name: asdict(each) for name, each in found.items()}
        output.write_text(json.dumps({**facts, "minutes": minutes, "stages": counts}, indent=1) + "\n")

    try:
        with tempfile.TemporaryDirectory(prefix="compiled-engine-tests-", ignore_cleanup_errors=True) as cache:
            for stage in stages:
                left_s = None if deadline is None else deadline - time.monotonic()
                each = MOST_PROCESSES if stage.gpus == 1 else MOST_OF_PAIRS
                processes = max(1, min(each * (num_gpus() // stage.gpus), most))
                run_stage(stage, processes, more, left_s, cache, found[stage.name])
                write()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        write()
    print(summary(found, facts["machine"].get("gpu", "an unknown GPU")))
    whole = all(each.cut is None and not each.failed for each in found.values())
    return int(not whole or not any(each.passed for each in found.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="where the result is written")
    parser.add_argument("--commit", help="what is tested, where that is no git repository")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="for all tests; what does not fit is cut, and said"
    )
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("these tests need an NVIDIA GPU, and PyTorch finds none", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    facts: dict[str, Any] = {"commit": arguments.commit or commit(), "machine": {}, "versions": {}}
    # This takes seconds, most of them for imports, and is done long before the first stage ends.
    Thread(target=lambda: facts.update(provenance())).start()
    return run_all(stages_of(TESTS), arguments.output, arguments.limit, arguments.pytest, facts)


if __name__ == "__main__":
    sys.exit(main())
