"""What of a process's environment is in the cache key: compilers and their settings, device, source; nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from compiled_engine.graphs.cache.diff import differences
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import (
    SOURCE_PACKAGES,
    compiler_settings,
    measured_gains,
    source_digests,
    source_files,
    this_environment,
)
from compiled_engine.graphs.cache.key import IMAGE_PACKAGES, RANK_PACKAGES, RECURRENCE_PACKAGES, SPEECH_PACKAGES
from compiled_engine.passes.framework.profile import DeviceProfile

PRINT_KEY = """
import torch
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import this_environment
print(factors_key(this_environment(torch.device("cpu")).as_factors() | {"source": {}}))
"""


def test_another_home_folder_and_environment_are_the_same_key(tmp_path: Path) -> None:
    """In a process of its own, which starts in another folder, too."""
    unrelated = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "USER": "somebody", "LANG": "C", "EDITOR": "ed"}
    unrelated |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    unrelated |= {"TORCHINDUCTOR_COMPILE_THREADS": "3", "COMPILED_ENGINE_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", PRINT_KEY],
        env=os.environ | unrelated,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == factors_key(this_environment(torch.device("cpu")).as_factors() | {"source": {}})


def test_what_the_caller_has_set_in_the_compilers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    base = compiler_settings("cpu")

    def changed() -> list[str]:
        return [d.in_words("here", "before") for d in differences(compiler_settings("cpu"), base)]

    assert changed() == []
    with inductor_config.patch({"epilogue_fusion": False, "cpp.simdlen": 256}):
        assert changed() == [
            "inductor.cpp.simdlen: 256 here, not set before",
            "inductor.epilogue_fusion: False here, not set before",
        ]
    with inductor_config.patch(worker_log_path="/somewhere"):
        assert changed() == []
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_WORKER_LOGPATH", "/somewhere")
    assert changed() == ["environment.TORCHINDUCTOR_FREEZING: '1' here, not set before"]


def test_what_the_caller_has_set_in_torch_is_seen() -> None:
    base = compiler_settings("cpu")
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    changes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "default_dtype": lambda: undone(torch.set_default_dtype, torch.float64, dtype),
        "deterministic_algorithms": lambda: undone(torch.use_deterministic_algorithms, True, False),
        "float32_matmul_precision": lambda: undone(torch.set_float32_matmul_precision, "medium", precision),
        "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    }
    for name, changed in changes.items():
        with changed():
            assert f"torch.{name}" in [d.factor for d in differences(compiler_settings("cpu"), base)]
    assert compiler_settings("cpu") == base


@contextmanager
def undone(set_value: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


def test_a_profile_counts_by_what_decides_which_passes_run() -> None:
    profile = DeviceProfile("a device", {"silu_mul": {8: 1.5}}, 2.0, {(1, 64, 64, False): {"rows": 8}})
    assert measured_gains(profile) == measured_gains(replace(profile, tiles={}))
    assert measured_gains(profile) != measured_gains(replace(profile, noise_us=1.0))
    assert json.loads(json.dumps(measured_gains(profile))) == measured_gains(profile)
    assert measured_gains(None) == {}


def test_the_source_digests_cover_what_shapes_the_graph() -> None:
    names = set(source_files())
    assert names == source_digests().keys()
    assert {"graphs/compiler/trace.py", "passes/linear/merge_linears.py", "models/textbook/layers.py"} <= names
    assert "attention/op.py" in names


def test_what_the_digests_leave_out_takes_no_part_in_compiling() -> None:
    """A digested file imports digested packages, besides plain values, processes, and how kernels are launched."""
    allowed = {
        *SOURCE_PACKAGES,
        *RANK_PACKAGES,
        *RECURRENCE_PACKAGES,
        *IMAGE_PACKAGES,
        *SPEECH_PACKAGES,
        "config",
        "pooling",
        "kernels",
        "process",
        "models.foreign.speech_inputs",  # models.foreign is digested for models of transformers
        "models.vision",
        "vision",
        "speech",
    }
    for name, path in source_files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("compiled_engine."):
                imported = module.removeprefix("compiled_engine.")
                assert imported in allowed or imported.rpartition(".")[0] in allowed, f"{name} imports {module}"
