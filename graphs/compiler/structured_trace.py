"""Our stages in torch's structured trace (TORCH_TRACE=folder): tlparse shows them beside Dynamo's and Inductor's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch._guards import CompileId
from torch._logging import trace_structured

# Lowered graphs, each pass's diff; of each range its graph after the passes, its plan and its forward; output code.
_STAGES = ("trace/aten_graph.txt", "passes/*.diff", "graph.txt", "plan.json", "forward.py", "pieces/*.py")


def emit_entry(entry: Path, compile_id: CompileId | None) -> None:
    """Emit what compilation `compile_id` (Dynamo's number of it) has written, each file as an artifact
    compiled_engine.<its path with underscores>; nothing happens unless a trace is written."""
    for path in (path for pattern in _STAGES for path in sorted(entry.rglob(pattern))):
        name = "_".join(path.relative_to(entry).with_suffix("").parts)
        trace_structured(
            "artifact",
            metadata_fn=partial(dict, name=f"compiled_engine.{name}", encoding="string"),
            payload_fn=path.read_text,
            compile_id=compile_id,
            expect_trace_id=False,
        )
