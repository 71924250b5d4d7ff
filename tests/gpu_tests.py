"""Runs the tests of a GPU, as `make test-gpu` does: those that can share the GPU side by side, then the others alone.

Says in a line how they went, and writes a result with the commit, the machine and the versions. Exit status 1 if a test
failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from compiled_engine.bench.machine import provenance

TESTS = Path(__file__).parent
RESULT = TESTS.parent / "docs" / "measurements" / "gpu_tests.json"
STAGES = {"side by side": "gpu and not gpu_alone", "alone": "gpu_alone"}
MOST_PROCESSES = 12


def run_stage(markers: str, processes: int, more: list[str], folder: Path) -> dict[str, Any]:
    """Counts of tests and the names of those that failed, with the seconds that all took."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", markers, f"--junitxml={report}", f"--rootdir={TESTS.parent}"]
    command += ["-p", "no:cacheprovider", *(["-n", str(processes), "--dist", "worksteal"] if processes > 1 else [])]
    start = time.monotonic()
    ended = subprocess.run([*command, *more, str(TESTS)], check=False, cwd=folder)
    seconds = time.monotonic() - start
    found: dict[str, Any] = {"seconds": seconds, "passed": 0, "failed": [], "skipped": 0}
    if not report.exists():
        return found | {"failed": [f"pytest ended with status {ended.returncode}"]}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            found["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return found


def commit() -> str | None:
    """Of the tests' repository, with "-dirty" where files were changed; None where there is none."""
    command = ["git", "-C", str(TESTS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="where the result is written")
    parser.add_argument("--commit", help="what is tested, where that is no git repository")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("these tests need an NVIDIA GPU, and PyTorch finds none", file=sys.stderr)
        return 1
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) * 3 // 4))
    stages: dict[str, Any] = {}
    for name, markers in STAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            stages[name] = run_stage(markers, processes if name != "alone" else 1, arguments.pytest, Path(folder))
    result = {"commit": arguments.commit or commit(), "stages": stages} | provenance(torch.device("cuda", 0))
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    passed, skipped = (sum(stage[kind] for stage in stages.values()) for kind in ("passed", "skipped"))
    failed = [name for stage in stages.values() for name in stage["failed"]]
    minutes = sum(stage["seconds"] for stage in stages.values()) / 60
    for name in failed:
        print(f"failed: {name}")
    gpu = result["machine"]["gpu"]
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped in {minutes:.1f} minutes on {gpu}")
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
