"""What a GPU and its first kernels need, begun by threads before this process imports torch."""

from __future__ import annotations

from compiled_engine.process.cuda_context import cuda_driver, index_of
from compiled_engine.process.triton_digest import triton_digest


def begin_gpu(device: str, *, runs_here: bool) -> None:
    """For the option `device`. runs_here: this process runs on the GPU; else it only asks which there are."""
    index = index_of(device)
    if index is None:
        return
    if runs_here:
        triton_digest(index)  # which begins with a context
    else:
        cuda_driver()
