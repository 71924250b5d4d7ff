"""Every kernel of a start is compiled for every NVIDIA card that the engine supports, and fits; needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from folders import REPOSITORY

pytest.importorskip("triton")

ARCHS = (80, 86, 89, 90, 100, 120)
HOPPER, FIRST_WITH_FP8 = 90, 89
PROGRAM = REPOSITORY / "tests" / "support" / "compile_for_cards.py"


def compiled(arch: int, *options: str) -> list[dict[str, Any]]:
    """Return the records of starts on a card, compiled in a process of its own."""
    command = [sys.executable, str(PROGRAM), "--cards", str(arch), "--workers", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(record: dict[str, Any]) -> None:
    assert not record.get("failures"), record
    assert not record.get("too_large"), record
    assert record["card"] == HOPPER or not record.get("gluon"), record


def test_some_kernels_of_a_start_fit_a_card(request: pytest.FixtureRequest) -> None:
    """On a card with little shared memory; which kernels, the seed chooses."""
    seed = request.config.getoption("--seed")
    (record,) = compiled(86, "--starts", "bfloat16", "--one-in", "50", "--seed", seed)
    assert record["compiled"] == -(-record["kernels"] // 50) >= 2
    check(record)


@pytest.mark.shown_by("kernels/test_cards.py::test_some_kernels_of_a_start_fit_a_card")
@pytest.mark.parametrize("arch", ARCHS)
def test_all_kernels_of_all_starts_fit_the_card(arch: int) -> None:
    records = compiled(arch)
    for record in records:
        check(record)
    assert not any(record.get("refused") for record in records)
    assert any(record["gluon"] for record in records) == (arch == HOPPER)
    (of_fp8_cache,) = (record for record in records if record["start"] == "fp8 cache")
    assert ("listed_decode_kernel" in of_fp8_cache["functions"]) == (arch >= FIRST_WITH_FP8)
