"""Candidates are compiled by processes before they are measured: on a machine without a GPU, for one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from compiled_engine.kernels.cache_folder import MANAGER
from compiled_engine.process.progress import SilentProgress
from compiled_engine.tune import compile_first as module

triton = pytest.importorskip("triton")

from compiled_engine.passes.linear.small_batch_linear_op import Tiles, launch  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)


def test_candidates_are_compiled_and_not_launched(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three launches one is like another, and one cannot be made. Threads load their launchers."""
    managers: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: managers.append(os.environ.get("TRITON_CACHE_MANAGER"))
    )
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    x_TK, weight_NK = torch.ones(1, 256, dtype=torch.bfloat16), torch.ones(64, 256, dtype=torch.bfloat16)
    arguments = x_TK, weight_NK, None, None, 1e-6, None, False

    def fails() -> None:
        raise ValueError("no such tiles")

    launches = [partial(launch, *arguments, tiles=Tiles(1, rows, 256)) for rows in (2, 4, 4)]
    module.compile_first([iter([launches[0], fails]), iter(launches[1:])], SilentProgress())
    assert len(list(hopper.rglob("one_token_kernel.cubin"))) == 2
    assert set(managers) == {MANAGER["TRITON_CACHE_MANAGER"]}
