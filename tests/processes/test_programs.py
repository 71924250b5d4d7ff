"""The programs of the engine's processes, without an engine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from telling_program import TELLS_HOW_IT_ENDS

PROGRAM = f"""{TELLS_HOW_IT_ENDS}
from compiled_engine.processes.programs import core_main
atexit.register(print, "exit handler")
core_main()
"""


def test_a_core_ends_with_its_exit_handlers_and_takes_nothing_down(tmp_path: Path) -> None:
    """To take down PyTorch takes longer than all else at an engine's end."""
    folder = tmp_path / "core"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as starter:
        listener.bind(str(folder / "s"))
        listener.listen()
        starter.connect(str(folder / "s"))
        starter.close()
        program = [sys.executable, "-c", PROGRAM, str(listener.fileno()), str(folder), "cpu"]
        ended = subprocess.run(program, pass_fds=[listener.fileno()], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "exit handler\n")
    assert not folder.exists()
