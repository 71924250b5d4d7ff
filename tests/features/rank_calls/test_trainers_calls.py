"""The calls that verl and OpenRLHF make, in their order, for three updates of the bundled model each.

The sequences are those of verl 0.9.1 (verl/workers/rollout/vllm_rollout/vllm_async_server.py and vllm_rollout.py) and
of OpenRLHF 0.11 (openrlhf/trainer/ray/vllm_engine.py and ppo_actor.py). The trainer of OpenRLHF broadcasts over gloo
here, in place of vLLM's communicator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from async_engines import run
from trained_steps import ENGINE, PARAMS, PROMPT, Bits, Step, bits_of, trained_steps

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.features.weight_updates.broadcast import TIMEOUT
from compiled_engine.frontend.outputs import RequestOutput


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return trained_steps(tmp_path_factory.mktemp("steps"), 3)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[AsyncLLM]]:
    engines = [AsyncLLM(core="in_process", **ENGINE) for _ in range(2)]
    yield engines
    for engine in engines:
        asyncio.run(engine.shutdown())


async def generated(engine: AsyncLLM) -> RequestOutput:
    async for output in engine.generate({"prompt_token_ids": PROMPT}, PARAMS, output="final"):
        return output
    raise AssertionError("no output")


async def bits(engine: AsyncLLM) -> Bits:
    await engine.reset_prefix_cache()  # a cached prefix would change the shapes of steps
    return bits_of(await generated(engine))


def test_verl_releases_memory_sends_buckets_and_resumes(engines: list[AsyncLLM], steps: list[Step]) -> None:
    engine = engines[0]

    async def send_buckets(step: Step) -> None:
        """Send buckets of the engine's own call in place of verl's `update_weights_from_ipc`."""
        await engine.collective_rpc("start_weight_update")
        pairs = [*step.tensors.items()]
        for begin in range(0, len(pairs), 20):
            await engine.collective_rpc("update_weights", args=(pairs[begin : begin + 20],))
        await engine.collective_rpc("finish_weight_update")

    async def send_shared_memory(step: Step) -> None:
        """Send one bucket in shared memory, which a function of the trainer reads on the rank."""
        await engine.collective_rpc("start_weight_update")
        memory = SharedMemory(create=True, size=sum(tensor.nbytes for tensor in step.tensors.values()))
        try:
            described = written(step.tensors, memory)
            (number,) = await engine.collective_rpc("rank_functions:receive", args=(memory.name, described))
            assert number == len(step.tensors)
        finally:
            memory.close()
            memory.unlink()
        await engine.collective_rpc("finish_weight_update")

    async def update(step: Step, send: Callable[[Step], Awaitable[None]], *, by_name: bool) -> None:
        await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
        await engine.wait_for_requests_to_drain()
        if by_name:  # as verl 0.8 does
            await engine.collective_rpc("sleep", kwargs={"level": 2})
            await engine.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
        else:
            await engine.sleep(level=2)
            await engine.reset_encoder_cache()
            await engine.wake_up(tags=["weights"])
        await send(step)
        await engine.reset_prefix_cache(reset_connector=True)
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        await engine.wake_up(tags=["kv_cache"])
        await engine.reset_prefix_cache(reset_connector=True)
        await engine.resume_generation()

    async def main() -> None:
        await engine.reset_mm_cache()
        with pytest.raises(ValueError, match="method is 'monkey_patch_model', there is no model to patch"):
            await engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 4096})
        for step, send in zip(steps, (send_buckets, send_shared_memory, send_buckets), strict=True):
            running = asyncio.create_task(generated(engine))
            await asyncio.sleep(0.01)
            await update(step, send, by_name=send is send_shared_memory)
            assert (await running).finished  # aborted, if it had not ended
            assert await bits(engine) == step.bits

    run(main())


def written(tensors: Mapping[str, torch.Tensor], memory: SharedMemory) -> list[tuple[str, str, list[int], int]]:
    """Write tensors to shared memory one after the other, and return their names, dtypes, shapes and first bytes."""
    data, begin, described = torch.frombuffer(memory.buf, dtype=torch.uint8), 0, []
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(torch.uint8).view(-1)
        data[begin : begin + flat.numel()].copy_(flat)
        described.append((name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape], begin))
        begin += flat.numel()
    return described


class Actor:
    """OpenRLHF's policy actor of rank 0, with its calls of all engines."""

    def __init__(self, engines: list[AsyncLLM]) -> None:
        self._engines = engines
        self._group: Any = None

    async def on_engines(self, method: str, **arguments: Any) -> None:
        await asyncio.gather(*(getattr(engine, method)(**arguments) for engine in self._engines))

    async def init_process_group(self) -> None:
        size = len(self._engines) + 1
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        joining = [
            asyncio.create_task(
                engine.collective_rpc(
                    "init_process_group", args=("127.0.0.1", store.port, number + 1, size, "openrlhf", "gloo", False)
                )
            )
            for number, engine in enumerate(self._engines)
        ]
        self._group = await asyncio.to_thread(dist.ProcessGroupGloo, store, 0, size, TIMEOUT)
        assert await asyncio.gather(*joining) == [[None]] * len(self._engines)

    async def update_weight(self, name: str, tensor: torch.Tensor, *, is_last: bool, sends: bool = True) -> None:
        arguments = name, tensor.dtype, tensor.shape, is_last
        receiving = [
            asyncio.create_task(engine.collective_rpc("update_weight", args=arguments)) for engine in self._engines
        ]
        if sends:
            message = tensor.contiguous().view(torch.uint8)
            await asyncio.to_thread(lambda: self._group.broadcast(message, 0).wait())
        else:
            self._group = None  # as if the process had ended
        await asyncio.wait(receiving)  # for all, although one may fail
        await asyncio.gather(*receiving)

    async def broadcast_to_vllm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await self.on_engines("reset_prefix_cache")
        for count, (name, tensor) in enumerate(tensors.items(), 1):
            await self.update_weight(name, tensor, is_last=count == len(tensors))


@asynccontextmanager
async def paused(actor: Actor) -> AsyncIterator[None]:
    await actor.on_engines("pause_generation", mode="keep")
    yield
    await actor.on_engines("resume_generation")


def test_openrlhf_broadcasts_tensor_by_tensor_to_two_engines(engines: list[AsyncLLM], steps: list[Step]) -> None:
    """In one group. Asynchronous training pauses for an update; an engine that shares its GPU sleeps before it."""
    actor = Actor(engines)

    async def main() -> None:
        await actor.init_process_group()
        for step in steps[:2]:
            async with paused(actor):
                await actor.broadcast_to_vllm(step.tensors)
            assert [await bits(engine) for engine in engines] == [step.bits] * 2
        await actor.on_engines("sleep", level=1)
        await actor.on_engines("wake_up", tags=["weights"])
        await actor.broadcast_to_vllm(steps[2].tensors)
        await actor.on_engines("wake_up", tags=["kv_cache"])
        assert [await bits(engine) for engine in engines] == [steps[2].bits] * 2

        names = [*steps[0].tensors]
        for name in names[:3]:
            await actor.update_weight(name, steps[0].tensors[name], is_last=False)
        with pytest.raises(ControlError, match="a transfer has failed, so the trainer is disconnected"):
            await actor.update_weight(names[3], steps[0].tensors[names[3]], is_last=False, sends=False)
        for engine in engines:
            assert (await engine.weight_update_state())["received"] is None
            with pytest.raises(ControlError, match="no trainer is connected"):
                await engine.collective_rpc("update_weight", args=(names[4], "bfloat16", [2, 2]))
            assert await bits(engine) == steps[2].bits
        await actor.init_process_group()
        await actor.broadcast_to_vllm(steps[0].tensors)
        assert [await bits(engine) for engine in engines] == [steps[0].bits] * 2

    run(main())


def test_what_openrlhf_cannot_have_is_refused_by_name(engines: list[AsyncLLM]) -> None:
    group = "127.0.0.1", 1, 1, 2, "openrlhf"

    async def main() -> None:
        with pytest.raises(ValueError, match="use_ray is True; allowed: False"):
            await engines[0].collective_rpc("init_process_group", args=(*group, "nccl", True))
        with pytest.raises(ControlError, match="NCCL sends between GPUs, but the device is 'cpu'"):
            await engines[0].collective_rpc("init_process_group", args=group)
        with pytest.raises(ControlError, match=r"rank_offset is 2, with world_size 2 and 1 ranks .* allowed: 1 to "):
            await engines[0].collective_rpc("init_process_group", args=("127.0.0.1", 1, 2, 2, "openrlhf", "gloo"))

    run(main())
