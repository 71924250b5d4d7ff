"""A process whose Triton interprets kernels: it imports PyTorch once, and forks for each program that it is given.

Triton decides when it is imported whether it interprets, so no test can do both. A process for each test would import
PyTorch, Triton and the engine each time, which takes longer than most tests.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def interpret(test_file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments`, which may begin with -c or -m, with the folder of the test file in its path."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {"path": str(Path(test_file).parent), "arguments": arguments, "out": str(out), "err": str(err)}
        process = _process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the process that interprets kernels has ended"
        return subprocess.CompletedProcess(list(arguments), int(answer), out.read_text(), err.read_text())


@cache
def _process() -> subprocess.Popen[str]:
    """Start the process that forks for each program. It ends when its standard input is closed."""
    from interpreter import interpreting

    command = [sys.executable, __file__]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=interpreting(__file__)
    )
    atexit.register(process.communicate)
    return process


def main() -> None:
    import attention_cases  # noqa: F401  what most programs import
    import hypothesis  # noqa: F401
    import interpreter  # noqa: F401  it makes Triton's interpreter quicker
    import pass_cases  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(run(**json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(path: str, arguments: list[str], out: str, err: str) -> int:
    """Run a program in the forked process, and return its exit status."""
    for descriptor, file in ((0, os.devnull), (1, out), (2, err)):
        opened = os.open(file, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.path.insert(0, path)
    try:
        execute(arguments)
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def execute(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        module: Any = ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
