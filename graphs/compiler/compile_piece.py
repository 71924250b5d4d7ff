"""Compiles one piece with Inductor, from its JSON to an artifact. The compilers' files are kept in the cache entry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import CompiledArtifact
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from compiled_engine.graphs.compiler import compat
from compiled_engine.graphs.compiler.cpp_piece import CppPiece, piece_folder, read_output_code, write_cpp_piece
from compiled_engine.graphs.compiler.instruction_trials import trials
from compiled_engine.graphs.compiler.piece import piece_from_json
from compiled_engine.graphs.compiler.settings import INDUCTOR_OPTIONS
from compiled_engine.graphs.compiler.trace import GuardError, require_no_guards
from compiled_engine.process.child import environment_variables

aten = torch.ops.aten


def compile_piece(entry: Path, key: str) -> float:
    """Compile the piece pieces/<key>.json of an entry, and return the seconds that this took.

    Writes the folder cpp/<key> if the piece can run without Inductor, otherwise Inductor's artifact pieces/<key>.bin;
    and Inductor's output code, pieces/<key>.py. Raises UnknownTarget for an op that is not registered in this process,
    and GuardError if Inductor specialised on a size.
    """
    start = time.perf_counter()
    piece, fakes, shape_env = piece_from_json((entry / "pieces" / f"{key}.json").read_text())
    divide_views(piece.graph)
    with compiler_folders(entry, key):
        artifact = compat.compile_piece(piece, fakes, INDUCTOR_OPTIONS)
        require_open_sizes(shape_env)
        code = _output_code(entry / "inductor" / key)
        on_cpu = all(fake.device.type == "cpu" for fake in fakes if isinstance(fake, torch.Tensor))
        trials.keep_or_write(entry / "inductor" / key)
        if on_cpu and (cpp_piece := _without_inductor(code, piece.graph)) is not None:
            write_cpp_piece(piece_folder(entry, key), cpp_piece, _compiled_kernel)
        else:
            artifact.save(path=str(artifact_path(entry, key)))
    if code is not None:
        (entry / "pieces" / f"{key}.py").write_text(code, encoding="utf-8")
    return time.perf_counter() - start


def require_open_sizes(shape_env: ShapeEnv) -> None:
    """Raise GuardError if Inductor specialised on a symbolic size: added a guard on it, or replaced it by a value."""
    require_no_guards(shape_env)
    if shape_env.replacements:
        found = ", ".join(f"{symbol} is {value}" for symbol, value in shape_env.replacements.items())
        raise GuardError(f"the compiled piece would hold only where {found}")


def divide_views(graph: fx.Graph) -> None:
    """Replace views that split and merge dimensions at once, such as [4n, 24] to [n, 96], by two views each, in place.

    The first view splits dimensions to the `divided_shape`, if there is one; the second merges them. For the original
    view, Inductor of torch 2.13 compares old and new sizes in pairs and concludes that n is 1.
    """
    for node in graph.nodes:
        if node.target not in (aten.view.default, aten._unsafe_view.default):
            continue
        before = node.args[0].meta["val"]
        divided = divided_shape(before.shape, node.meta["val"].shape)
        if divided is None or len(divided) in (before.dim(), node.meta["val"].dim()):
            continue
        with graph.inserting_before(node), before.fake_mode:
            sizes = [size if isinstance(size, int) else -1 for size in divided]
            view = graph.call_function(node.target, (node.args[0], sizes))
            view.meta = {"val": before.view(divided)}
            node.replace_input_with(node.args[0], view)


def divided_shape(before: Sequence[Any], after: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the coarsest shape from which both shapes result by merging adjacent dimensions.

    (6, 4) and (2, 12) give (2, 3, 4). Sizes are int or torch.SymInt. Returns None if there is no such shape, or if it
    has more than one symbolic size.
    """
    left, right, found = list(before), list(after), []
    while left and right:
        a, b = left.pop(), right.pop()
        if statically_known_true(b % a == 0):
            found.append(a)
            if not statically_known_true(a == b):
                right.append(b // a)
        elif statically_known_true(a % b == 0):
            found.append(b)
            left.append(a // b)
        else:
            return None
    symbols = [size for size in found if not isinstance(size, int)]
    return tuple(reversed(found)) if len(symbols) <= 1 and set(left + right) <= {1} else None


def load_artifact(entry: Path, key: str) -> CompiledArtifact:
    """Return a piece, loaded from Inductor's artifact in an entry. Nothing is compiled if the entry is complete."""
    with compiler_folders(entry, key):
        return CompiledArtifact.load(path=str(artifact_path(entry, key)))


def artifact_path(entry: Path, key: str) -> Path:
    return entry / "pieces" / f"{key}.bin"


def _without_inductor(code: str | None, graph: fx.Graph) -> CppPiece | None:
    from torch._inductor.select_algorithm import extern_kernels  # workers call import_compiler first

    if code is None:
        return None
    num_inputs, (results, *_) = len(graph.find_nodes(op="placeholder")), graph.output_node().args
    assert isinstance(results, tuple)
    return read_output_code(code, num_inputs, len(results), partial(getattr, extern_kernels))


def _compiled_kernel(types: list[str], source: str) -> Path:
    """Return the path of a C++ kernel's shared library. Inductor compiles it unless this process has loaded it before.

    types, source: the kernel's argument types and C++ source, as Inductor takes them.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # workers call import_compiler first

    kernel = CppPythonBindingsCodeCache.load_pybinding(types, source)
    return Path(kernel.__self__.__file__)


def _output_code(folder: Path) -> str | None:
    """Return the output code that Inductor wrote for a piece: Python that defines `call`. None if there is none."""
    found = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    return next((code for code in found if "def call(" in code), None)


@contextmanager
def compiler_folders(entry: Path, key: str) -> Iterator[None]:
    """Let Inductor and Triton use folders of the entry within a block, in which a piece is compiled or loaded."""
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(entry / "inductor" / key), "TRITON_CACHE_DIR": str(entry / "triton")}
    # Inductor sets TRITON_PTXAS_PATH to the assembler that ships with PyTorch. Triton's names of kernels contain the
    # assembler's version, so processes started later would look for the engine's kernels under other names.
    # A precompiled header would tie the entry to this folder, and building it costs more than it saves.
    with (
        environment_variables(wanted, ("TRITON_PTXAS_PATH",)),
        inductor_config.patch(cpp_cache_precompile_headers=False),
    ):
        yield
