"""Copy memory-mapped host tensors to a CUDA device, several chunks at a time.

A plain copy of a mapped tensor alternates between page faults and copying, in one thread. Here several threads copy
chunks into buffers of pinned memory. Each thread has two buffers: the device fetches one while the thread fills the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

# Measured on a host with 16 cores, with all pages cached: 42 GB/s. With half the threads: 32. With half the chunk: 30.
NUM_THREADS = 8
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Chunk:
    """Consecutive elements or rows of one tensor, to be copied from `source` to `target`, which may differ in dtype.

    is_last: whether it is the last chunk of its tensor.
    """

    source: torch.Tensor
    target: torch.Tensor
    is_last: bool


def copy_to_device(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device, advance: Callable[[int], None]
) -> None:
    """Copy each source, on the CPU, into its target on the device. All copies are complete on return.

    pairs: (source, target) of the same shape; if their dtypes differ, the device converts. Targets must be contiguous,
    and sources or at least each of their rows. advance: called with 1 for each tensor, after the launch of its last
    chunk. Uses 2 * NUM_THREADS * CHUNK_BYTES of pinned memory, or about twice the largest tensor if that is less.
    """
    largest_tensor = max(source.nbytes for source, _ in pairs)
    chunk_bytes = min(CHUNK_BYTES, largest_tensor // NUM_THREADS)
    chunks = deque(chunk for source, target in pairs for chunk in chunks_of(source, target, chunk_bytes))
    buffer_bytes = max(chunk.source.nbytes for chunk in chunks)
    torch.cuda.current_stream(device).synchronize()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        workers = [pool.submit(_copy_chunks, chunks, buffer_bytes, device, advance) for _ in range(NUM_THREADS)]
    for worker in workers:
        worker.result()


def chunks_of(source: torch.Tensor, target: torch.Tensor, chunk_bytes: int) -> Iterator[_Chunk]:
    """Yield chunks of up to `chunk_bytes`, as views of source and target; a chunk has at least one element.

    If the source is not contiguous, but its rows are, a chunk has at least one row.
    """
    if source.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    # In a slice of columns only single rows are contiguous; making it contiguous would be a copy.
    count = max(chunk_bytes // source[0].nbytes, 1) if source.dim() else 1
    sources, targets = source.split(count), target.split(count)
    for index, (source_chunk, target_chunk) in enumerate(zip(sources, targets, strict=True), start=1):
        yield _Chunk(source_chunk, target_chunk, is_last=index == len(sources))


def _copy_chunks(
    chunks: deque[_Chunk], buffer_bytes: int, device: torch.device, advance: Callable[[int], None]
) -> None:
    """Take chunks from `chunks` and copy them until none is left. Runs in each thread.

    buffer_bytes: the size of the largest chunk. After an error, `chunks` is cleared so that the other threads end too,
    and the error is raised.
    """
    buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in buffers]
    stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            for buffer, fetched in cycle(zip(buffers, events, strict=True)):
                try:
                    chunk = chunks.popleft()
                except IndexError:
                    break
                fetched.synchronize()
                staged = buffer[: chunk.source.nbytes].view(chunk.source.dtype).view(chunk.source.shape)
                # numpy copies without the GIL and in this thread alone; torch would start a pool for each thread.
                np.copyto(_raw(staged), _raw(chunk.source))
                if chunk.source.dtype != chunk.target.dtype:
                    staged = staged.to(device, non_blocking=True)  # otherwise copy_ converts on the CPU
                chunk.target.copy_(staged, non_blocking=True)
                fetched.record(stream)
                if chunk.is_last:
                    advance(1)
        stream.synchronize()
    except BaseException:
        chunks.clear()
        raise


def _raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()
