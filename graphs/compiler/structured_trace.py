"""Our stages in torch's structured trace (TORCH_TRACE=folder): tlparse shows them beside Dynamo's and Inductor's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch._guards import CompileContext, CompileId
from torch._logging import trace_structured


def current_compile_id() -> CompileId | None:
    """Dynamo's number of the compilation that is under way: known while its backend runs."""
    return CompileContext.current_compile_id()


def emit(name: str, text: Callable[[], str], compile_id: CompileId | None) -> None:
    """Write `text()` as artifact compiled_engine.<name> of a compilation; nothing happens unless a trace is written.

    compile_id: of the compilation that it belongs to, from `current_compile_id`.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"compiled_engine.{name}", "encoding": "string"},
        payload_fn=text,
        compile_id=compile_id,
        expect_trace_id=False,
    )


_STAGES = ("trace/aten_graph.txt", "*/passes/*.diff", "*/graph.txt", "*/plan.json", "*/forward.py", "pieces/*.py")


def emit_entry(entry: Path, compile_id: CompileId | None) -> None:
    """Emit what a compilation has written: the lowered graph, each pass's diff, the graph of each range after its
    passes, the plan of its split, the stitched forward, and the pieces' output code."""
    for path in (path for pattern in _STAGES for path in sorted(entry.glob(pattern))):
        emit("_".join(path.relative_to(entry).with_suffix("").parts), path.read_text, compile_id)
