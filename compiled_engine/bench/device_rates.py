"""The rates that lower bounds are made of: known for some GPUs, otherwise measured in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from compiled_engine.bench.bounds import Rates

# Device name -> bytes/s that large copies reach, FLOP/s that large bf16 products reach; measured. The whole name: a
# GH200 is another device, and "NVIDIA H200 MIG 1g.18gb" a part of one.
KNOWN = {"NVIDIA H200": (4.3e12, 790e12)}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
ATTEMPTS = 5


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of a device for products in dtype; takes about a second where they must be measured."""
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        if name in KNOWN:
            return Rates(*KNOWN[name], f"known for {name.removeprefix('NVIDIA ')}")
    return measured_rates(device, dtype)


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of a few large copies and of a few square products."""
    num_bytes = COPY_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    copy_s = _copy_seconds(num_bytes, device)
    size = PRODUCT_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    b, product = torch.ones_like(a), torch.empty_like(a)
    product_s = _best_seconds(lambda: torch.mm(a, b, out=product), device)
    text = f"measured: a copy of {num_bytes >> 20} MiB, a product of {size} x {size} in {dtype}".replace("torch.", "")
    return Rates(2 * num_bytes / copy_s, 2 * size**3 / product_s, text)


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few times, after one that is not counted."""
    times = []
    for _ in range(ATTEMPTS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
