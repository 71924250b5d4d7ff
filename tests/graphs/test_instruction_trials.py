"""Inductor tries the instruction sets of a CPU once a process, and each compilation has the files of the trials."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_pieces import entry_with, pointwise_piece
from torch._inductor import cpu_vec_isa

from compiled_engine.graphs.compiler import compat, compile_piece
from compiled_engine.graphs.compiler.compile_pool import compile_pool
from compiled_engine.graphs.compiler.instruction_trials import Trials, trial_files


def test_sets_are_tried_once_for_each_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry without files of its own has those of the first, whose process knows the answers."""
    trials, tried = Trials(), list[str]()
    monkeypatch.setattr(compile_piece, "trials", trials)
    monkeypatch.setattr(compat, "trials", trials)
    check = cpu_vec_isa.VecISA.check_build

    def counted(self: cpu_vec_isa.VecISA, code: str) -> bool:
        tried.append(code)
        return check(self, code)

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", counted)
    usual = shutil.which(os.environ.get("CXX", "g++"))
    another = tmp_path / "g++"
    another.write_text(f'#!/bin/sh\nexec {usual} "$@"\n')
    another.chmod(0o755)
    counts, files = [], []
    for number, compiler in enumerate((usual, usual, str(another))):
        monkeypatch.setenv("CXX", str(compiler))
        entry = tmp_path / f"entry{number}"
        entry.mkdir()
        (key,) = entry_with(entry, pointwise_piece())
        with compile_pool(entry, 0) as compile_pieces:
            list(compile_pieces([key]))
        counts.append(len(tried))
        files.append(trial_files(entry / "inductor" / key))
    assert counts == [counts[0], counts[0], 2 * counts[0]]
    assert files[0] == files[1]
    assert {path.suffix for path in files[0]} == {".cpp", ".so"} == {path.suffix for path in files[2]}
