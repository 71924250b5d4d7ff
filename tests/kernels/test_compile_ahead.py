"""Kernels that are asked for are compiled by threads: on a machine without a GPU, for one."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from left_over import wait_until

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by  # noqa: E402
from compiled_engine.kernels.launcher import leaves_out_launches  # noqa: E402
from compiled_engine.passes.linear.silu_mul import silu_mul_kernel  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)


def started(workers: KernelWorkers) -> psutil.Process:
    """Start the workers, and return the process that will fork them."""
    before = psutil.Process().children()
    workers.start()
    (new,) = [process for process in psutil.Process().children() if process not in before]
    return new


def make_kernel(module: str = "compiled_engine.nowhere") -> Any:
    def double_kernel(x_ptr, count, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
        index = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < count)
        tl.store(x_ptr + index, x * scale + 1 if FLAG else x * scale, mask=index < count)

    double_kernel.__module__ = module
    return triton.jit(double_kernel, do_not_specialize=["count"])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads that compiled, one per kernel."""
    names: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **about: names.append(threading.current_thread().name)
    )
    return names


def test_each_kernel_is_compiled_once_by_a_thread_and_launched_by_nobody(hopper: Path, compiled: list[str]) -> None:
    kernel, x = make_kernel(), torch.ones(64)
    hook = triton.knobs.runtime.jit_cache_hook
    with ThreadPoolExecutor(2, thread_name_prefix="compiler") as threads:
        with compiled_by(KernelWorkers(0, None), threads) as kernels:
            for count in (3, 4):
                assert kernel[(1,)](x, count, 2.0, BLOCK=64, FLAG=True) is None
            kernel[(1,)](x, 3, 0.5, BLOCK=32, FLAG=False, num_warps=2)
        assert compiled == []
        assert [loading.result() is not None for loading in kernels.load()] == [True, True]
    assert triton.knobs.runtime.jit_cache_hook is hook
    assert len(compiled) == 2
    assert all(name.startswith("compiler") for name in compiled)
    # The launches to come find what was compiled.
    for arguments in ((x, 5, 2.0, 64, True), (x, 6, 2.0, 64, True)):
        kernel.warmup(*arguments, grid=(1,))
    kernel.warmup(x, 7, 3.0, BLOCK=32, FLAG=False, num_warps=2, grid=(1,))
    assert len(compiled) == 2
    kernel.warmup(x, 7, 3.0, BLOCK=128, FLAG=False, grid=(1,))
    assert len(compiled) == 3


def test_a_later_process_finds_them_on_disk(hopper: Path, compiled: list[str]) -> None:
    x = torch.ones(64)
    with ThreadPoolExecutor(1) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        make_kernel()[(1,)](x, 3, 2.0, BLOCK=64, FLAG=True)
        kernels.load()
    kept = sorted(hopper.iterdir())
    assert kept
    make_kernel().warmup(x, 3, 2.0, BLOCK=64, FLAG=True, grid=(1,))
    assert sorted(hopper.iterdir()) == kept


def test_only_the_collecting_thread_leaves_out_launches(hopper: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        with compiled_by(KernelWorkers(0, None), threads):
            assert leaves_out_launches()
            assert not threads.submit(leaves_out_launches).result()
        assert not leaves_out_launches()


def test_other_threads_launch_as_ever(hopper: Path, compiled: list[str]) -> None:
    kernel = make_kernel()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="other") as threads,
        compiled_by(KernelWorkers(0, None), threads) as kernels,
    ):
        launch = threads.submit(kernel.warmup, torch.ones(8), 3, 2.0, BLOCK=8, FLAG=True, grid=(1,))
        assert launch.result() is not None
        assert kernels.load() == []
    assert len(compiled) == 1


def test_kernels_of_others_are_launched_as_ever(hopper: Path, compiled: list[str]) -> None:
    with ThreadPoolExecutor(1) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        assert make_kernel("somewhere").warmup(torch.ones(8), 3, 2.0, BLOCK=8, FLAG=True, grid=(1,)) is not None
        assert kernels.load() == []
    assert compiled == [threading.current_thread().name]


def test_two_engines_start_one_after_the_other(hopper: Path, compiled: list[str]) -> None:
    """Otherwise the first to finish would remove the other's hook, and leave its own."""
    hook, inside, leave = triton.knobs.runtime.jit_cache_hook, threading.Event(), threading.Event()

    def start_first() -> None:
        with ThreadPoolExecutor(1) as threads, compiled_by(KernelWorkers(0, None), threads):
            inside.set()
            leave.wait(60)

    def start_second() -> Any:
        with ThreadPoolExecutor(1) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
            make_kernel()[(1,)](torch.ones(8), 3, 2.0, BLOCK=8, FLAG=True)
            return [loading.result() for loading in kernels.load()]

    with ThreadPoolExecutor(2) as engines:
        first = engines.submit(start_first)
        assert inside.wait(60)
        second = engines.submit(start_second)
        leave.set()
        first.result(60)
        assert None not in second.result(60)
    assert triton.knobs.runtime.jit_cache_hook is hook


def test_nothing_is_compiled_for_a_start_that_has_failed(hopper: Path, compiled: list[str]) -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as threads, compiled_by(workers := KernelWorkers(0, None), threads) as kernels:
        silu_mul_kernel[(1, 1)](x, x, WIDTH=8, BLOCK=32, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
        workers.close()
        assert [loading.result() for loading in kernels.load()] == [None]
        sampling = kernels.launched(
            lambda: silu_mul_kernel[(1, 1)](x, x, WIDTH=8, BLOCK=64, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
        )
        assert isinstance(sampling.exception(), CancelledError)
    assert compiled == []


def test_what_is_compiled_already_is_not_launched_either(hopper: Path, compiled: list[str]) -> None:
    """It would read data that skipped kernels have not written."""
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    for asked_for in (1, 0):
        with ThreadPoolExecutor(1) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
            silu_mul_kernel[(1, 1)](x, x, WIDTH=24, BLOCK=32, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
            assert [loading.result() is not None for loading in kernels.load()] == [True] * asked_for


def test_the_hook_is_given_back_when_a_part_fails(hopper: Path, compiled: list[str]) -> None:
    hook = triton.knobs.runtime.jit_cache_hook
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ZeroDivisionError),
        compiled_by(KernelWorkers(0, None), threads),
    ):
        raise ZeroDivisionError
    assert triton.knobs.runtime.jit_cache_hook is hook


def test_workers_compile_what_this_process_then_finds(
    hopper: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes compile the engine's kernels, for one caller after another. A kernel of this test, which no worker
    can import, is compiled by a thread."""
    caplog.set_level("DEBUG", "compiled_engine")
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    with KernelWorkers(2, hopper) as workers, ThreadPoolExecutor(3) as threads:
        workers.start()
        for blocks in ((32, 64), (128, 256)):
            with compiled_by(workers, threads) as kernels:
                for block in blocks:
                    silu_mul_kernel[(1, 1)](
                        x, x, WIDTH=32, BLOCK=block, ACTIVATION="silu", DEPENDENT_LAUNCH=True, launch_pdl=True
                    )
                assert [loading.result() is not None for loading in kernels.load()] == [True] * 2
        with compiled_by(workers, threads) as kernels:
            make_kernel()[(1,)](x, 3, 2.0, BLOCK=64, FLAG=True)
            assert [loading.result() is not None for loading in kernels.load()] == [True]
        # Nor is what workers have compiled loaded for a start that has failed: another folder is Triton's by then.
        with ThreadPoolExecutor(1) as one, compiled_by(workers, one) as kernels:
            silu_mul_kernel[(1, 1)](x, x, WIDTH=32, BLOCK=512, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
            one.submit(int).result()  # after the worker's answer
            workers.close()
            assert [loading.result() for loading in kernels.load()] == [None]
    (left,) = [record.getMessage() for record in caplog.records if "is compiled in this process" in record.getMessage()]
    assert "double_kernel" in left
    compiled.clear()
    silu_mul_kernel.warmup(
        x, x, WIDTH=32, BLOCK=64, ACTIVATION="silu", DEPENDENT_LAUNCH=True, launch_pdl=True, grid=(1, 1)
    )
    assert compiled == []


@pytest.mark.parametrize("count", [1, 2])
def test_workers_that_end_are_done_without(
    count: int, hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    with KernelWorkers(count, hopper) as workers, ThreadPoolExecutor(3) as threads:
        process = started(workers)
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        with compiled_by(workers, threads) as kernels:
            for block in (32, 64, 128, 256):
                silu_mul_kernel[(1, 1)](x, x, WIDTH=16 + count, BLOCK=block, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
            assert None not in [loading.result() for loading in kernels.load()]
    assert [record.getMessage().count("did not start") for record in caplog.records] == [1] * count


def test_the_others_go_on_when_one_ends(hopper: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "compiled_engine")
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    with KernelWorkers(2, hopper) as workers, ThreadPoolExecutor(4) as threads:
        forks = started(workers)
        wait_until(lambda: len(forks.children()) == 2)
        first, second = sorted(forks.children(), key=lambda process: process.create_time())
        first.kill()
        with compiled_by(workers, threads) as kernels:
            for block in (16, 32, 64, 128, 256, 512):
                silu_mul_kernel[(1, 1)](x, x, WIDTH=48, BLOCK=block, ACTIVATION="silu", DEPENDENT_LAUNCH=False)
            assert None not in [loading.result() for loading in kernels.load()]
        assert second.status() != psutil.STATUS_ZOMBIE
    ended = ("worker 0 died", "worker 0 did not start")  # it may not have said yet that it is ready
    assert sum(record.getMessage().startswith(ended) for record in caplog.records) == 1


def test_no_process_can_be_started(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with KernelWorkers(2, hopper) as workers, ThreadPoolExecutor(1) as threads:
        workers.start()
        with compiled_by(workers, threads) as kernels:
            make_kernel()[(1,)](torch.ones(8), 3, 2.0, BLOCK=8, FLAG=True)
            assert kernels.load()[0].result() is not None
