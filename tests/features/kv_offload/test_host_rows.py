"""Rows in host memory: each comes back as it was, through buffers that hold one row or several."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_engine.features.kv_offload.host_rows import HostRows

ROWS, SLOTS, WIDTH = 60, 40, 24


def check(seed: int, device: torch.device) -> None:
    """Copy rows out and then back to other rows, several times, without waiting in between."""
    random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = [torch.randint(256, (ROWS, WIDTH), dtype=torch.uint8, generator=generator).to(device) for _ in range(3)]
    host = HostRows(lambda: tensors, SLOTS, device, buffers_bytes=random_.choice([1, 4, 9, 200]) * 3 * WIDTH)
    host.allocate_buffers()
    host.allocate_slots()
    expected = [tensor.clone() for tensor in tensors]
    kept: dict[int, list[torch.Tensor]] = {}
    for _ in range(4):
        count = random_.randrange(1, SLOTS + 1)
        slots, rows = random_.sample(range(SLOTS), count), random_.sample(range(ROWS), count)
        host.copy_out(slots, rows)
        kept |= {slot: [each[row].clone() for each in expected] for slot, row in zip(slots, rows, strict=True)}
        slots = random_.sample([*kept], random_.randrange(1, len(kept) + 1))
        rows = random_.sample(range(ROWS), len(slots))
        host.copy_in(slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            for each, value in zip(expected, kept[slot], strict=True):
                each[row] = value
    assert all(map(torch.equal, tensors, expected))
    host.close()


def test_rows_on_a_cpu() -> None:
    for seed in range(20):
        check(seed, torch.device("cpu"))


@pytest.mark.gpu
def test_rows_on_a_gpu() -> None:
    for seed in range(60):
        check(seed, torch.device("cuda"))
