"""Host memory that a GPU copies from and to: its pages, its size, and what it says if the host lacks memory."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from compiled_engine.process.pinned_memory import PART_BYTES, PinnedMemory, provide_pages


def test_memory_can_be_written_and_read() -> None:
    memory = PinnedMemory(1000, pinned=False)
    memory.bytes.copy_(torch.arange(1000) % 251)
    assert torch.equal(memory.bytes, (torch.arange(1000) % 251).to(torch.uint8))
    kept = memory.bytes[500:]
    memory.close()
    del memory
    assert kept[0] == 500 % 251  # a tensor keeps its memory
    assert PinnedMemory(0, pinned=False).bytes.shape == (0,)


def test_every_page_is_provided() -> None:
    resident, size = psutil.Process().memory_info().rss, PART_BYTES + 3 * mmap.PAGESIZE + 1
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    provide_pages(memory)
    assert psutil.Process().memory_info().rss - resident >= PART_BYTES
    assert memory[:10] == memory[-10:] == bytes(10)


def test_what_the_host_lacks_is_said_before_it_is_taken() -> None:
    with pytest.raises(RuntimeError, match=r"4194304\.0 GiB are needed, \d+\.\d GiB are available"):
        PinnedMemory(1 << 52, pinned=False)


@pytest.mark.gpu
def test_a_gpu_copies_without_waiting() -> None:
    size = 3 * mmap.PAGESIZE + 17
    memory = PinnedMemory(size, pinned=True)
    assert memory.bytes.is_pinned()
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    memory.bytes.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.bytes, values.cpu())
    memory.close()
    assert not memory.bytes.is_pinned()
