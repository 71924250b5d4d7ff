"""A g++ for a run of the tests that compiles nothing twice, and Inductor's large header only once.

Every cold start on a CPU has Inductor try the same few instruction sets and compile much the same kernels. g++ takes a
precompiled header where it was made with the same options; else it reads the source.

Inductor's kernels are compiled with -O1 instead of -O3, in half the time, and without warnings and debug symbols, which
take another fifth. They compute the same bits, since Inductor's options forbid contracted and reordered arithmetic. The
engine's own kernels are compiled with the options of users.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HEADER = "torch/csrc/inductor/cpp_prefix.h"
INSTEAD = {"-O3": "-O1"}
LEFT_OUT = ("-Wall", "-pedantic", "-g1")
FOR_THE_LINKER = ("-l", "-L", "-Wl,", "-shared")


def install(folder: Path) -> Path | None:
    """Write a g++ that keeps its results in the folder; None where there is no g++."""
    real = shutil.which("g++")
    if real is None:
        return None
    command = shlex.join([sys.executable, "-IS", __file__, real, str(folder)])
    program = folder / "g++"  # by this name Inductor knows what kind of compiler it is
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return program


def main(compiler: str, folder: Path, arguments: Sequence[str]) -> int:
    """Compile, or return an earlier result. Returns g++'s exit status."""
    options = [each for each in arguments if not each.endswith(".cpp")]
    sources = [Path(each) for each in arguments if each.endswith(".cpp")]
    if "-o" not in options[:-1] or len(sources) != 1 or not sources[0].is_file():
        return subprocess.call([compiler, *arguments])
    output = Path(options.pop(options.index("-o") + 1))
    options.remove("-o")
    source = sources[0].read_bytes()
    of_inductor = f"#include <{HEADER}>".encode() in source[:100]
    if of_inductor:
        options = [INSTEAD.get(each, each) for each in options if each not in LEFT_OUT]
    kept = folder / digest(source, *options)
    if not kept.is_file():
        more = []
        if of_inductor:
            more = [f"-I{with_header(compiler, folder, options)}"]
        status = subprocess.call([compiler, *more, *options, str(sources[0]), "-o", str(output)])
        if status == 0:
            with suppress(OSError):
                keep(output, kept)
        return status
    shutil.copy(kept, output)
    return 0


def digest(source: bytes, *options: str) -> str:
    return hashlib.sha256(source + repr(options).encode()).hexdigest()


def keep(output: Path, kept: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as part:
        shutil.copy(output, part.name)
    os.rename(part.name, kept)


def with_header(compiler: str, folder: Path, options: Sequence[str]) -> Path:
    """Return a folder with the header compiled with these options.

    The first process compiles it; other processes wait for that.
    """
    of_compiling = [each for each in options if not each.startswith(FOR_THE_LINKER)]
    own = folder / digest(b"", *of_compiling)[:16]
    compiled = own / f"{HEADER}.gch"
    compiled.parent.mkdir(parents=True, exist_ok=True)
    with (own / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            (own / "prefix.h").write_text(f"#include <{HEADER}>\n")
            part = own / "part.gch"
            header = ["-x", "c++-header", str(own / "prefix.h"), "-o", str(part)]
            if subprocess.call([compiler, *of_compiling, *header], stderr=subprocess.DEVNULL) == 0:
                part.rename(compiled)
    return own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
