"""A piece of a cache entry as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_engine.graphs.direct_piece import load_direct
from compiled_engine.import_apart import import_apart

Piece = Callable[..., Any]


def load_piece(entry: Path, key: str) -> Piece:
    """Inductor's artifact of a piece, or the generated Python of one that did not need Inductor."""
    if (entry / "pieces" / f"{key}.bin").exists():
        compile_piece = import_apart("compiled_engine.graphs.compile_piece")  # the compiler, which takes seconds
        return compile_piece.load_artifact(entry, key)
    return load_direct((entry / "pieces" / f"{key}.py").read_text())
