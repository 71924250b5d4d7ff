"""How a process ends whose work is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from telling_program import TELLS_HOW_IT_ENDS

PROGRAM = f"""{TELLS_HOW_IT_ENDS}
from compiled_engine.process.ending import end_process
atexit.register(print, "exit handler")
print("result")
end_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_what_was_printed_is_written_and_exit_handlers_run(status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(status)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "result\nexit handler\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-c", PROGRAM, "0"]
        buffering = os.environ | {"PYTHONUNBUFFERED": ""}
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, env=buffering, check=False)
    assert ended.returncode == 120
    assert "No space left on device" in ended.stderr


def test_a_process_may_have_no_stdout() -> None:
    program = PROGRAM.replace("end_process(int", "sys.stdout = None\nend_process(int").replace('print("result")', "")
    ended = subprocess.run([sys.executable, "-c", program, "0"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
