"""Mapped memory, over the host's memory: tensors keep their addresses while physical memory comes and goes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from host_mapping import GRANULARITY, HostDriver, host_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.engine.messages import ControlCall, EngineRequest
from compiled_engine.engine.rank_memory import RankMemory
from compiled_engine.features.registry import make_features, plan_features
from compiled_engine.features.sleep import mapped_memory
from compiled_engine.features.sleep.mapped_memory import ALIGNMENT, HostCopy, MappedMemory, MappingError
from compiled_engine.features.weight_updates.frontend import update_calls
from compiled_engine.options import EngineOptions
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

MIB = 1 << 20


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 3 * GRANULARITY), min_size=1, max_size=8), cycles=st.integers(1, 3))
def test_tensors_keep_their_addresses_and_restored_contents(sizes: list[int], cycles: int) -> None:
    driver = HostDriver()
    memory, copy = host_memory(driver, MIB * 4), HostCopy()
    tensors = [memory.allocate(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    used = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert sum(sizes) <= driver.physical_bytes == memory.mapped_bytes <= used + GRANULARITY
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % ALIGNMENT == 0 for address, size in zip(addresses, sizes, strict=True) if size)
    for _ in range(cycles):
        copy.save(memory.contents())
        before = driver.physical_bytes
        memory.unmap()
        memory.unmap()
        assert driver.physical_bytes == memory.mapped_bytes == 0
        memory.map()
        memory.map()
        assert driver.physical_bytes == before
        copy.restore(memory.contents())
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        for number, tensor in enumerate(tensors):
            assert (tensor == number).all()
    further = memory.allocate(GRANULARITY)
    further.fill_(99)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    del tensors, further, tensor, memory
    gc.collect()
    assert driver.physical_bytes == 0
    assert not driver.reserved


def test_a_tensor_keeps_the_memory_that_it_is_in() -> None:
    driver = HostDriver()
    tensor = host_memory(driver, MIB).allocate(10)[3:]
    gc.collect()
    assert tensor.fill_(1).sum() == 7
    del tensor
    gc.collect()
    assert not driver.reserved


def test_memory_that_is_missing_is_one_line_and_leaves_nothing_mapped() -> None:
    driver = HostDriver(most_bytes=4 * GRANULARITY)
    memory = host_memory(driver, 8 * GRANULARITY)
    for _ in range(3):
        memory.allocate(GRANULARITY)
    with pytest.raises(MappingError, match=r"^cuMemCreate of the CUDA driver failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        memory.allocate(2 * GRANULARITY)
    with pytest.raises(MappingError, match=r"^393216 bytes more do not fit into a range of 524288 bytes$"):
        memory.allocate(6 * GRANULARITY)
    memory.unmap()
    driver.most_bytes = 2 * GRANULARITY
    with pytest.raises(MappingError, match=r"^0\.00 GiB cannot be mapped again: cuMemCreate .*OUT_OF_MEMORY$"):
        memory.map()
    assert driver.physical_bytes == 0
    assert not memory.is_mapped
    driver.most_bytes = 3 * GRANULARITY
    memory.map()
    assert driver.physical_bytes == 3 * GRANULARITY


def test_the_driver_functions_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sleeps only with them."""
    monkeypatch.setattr(mapped_memory, "MODULE", "json.decoder")
    assert mapped_memory.has_driver_functions()
    monkeypatch.setattr(mapped_memory, "MODULE", "no_such_package.driver")
    assert not mapped_memory.has_driver_functions()


PROMPT = (*range(3, 60),)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "gemma3", tie_word_embeddings=True)  # norms are folded
    return folder


def start(folder: Path, memory: Callable[[Any], RankMemory]) -> EngineCore:
    """Return an engine on a CPU whose weights and KV cache are in the given memory."""
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 32, "block_size": 16}
    options["compile_ranges"] = ()
    config = resolve(
        EngineOptions(model=folder, device="cpu", mode="compiled", max_model_len=96, enable_sleep_mode=True, **options)
    )
    clock, make = StepClock(config.device), replace(make_features(), memory=memory)
    executor = InProcessExecutor(config, SilentProgress(), Timeline(), clock, make, ())
    return EngineCore(config, executor, clock, features=plan_features(config, executor))


def answer(core: EngineCore) -> list[Any]:
    """Return tokens and log-probabilities of a request, computed without the prefix cache."""
    core.call(ControlCall("reset_prefix_cache", {"of_running": False}))
    core.add(EngineRequest("r", PROMPT, PARAMS))
    found = []
    while core.has_unfinished():
        for output in core.step():
            found += [(output.new_token_ids, str(output.logprobs))]
    core.check_integrity()
    return found


def call(core: EngineCore, name: str, **arguments: Any) -> Any:
    return core.call(ControlCall(name, arguments))


def update(core: EngineCore, folder: Path) -> None:
    calls = update_calls.update(str(folder), core.config.parallel, None, recompute=True, in_this_process=True)
    update_calls.served(calls, core.call)


def refuse(self: HostCopy, contents: torch.Tensor) -> None:
    raise RuntimeError("out of memory")


def test_an_engine_in_mapped_memory_sleeps_and_wakes_with_the_same_bits(folder: Path) -> None:
    """It runs on if the host lacks memory for its weights, and sleeps on while the device lacks memory."""
    driver = HostDriver()
    memories: list[MappedMemory] = []

    def memory(config: Any) -> RankMemory:
        memories[:] = [host_memory(driver, 64 * MIB), host_memory(driver, 64 * MIB)]
        return RankMemory(*memories)

    core = start(folder, memory)
    expected, counts, held = answer(core), core.metrics(), driver.physical_bytes
    of_weights, of_cache = (each.mapped_bytes for each in memories)
    assert of_weights
    assert of_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "save", refuse)
        with pytest.raises(ControlError, match=r"level 1 needs 0\.0 GiB of pinned host memory: out of memory"):
            call(core, "sleep", level=1)
    assert not call(core, "is_sleeping")
    assert answer(core) == expected

    for _ in range(2):
        call(core, "sleep", level=1)
        assert driver.physical_bytes == 0
        with pytest.raises(ControlError, match="the weights sleep; wake them first"):
            update(core, folder)
        call(core, "sleep", level=1)  # again
        assert not call(core, "wake_up", tags=["weights"])
        assert driver.physical_bytes == of_weights
        assert call(core, "wake_up")
        assert driver.physical_bytes == held
        assert answer(core) == expected
    call(core, "sleep", level=2)
    assert driver.physical_bytes == 0
    driver.most_bytes = of_weights
    call(core, "wake_up", tags=["weights"])
    update(core, folder)
    driver.most_bytes = held - GRANULARITY
    with pytest.raises(ControlError, match="cannot be mapped again: cuMemCreate of the CUDA driver failed"):
        call(core, "wake_up")
    assert call(core, "is_sleeping")
    driver.most_bytes = held
    call(core, "wake_up")
    assert answer(core) == expected
    after = core.metrics()
    assert [after[name] for name in ("traces", "compiles")] == [counts[name] for name in ("traces", "compiles")]
    core.close()
    del core
    memories.clear()
    gc.collect()
    assert driver.physical_bytes == 0
