"""A disk that is full while a command writes: one line that says so, and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.cli.output import written_to

FULL = Path("/dev/full")  # every write to it fails like that
SMALL = ("--mode", "eager", "--device", "cpu", "--max-model-len", "64", "--num-blocks", "64")
BRIEF = ("--rows", "bundled-tpot-1", "--repeats", "1")
GENERATE = ("generate", *SMALL, "--quiet", "--prompt", "import", "--max-tokens", "3")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    "command",
    [
        GENERATE,
        (*GENERATE, "--json"),
        ("inspect", *SMALL, "--json"),
        ("bench", "table", *SMALL, *BRIEF, "--json"),
        ("cache", "ls"),
    ],
    ids=lambda command: " ".join(part for part in command if part in ("generate", "inspect", "bench", "--json", "ls")),
)
def test_stdout_on_a_full_disk(command: tuple[str, ...]) -> None:
    call = [sys.executable, "-c", "from compiled_engine.cli import main; main()", *command]
    with FULL.open("w") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "compiled-engine: error: cannot write the output: No space left on device"


def test_a_report_on_a_full_disk_names_its_file() -> None:
    done = CliRunner().invoke(app, ["inspect", *SMALL, "--quiet", "--output", str(FULL)])
    assert done.exit_code == 2
    assert done.stderr == "compiled-engine: error: [Errno 28] No space left on device: '/dev/full'\n"


def test_an_error_that_names_its_file_keeps_the_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/file"), written_to(tmp_path):
        (tmp_path / "nowhere" / "file").write_text("")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), written_to(FULL):
        FULL.write_text("much")
