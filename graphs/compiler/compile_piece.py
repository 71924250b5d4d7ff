"""Inductor on one piece: from its JSON to an artifact, with the compiler's own folders next to it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch._inductor.config as inductor_config
from torch._inductor import CompiledArtifact

from compiled_engine.graphs.compiler import compat
from compiled_engine.graphs.compiler.piece import piece_from_json
from compiled_engine.graphs.compiler.settings import INDUCTOR_OPTIONS
from compiled_engine.graphs.compiler.trace import require_no_guards
from compiled_engine.process.child import environment_variables


def compile_piece(entry: Path, key: str) -> float:
    """Compile pieces/<key>.json of an entry to pieces/<key>.bin, its output code to pieces/<key>.py; seconds taken.

    Raises UnknownTarget for an op that this process does not know, GuardError when Inductor needed a guard.
    """
    start = time.perf_counter()
    piece, fakes, shape_env = piece_from_json((entry / "pieces" / f"{key}.json").read_text())
    with compiler_folders(entry, key):
        compat.compile_piece(piece, fakes, INDUCTOR_OPTIONS).save(path=str(artifact_path(entry, key)))
    require_no_guards(shape_env)
    code = _output_code(entry / "inductor" / key)
    if code is not None:
        shutil.copyfile(code, entry / "pieces" / f"{key}.py")
    return time.perf_counter() - start


def load_artifact(entry: Path, key: str) -> CompiledArtifact:
    """The compiled piece; nothing is compiled if the entry is whole."""
    with compiler_folders(entry, key):
        return CompiledArtifact.load(path=str(artifact_path(entry, key)))


def artifact_path(entry: Path, key: str) -> Path:
    return entry / "pieces" / f"{key}.bin"


def _output_code(folder: Path) -> Path | None:
    """The Python file that Inductor wrote for the piece: it defines `call`."""
    found = [path for path in sorted(folder.rglob("*.py")) if "def call(" in path.read_text()]
    return found[0] if found else None


@contextmanager
def compiler_folders(entry: Path, key: str) -> Iterator[None]:
    """Point Inductor and Triton at the entry's own folders while we compile or load; the caller's are put back."""
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(entry / "inductor" / key), "TRITON_CACHE_DIR": str(entry / "triton")}
    # A precompiled header would tie the entry to this folder, and building it costs more than it saves.
    with environment_variables(wanted), inductor_config.patch(cpp_cache_precompile_headers=False):
        yield
