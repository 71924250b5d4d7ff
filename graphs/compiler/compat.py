"""Hides the differences between the supported torch versions (2.11 to 2.15)."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.decorators import mark_unbacked
from torch._inductor import config as inductor_config
from torch._inductor import standalone_compile
from torch._inductor.utils import clear_caches
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_engine.graphs.compiler.instruction_trials import trials

# Dynamo would import these, some 400 modules, during a trace. By then other threads prepare kernels and compete for the
# GIL, which Python releases at each file it reads.
_IMPORTED_BY_TRACES = (
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compiler_bisector",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "sympy.tensor.tensor",
)
for _name in _IMPORTED_BY_TRACES:
    with suppress(ImportError):  # an optional part of torch
        importlib.import_module(_name)


def import_compiler() -> None:
    """Import Inductor without querying CUDA, since processes that are forked after a query cannot use CUDA.

    torch._inductor.runtime.benchmarking queries CUDA at its import, to choose how kernels are timed. A setting prevents
    this.
    """
    with inductor_config.patch(use_experimental_benchmarker=False):
        importlib.import_module("torch._inductor.compile_fx")


_MARKS_RANGES = "min" in inspect.signature(mark_unbacked).parameters


def mark_dynamic_size(tensor: torch.Tensor, dim: int, shape_id: str, low: int, high: int) -> None:
    """Mark `tensor.shape[dim]` as dynamic: any size in [low, high], the same for all sizes marked with `shape_id`.

    The size is an unbacked symbol, so tracing cannot specialise on the example. In torch 2.11 the range cannot be set
    here; `declare_range` sets it after the trace.
    """
    bounds = {"min": low, "max": high} if _MARKS_RANGES else {}
    mark_unbacked(tensor, dim, shape_id=shape_id, **bounds)


def declare_range(shape_env: ShapeEnv, symbol: sympy.Symbol, low: int, high: int) -> None:
    """Set the range of a symbolic size if `mark_dynamic_size` cannot do it in this torch version; else do nothing."""
    if not _MARKS_RANGES:
        shape_env.constrain_symbol_range(symbol, low, high)


def source_name(placeholder: fx.Node) -> str:
    """Return Dynamo's name for the source of a graph input, such as L['input_ids_T']; "" for a size."""
    grapharg = placeholder.meta.get("grapharg")
    if grapharg is None:
        return ""
    name = grapharg.source.name
    return name() if callable(name) else name


def compile_piece(piece: fx.GraphModule, fake_inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Compile a piece with Inductor for the dynamic sizes of its fake inputs. Returns a CompiledArtifact.

    options: Inductor's settings that differ from their defaults, by name.
    """
    return standalone_compile(
        piece, list(fake_inputs), dynamic_shapes="from_graph", options={"config_patches": options}
    )


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same results, from which a tracer records functional ops instead of mutating ones."""
    return dispatch_functionalize(function)


@contextmanager
def bytecode_of(function: Callable[..., Any]) -> Iterator[list[tuple[types.CodeType, types.CodeType]]]:
    """Yield a list that receives the pair (code before, code after) when Dynamo rewrites the bytecode of `function`."""
    found: list[tuple[types.CodeType, types.CodeType]] = []

    def hook(code: types.CodeType, new_code: types.CodeType) -> types.CodeType | None:
        if code is function.__code__:
            found.append((code, new_code))
        return None

    handle = register_bytecode_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def forget_compilations() -> None:
    """Clear Inductor's caches in this process.

    Otherwise Inductor could reuse an earlier compilation without writing files, which the cache entry would then lack.
    """
    clear_caches()
    for name, module in list(sys.modules.items()):  # C++ kernels are modules, which torch 2.11 would find here
        if name.endswith(".kernel") and str(getattr(module, "__file__", "")).endswith(".so"):
            del sys.modules[name]
    trials.forget_others()
