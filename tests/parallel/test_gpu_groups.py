"""Collectives through symmetric memory and NCCL, on ranks that are threads: each reads what the others have written."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from compiled_engine.parallel import gpu_groups
from compiled_engine.parallel.gpu_groups import NcclGroup, SymmetricMemoryGroup
from compiled_engine.parallel.group import buffer_bytes, num_slots_for, num_tagged_slots

CPU = torch.device("cpu")


class Memory:
    """Memory that all ranks create together in one call. See torch.distributed._symmetric_memory."""

    def __init__(self, count: int) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(count)


class Handle:
    """A rank's handle to the memory. barriers: channels of this rank's barriers."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory = memory
        self.buffer_ptrs = [memory.parts[each].data_ptr() for each in sorted(memory.parts)]
        self.barriers: list[int] = []

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        part = self._memory.parts[rank]
        count = torch.Size(shape).numel() * dtype.itemsize
        assert count <= part.nbytes
        return part[:count].view(dtype).view(shape)

    def barrier(self, channel: int) -> None:
        self.barriers.append(channel)
        self._memory.barrier.wait(60)


class Fabric:
    """Replaces torch and its symmetric memory in the module; each thread is a rank. used: the kernels that summed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used: list[tuple[str, int]] = []
        self.memories: dict[tuple[int, int], Memory] = {}
        self.local = threading.local()
        self.lock = threading.Lock()
        self.sums = Memory(count)
        self.ops = SimpleNamespace(
            symm_mem=SimpleNamespace(one_shot_all_reduce_copy=self.one_shot, two_shot_all_reduce_out=self.two_shot)
        )
        self.cuda = SimpleNamespace(synchronize=lambda device: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def symm_mem(self) -> Any:
        def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.full((nbytes,), 255, dtype=dtype, device=device)

        def rendezvous(tensor: torch.Tensor, name: str) -> Handle:
            assert name == "the group's name"
            number = self.local.number = getattr(self.local, "number", 0) + 1
            with self.lock:
                memory = self.memories.setdefault((number, 0), Memory(self.count))
            memory.parts[self.local.rank] = tensor
            memory.barrier.wait(60)
            return Handle(memory, self.local.rank)

        return SimpleNamespace(empty=empty, rendezvous=rendezvous)

    def total(self, kind: str, buffer: torch.Tensor, how: str, name: str) -> torch.Tensor:
        """Return the sum of the ranks' buffers."""
        assert (how, name) == ("sum", "the group's name")
        own = self.memories[1, 0].parts[self.local.rank]
        assert not buffer.numel() or buffer.data_ptr() == own.data_ptr()
        barrier = self.memories[1, 0].barrier
        self.used.append((kind, buffer.nbytes))
        barrier.wait(60)
        parts = [self.memories[1, 0].parts[rank][: buffer.nbytes].view(buffer.dtype) for rank in range(self.count)]
        total = torch.stack([part.view(buffer.shape).float() for part in parts]).sum(0).to(buffer.dtype)
        barrier.wait(60)
        return total

    def one_shot(self, buffer: torch.Tensor, x: torch.Tensor, how: str, name: str) -> torch.Tensor:
        buffer.copy_(x)
        return self.total("one shot", buffer, how, name)

    def two_shot(self, buffer: torch.Tensor, how: str, name: str, out: torch.Tensor) -> None:
        out.copy_(self.total("two shots", buffer, how, name))


class Over(ThreadGroup):
    """Stands in for NcclGroup."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group.rank, group._parts, group._barrier)
        self.device = CPU
        self.members = SimpleNamespace(group_name="the group's name")
        self.asked: list[str] = []

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        self.asked.append("reduce_scatter")
        return super().reduce_scatter(x_TD)

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        self.asked.append("gather_rows")
        return super().gather_rows(own_SD, num_rows)


def symmetric(count: int, monkeypatch: pytest.MonkeyPatch, work: Any, nbytes: int = 4096) -> tuple[list[Any], Fabric]:
    """Return the results of each rank's work, which is given its group."""
    fabric = Fabric(count)
    monkeypatch.setattr(gpu_groups, "torch", fabric)
    monkeypatch.setattr(gpu_groups, "symm_mem", fabric.symm_mem())

    def run(group: ThreadGroup) -> Any:
        fabric.local.rank = group.rank
        over: Any = Over(group)
        return work(SymmetricMemoryGroup(over, nbytes, 32, 24), over)

    return on_ranks(count, run), fabric


def rows_of_rank(rank: int, num_rows: int, width: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(num_rows * width).view(num_rows, width) + 100 * rank).to(dtype)


@pytest.mark.parametrize("count", [2, 3])
def test_sums_go_through_the_workspace_in_parts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 bytes hold 256 rows of 16 bytes. Inputs are not changed."""

    def work(group: SymmetricMemoryGroup, over: Over) -> Any:
        assert (group.kind, group.rank, group.size) == ("symmetric memory", over.rank, count)
        found = []
        for num_rows in (0, 1, 256, 257, 600):
            x = rows_of_rank(group.rank, num_rows)
            found.append(group.all_reduce(x))
            assert torch.equal(x, rows_of_rank(group.rank, num_rows))
            found.append(group.all_reduce(x.t()[:, :4].t()) if num_rows > 4 else x)  # not contiguous
        return found

    results, fabric = symmetric(count, monkeypatch, work)
    for found in results:
        for num_rows, total in zip((0, 1, 256, 257, 600), found[::2], strict=True):
            assert torch.equal(total, sum(rows_of_rank(rank, num_rows) for rank in range(count)))
    sizes = [nbytes for _, nbytes in fabric.used]
    assert max(sizes) == 4096
    assert {nbytes: sizes.count(nbytes) for nbytes in (4096, 16, 88 * 16)} == {
        4096: 4 * count,  # of 256, 257 and twice of 600
        16: 2 * count,
        88 * 16: count,
    }


@pytest.mark.parametrize(
    ("count", "nbytes", "kind"),
    [
        *((2, 512 << 10, "one shot"), (2, (512 << 10) + 16, "two shots")),
        *((3, 128 << 10, "one shot"), (3, (128 << 10) + 16, "two shots")),
        *((4, 128 << 10, "one shot"), (4, (128 << 10) + 16, "two shots")),
        *((5, 64 << 10, "one shot"), (5, (64 << 10) + 16, "two shots")),
        (9, 16, "two shots"),
    ],
)
def test_small_sums_are_one_exchange(count: int, nbytes: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(nbytes // 16, 4)
    results, fabric = symmetric(count, monkeypatch, lambda group, over: group.all_reduce(x), 1 << 20)
    assert fabric.used == [(kind, nbytes)] * count
    assert all(torch.equal(found, count * x) for found in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_are_added_in_their_order_whatever_the_number_of_rows(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers differ so much in size that another order gives another sum. The workspace holds 256 or 512 rows."""
    sizes = 10.0 ** torch.arange(count)[:, None, None]
    x = (torch.randn(count, 600, 4, generator=torch.Generator().manual_seed(0)) * sizes).to(dtype)
    expected = x[0].float()
    for part in x[1:].float():
        expected = expected + part
    expected = expected.to(dtype)

    def work(group: SymmetricMemoryGroup, over: Over) -> Any:
        own = x[group.rank]
        return [group.all_reduce_in_order(own[:num_rows]) for num_rows in (0, 1, 256, 600)]

    for found in symmetric(count, monkeypatch, work)[0]:
        for num_rows, total in zip((0, 1, 256, 600), found, strict=True):
            assert torch.equal(total, expected[:num_rows])


@pytest.mark.parametrize("count", [2, 3])
def test_columns_are_side_by_side_in_the_order_of_the_ranks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds 256 rows; no rank overwrites rows that another still reads."""

    def work(group: SymmetricMemoryGroup, over: Over) -> Any:
        found = [group.gather_columns(rows_of_rank(group.rank, num_rows)) for num_rows in (1, 256, 600)]
        return found, group._handle.barriers

    for found, barriers in symmetric(count, monkeypatch, work)[0]:
        for num_rows, total in zip((1, 256, 600), found, strict=True):
            assert torch.equal(total, torch.cat([rows_of_rank(rank, num_rows) for rank in range(count)], 1))
        assert barriers == [0, 1] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3])
def test_rows_are_summed_by_their_ranks_and_gathered(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger tensors than the workspace go through NCCL."""
    most = 4096 // (4 * dtype.itemsize)
    sizes = (1, 7, most, most + 1)

    def work(group: SymmetricMemoryGroup, over: Over) -> Any:
        found = []
        for num_rows in sizes:
            x = torch.full((num_rows, 4), 2.0**-8 if group.rank else 1.0).to(dtype)
            own = group.reduce_scatter(x)
            assert group.rows(num_rows) == over.rows(num_rows)
            found.append((own, group.gather_rows(own, num_rows), group.rows(num_rows)))
        assert group.all_reduce_min(5 + group.rank) == 5
        return found, over.asked, group._handle.barriers

    for found, asked, barriers in symmetric(count, monkeypatch, work)[0]:
        for num_rows, (own, gathered, rows) in zip(sizes, found, strict=True):
            # In half precision the sum is rounded once.
            total = torch.full((num_rows, 4), 1 + (count - 1) * 2.0**-8).to(dtype)
            if num_rows <= most:
                assert torch.equal(own, total[rows])
                assert torch.equal(gathered, total)
            assert gathered.shape == (num_rows, 4)
        assert asked == ["reduce_scatter", "gather_rows"]
        assert barriers == [0, 1] * 6


def test_kernels_get_a_buffer_for_the_rows_that_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag is raised in it yet; it is freed with the group."""

    def work(group: SymmetricMemoryGroup, over: Over) -> Any:
        pushed = group.pushed
        assert pushed is not None
        group.close()
        assert group.pushed is None
        return pushed

    results, _ = symmetric(3, monkeypatch, work)
    num_slots = num_slots_for(3, 32, 24)
    for rank, pushed in enumerate(results):
        assert (pushed.rank, pushed.num_ranks, pushed.row_bytes) == (rank, 3, 32)
        assert pushed.own.nbytes == buffer_bytes(num_slots, 3, 32)
        assert pushed.addresses.tolist() == [other.own.data_ptr() for other in results]
        assert pushed.epochs.tolist() == [0] * num_slots
        assert pushed.tagged_epochs.tolist() == [0] * num_tagged_slots(num_slots)
        assert not pushed.own.any()


def test_memory_that_does_not_begin_where_its_tensor_does_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(1)
    memory = fabric.symm_mem()
    handle = SimpleNamespace(buffer_ptrs=[1])
    monkeypatch.setattr(gpu_groups, "symm_mem", SimpleNamespace(empty=memory.empty, rendezvous=lambda *given: handle))
    over: Any = SimpleNamespace(rank=0, size=1, device=CPU, members=SimpleNamespace(group_name="n"))
    with pytest.raises(RuntimeError, match="symmetric memory does not begin where its tensor does"):
        SymmetricMemoryGroup(over, 64, 32, 4)


@pytest.mark.parametrize("count", [2, 3])
def test_collectives_of_nccl(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank moves as much as the one with most rows; what is more is cut off."""

    def work(group: ThreadGroup) -> Any:
        members: Any = SimpleNamespace(rank=lambda: group.rank, size=lambda: group.size, group=group)
        nccl = NcclGroup(members, CPU)
        assert (nccl.kind, nccl.rank, nccl.size, nccl.pushed) == ("NCCL", group.rank, count, None)
        x = rows_of_rank(group.rank, 5)
        total = nccl.all_reduce(x.t())
        assert torch.equal(x, rows_of_rank(group.rank, 5))
        own = nccl.reduce_scatter(x)
        return total.t(), nccl.gather_columns(x), own, nccl.gather_rows(own, 5), nccl.rows(5)

    def reduce(x: torch.Tensor, *, group: Any) -> None:
        assert x.is_contiguous()
        x.copy_(group.group.all_reduce(x))

    def gather(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
        assert x.is_contiguous()
        out.copy_(torch.cat(group.group._all(x)).view(out.shape))

    def scatter(out: torch.Tensor, x: torch.Tensor, *, group: Any) -> None:
        assert x.shape[0] == count * out.shape[0]
        out.copy_(group.group.all_reduce(x).chunk(count)[group.group.rank])

    dist = SimpleNamespace(all_reduce=reduce, all_gather_into_tensor=gather, reduce_scatter_tensor=scatter)
    monkeypatch.setattr(gpu_groups, "dist", dist)
    whole = sum(rows_of_rank(rank, 5) for rank in range(count))
    assert isinstance(whole, torch.Tensor)
    for total, columns, own, gathered, rows in on_ranks(count, work):
        assert torch.equal(total, whole)
        assert torch.equal(columns, torch.cat([rows_of_rank(rank, 5) for rank in range(count)], 1))
        assert torch.equal(own, whole[rows])
        assert torch.equal(gathered, whole)
