"""Rows of all layers in a buffer and back: no byte is lost, and none beside them is written."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from interpreting_process import interpret

from compiled_engine.features.kv_offload.layer_rows import LayerRows
from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
# Of rows, in words or elements: of one program and of several, which may end with the row or behind it.
SIZES = (1, 3, 130, 1024, 1025, 2500)


def check(seed: int, device: torch.device, triton: bool | None = None) -> None:
    """Gather and scatter random rows of tensors that begin and end within others; their words have 1 or 8 bytes."""
    random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)

    num_rows, word = random_.randrange(1, 9), random_.choice([1, 8])
    around, tensors, sizes = [], [], []
    for _ in range(random_.randrange(1, 5)):
        dtype = random_.choice(DTYPES)
        unit = max(word, dtype.itemsize)
        sizes.append(unit * random_.choice(SIZES))
        around.append(drawn(num_rows + 2, sizes[-1] + unit * random_.randrange(2)))
        tensors.append(around[-1][1:-1, : sizes[-1]].view(dtype))
    rows = random_.sample(range(num_rows), random_.randrange(1, num_rows + 1))
    indices, layers = torch.tensor(rows, device=device), LayerRows([*tensors, tensors[0][:, :0]], triton)

    buffer = drawn(len(rows) + 1, sum(sizes))
    gathered = [torch.cat([tensor[row].view(torch.uint8) for tensor in tensors]) for row in rows]
    expected = torch.stack([*gathered, buffer[-1]])
    layers.gather(indices, buffer[:-1])
    assert torch.equal(buffer, expected)

    buffer, wanted = drawn(len(rows), sum(sizes)), [each.clone() for each in around]
    for place, row in enumerate(rows):
        for each, size, part in zip(wanted, sizes, buffer[place].split(sizes), strict=True):
            each[row + 1, :size] = part
    layers.scatter(indices, buffer)
    for found, want in zip(around, wanted, strict=True):
        assert torch.equal(found, want)


def check_kernel() -> None:
    for seed in range(12):
        check(seed, CPU, triton=True)
    print("equal")


def test_rows_on_a_cpu() -> None:
    for seed in range(24):
        check(seed, CPU)


def test_kernel_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "import interpreter, test_layer_rows; test_layer_rows.check_kernel()")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.usefixtures("hopper")
def test_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    row = torch.zeros(1, dtype=torch.int64)
    with ThreadPoolExecutor(2) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        for size in (16, 15):
            layers = LayerRows([torch.zeros(1, size, dtype=torch.uint8)], triton=True)
            layers.gather(row, torch.empty(1, size, dtype=torch.uint8))
            layers.scatter(row, torch.empty(1, size, dtype=torch.uint8))
        assert [loading.result() is not None for loading in kernels.load()] == [True] * 4
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {"copy_rows_kernel"}


@pytest.mark.gpu
def test_rows_on_a_gpu() -> None:
    for seed in range(60):
        check(seed, torch.device("cuda"))
