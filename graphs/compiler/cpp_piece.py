"""Stores pieces that Inductor compiled for a CPU so that they load without Inductor, whose import takes seconds.

Inductor's output code is Python: the C++ sources of kernels, and a function `call` that allocates tensors and calls the
kernels. If `call` uses only these kernels, functions of torch and Python's own, it is rewritten as a Python file that
is stored beside the compiled kernels. Any other piece is stored as Inductor's artifact.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.process.child import environment_variables

_CODE = "piece.py"
# Environment variable with the address of the function that returns a tensor's data pointer. Inductor's kernels are not
# linked against torch and read it when they are loaded.
_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
_PYTHON_MODULES = ("math", "cmath")
# Namespaces that exist only after torch's compilers are imported.
_OF_COMPILERS = ("torch._inductor", "torch._dynamo", "torch._functorch", "torch.ops.inductor")

CompileKernel = Callable[[list[str], str], Path]


@dataclass(frozen=True)
class CppPiece:
    """A piece as Python source, which calls C++ kernels."""

    source: str  # defines `piece(inputs...)`, which calls kernels by name and returns a tuple
    kernels: Mapping[str, tuple[list[str], str]]  # name -> (argument types, C++ source), as Inductor takes them


def piece_folder(entry: Path, key: str) -> Path:
    """Return the folder that a cache entry has for the piece `key` if the piece runs without Inductor."""
    return entry / "cpp" / key


def read_output_code(
    code: str, num_inputs: int, num_results: int, library_call: Callable[[str], Any]
) -> CppPiece | None:
    """Return the piece that Inductor's output code defines; None if it cannot run without Inductor.

    num_inputs, num_results: the piece's numbers of inputs and results; if the code's differ, None is returned, too.
    library_call: returns the function that a name in Inductor's `extern_kernels` stands for.
    """
    module = ast.parse(code)
    calls = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    piece = _with_parameters(calls[0]) if len(calls) == 1 else None
    if piece is None or _numbers(piece) != (num_inputs, num_results) or not _LibraryCalls(library_call).replace(piece):
        return None
    definitions = dict(_definitions(module))
    kernels, needed = {}, {}
    for name in sorted(_free_names(piece)):
        definition = definitions.get(name)
        if (kernel := _kernel_of(definition)) is not None:
            kernels[name] = kernel
        elif definition is not None and _is_of_torch_or_python(definition):
            needed[ast.unparse(definition)] = definition
        elif name != "torch":
            return None
    if any(path.startswith(_OF_COMPILERS) for node in (*needed.values(), piece) for path in _paths(node)):
        return None
    return CppPiece("\n".join((*needed, ast.unparse(piece))) + "\n", kernels)


def write_cpp_piece(folder: Path, piece: CppPiece, compile_kernel: CompileKernel) -> None:
    """Write a piece and its kernels' shared libraries to the new folder `folder`.

    compile_kernel: returns the path of a kernel's shared library, given its argument types and C++ source.
    """
    folder.mkdir(parents=True)
    for name, (types, source) in piece.kernels.items():
        shutil.copyfile(compile_kernel(types, source), folder / f"{name}.so")
    (folder / _CODE).write_text(piece.source, encoding="utf-8")


def load_cpp_piece(folder: Path) -> Callable[..., Any]:
    """Load a piece from a folder that `write_cpp_piece` wrote, and return the function that runs it."""
    namespace: dict[str, Any] = {"torch": torch}
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    with environment_variables({_DATA_POINTER: str(address)}):
        for file in sorted(folder.glob("*.so")):
            namespace[file.stem] = _load_kernel(file)
    exec(compile((folder / _CODE).read_text(encoding="utf-8"), "<C++ piece>", "exec"), namespace)
    return namespace.pop("piece")


def _load_kernel(file: Path) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(f"{file.stem}.kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def _with_parameters(call: ast.FunctionDef) -> ast.FunctionDef | None:
    """Rewrite `call(args)`, which unpacks and clears the list `args`, as a function `piece` of the list's items.

    Returns the new function, or None if `call` does not begin by unpacking and clearing `args`.
    """
    match call.body:
        case [ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")), clear, *body] if ast.unparse(
            clear
        ) == "args.clear()" and all(isinstance(name, ast.Name) for name in names):
            parameters = ", ".join(ast.unparse(name) for name in names)
            (piece,) = ast.parse(f"def piece({parameters}):\n    pass").body
            assert isinstance(piece, ast.FunctionDef)
            piece.body = body
            return piece
    return None


def _numbers(piece: ast.FunctionDef) -> tuple[int, int]:
    """Return the number of a function's parameters, and the number of its results.

    The number of results is -1 unless the function has a single return, at its end, of a tuple.
    """
    returns = [node for node in ast.walk(piece) if isinstance(node, ast.Return)]
    match returns:
        case [ast.Return(value=ast.Tuple(elts=results)) as last] if last is piece.body[-1]:
            return len(piece.args.args), len(results)
    return len(piece.args.args), -1


class _LibraryCalls(ast.NodeTransformer):
    """Replaces names of Inductor's `extern_kernels` in code by the torch functions that they stand for."""

    def __init__(self, library_call: Callable[[str], Any]) -> None:
        self._library_call = library_call
        self._all_known = True

    def replace(self, piece: ast.FunctionDef) -> bool:
        """Replace the names in a function, in place, and return whether each of them is a function of module torch."""
        self.visit(piece)
        return self._all_known

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "extern_kernels"):
            return self.generic_visit(node)
        function = getattr(torch, node.attr, None)
        self._all_known &= function is not None and function is self._library_call(node.attr)
        return ast.Attribute(ast.Name("torch", ast.Load()), node.attr, node.ctx)


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, statement) for each name that a statement at the module's top level assigns or imports."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    yield alias.asname or alias.name, node


def _kernel_of(definition: ast.stmt | None) -> tuple[list[str], str] | None:
    match definition:
        case ast.Assign(value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[types, source], keywords=[])):
            return ast.literal_eval(types), ast.literal_eval(source)
    return None


def _is_of_torch_or_python(definition: ast.stmt) -> bool:
    match definition:
        case ast.Import(names=names):
            return all(alias.name in _PYTHON_MODULES for alias in names)
        case ast.ImportFrom(module=module):
            return module in ("torch", *_PYTHON_MODULES)
        case ast.Assign(value=ast.Attribute() as value):
            return ast.unparse(value).startswith("torch.")
    return False


def _free_names(function: ast.FunctionDef) -> set[str]:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {argument.arg for argument in function.args.args}
    return {node.id for node in names} - bound - vars(builtins).keys()


def _paths(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names in a statement. For `from a import b`, yields a.b."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield ast.unparse(part)
        elif isinstance(part, ast.ImportFrom):
            yield from (f"{part.module}.{alias.name}" for alias in part.names)
