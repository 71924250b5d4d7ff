"""Compiles the Triton kernels of small-batch pieces side by side, while a first warm-up compiles the others.

Compiling a kernel takes a third of a second, most of it outside of Python, so threads help. The piece that most layers
run is called with empty inputs, once for each choice of kernels; what it computes is dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from compiled_engine.graphs.compiler import CompiledModel
from compiled_engine.graphs.load_piece import Piece
from compiled_engine.passes.small_batch_linear_launch import TOKEN_BUCKETS


@contextmanager
def rehearsal(compiled: CompiledModel, entry: Path, device: torch.device) -> Iterator[None]:
    """Meanwhile call the most used piece of each small version with every number of tokens that changes its kernels."""
    calls: list[tuple[Piece, dict[str, Any], int]] = []
    for version in compiled.versions:
        if version.compile_range.small:
            ((key, _),) = Counter(step.piece for step in version.plan.steps if step.piece).most_common(1)
            piece = json.loads((entry / "pieces" / f"{key}.json").read_text())
            low, high = version.compile_range.low, version.compile_range.high
            counts = {min(high, tokens) for tokens in TOKEN_BUCKETS if tokens >= low}
            calls += [(compiled.pieces[key], piece, tokens) for tokens in counts]
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        futures = [threads.submit(_call, *call, device) for call in calls]
        yield
        for future in futures:
            future.result()
    torch.cuda.synchronize(device)


@torch.inference_mode()
def _call(piece: Piece, description: dict[str, Any], num_tokens: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        piece(*(_empty(node[1], num_tokens) for node in description["nodes"] if node[0] == "input"))


def _empty(value: dict[str, Any], num_tokens: int) -> Any:
    """An input of a piece: every open size of a piece is the number of tokens."""

    def size(expression: int | str) -> int:
        return expression if isinstance(expression, int) else int(eval(expression, {"__builtins__": {}}, sizes))

    sizes = {f"n{index}": num_tokens for index in range(8)}
    if "size" in value:
        return size(value["size"])
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    shape, stride = [size(item) for item in value["shape"]], [size(item) for item in value["stride"]]
    return torch.empty_strided(shape, stride, dtype=dtype, device=value["device"])
