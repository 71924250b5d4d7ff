"""Rank layouts, links between stages and collectives, in processes that talk through gloo."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config

from compiled_engine.config import ParallelConfig
from compiled_engine.parallel import connect, gpu_groups
from compiled_engine.parallel.connect import RankLayout, RankPlace, join_ranks
from compiled_engine.parallel.gloo import join, leave, padded, rows_a_rank, rows_of
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.parallel.rank_share import LayerShare
from compiled_engine.parallel.stages import stages_of


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_ranks_that_share_a_layer_are_neighbours(tensor: int, pipeline: int, data: int) -> None:
    layout = RankLayout(tensor, pipeline, data)
    places = [layout.place(rank) for rank in range(layout.size)]
    assert places == [
        RankPlace(replica, stage, share)
        for replica in range(data)
        for stage in range(pipeline)
        for share in range(tensor)
    ]
    first = places[layout.result_rank]
    assert (first.data, first.stage, first.share) == (0, pipeline - 1, 0)
    of_replica = RankLayout(tensor, pipeline)
    last_stage = range(of_replica.result_rank, of_replica.size)
    assert [rank for rank in range(of_replica.size) if of_replica.samples(rank)] == [*last_stage]
    for wrong in (-1, layout.size):
        with pytest.raises(IndexError, match=f"rank is {wrong}; allowed: 0 to {layout.size - 1}"):
            layout.place(wrong)


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        (RankLayout(1), 0, "rank 0 of 1"),
        (RankLayout(2), 1, "rank 1 of 2"),
        (RankLayout(2, 3), 3, "rank 3 of 6 (stage 1 of 3)"),
        (RankLayout(1, 1, 2), 1, "rank 1 of 2 (replica 1 of 2)"),
        (RankLayout(2, 2, 2), 6, "rank 6 of 8 (replica 1 of 2, stage 1 of 2)"),
    ],
)
def test_a_rank_is_named_by_what_there_are_several_of(layout: RankLayout, rank: int, name: str) -> None:
    assert layout.name(rank) == name


@given(st.integers(1, 6), st.integers(0, 40))
def test_rows_are_divided_among_ranks_without_gap(size: int, num_rows: int) -> None:
    """Parts are equal as long as there are enough rows, and the first ranks come first."""
    slices = [rows_of(rank, size, num_rows) for rank in range(size)]
    assert [row for part in slices for row in range(num_rows)[part]] == list(range(num_rows))
    lengths = [part.stop - part.start for part in slices]
    most = rows_a_rank(size, num_rows)
    assert max(lengths) == most
    assert lengths == sorted(lengths, reverse=True)
    assert most * size - num_rows < size
    assert sum(0 < length < most for length in lengths) <= 1


def test_rows_of_padding_are_zeros_behind_the_others() -> None:
    x_TD = torch.arange(6.0).view(2, 3).t()  # not contiguous
    found = padded(x_TD, 5)
    assert torch.equal(found[:3], x_TD)
    assert found.is_contiguous()
    assert found[3:].tolist() == [[0.0, 0.0]] * 2
    assert padded(x_TD, 3).is_contiguous()
    assert torch.equal(padded(x_TD, 3), x_TD)


@pytest.mark.parametrize(
    ("stage_layers", "ranges"),
    [
        ((), [range(5)]),
        ((5,), [range(5)]),
        ((2, 3), [range(2), range(2, 5)]),
        ((1, 3, 1), [range(1), range(1, 4), range(4, 5)]),
    ],
)
def test_stages_follow_each_other(stage_layers: tuple[int, ...], ranges: list[range]) -> None:
    stages = stages_of(stage_layers, 5)
    assert list(stages) == [LayerShare(each, index, len(ranges)) for index, each in enumerate(ranges)]
    assert [stage.is_first for stage in stages] == [True] + [False] * (len(ranges) - 1)
    assert [stage.is_last for stage in stages] == [False] * (len(ranges) - 1) + [True]


def on_processes(count: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """Return the results of each rank's work, in processes that have joined each other."""
    context: Any = multiprocessing.get_context("fork")
    found: Any = context.Queue()

    def run(rank: int) -> None:
        join("gloo", rank, count, folder)
        found.put((rank, work(rank)))
        leave()

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    results = dict(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [results[rank] for rank in range(count)]


def config_of(tensor: int, stage_layers: tuple[int, ...], device: str = "cpu", **more: Any) -> Any:
    parallel = ParallelConfig(tensor, "multiprocess", stage_layers=stage_layers, **more)
    model = tiny_config(num_layers=sum(stage_layers) or 2, hidden_size=64, vocab_size=1000 * tensor).model
    scheduler = SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8)
    return SimpleNamespace(
        parallel=parallel,
        device=torch.device(device),
        model=replace(model, dtype=torch.bfloat16),
        scheduler=scheduler,
        batch_invariant=False,
    )


def test_stages_hand_on_to_the_same_share_of_the_next_one(tmp_path: Path) -> None:
    """Two ranks share each of three stages. Values go forward, tokens from the last stage to the first, and more than
    are ever in flight are kept until they have arrived; sums are those of a stage."""

    def work(rank: int) -> Any:
        group, link = connect.connect(config_of(2, (1, 2, 1)), rank)
        assert link is not None
        values, tokens = torch.zeros(2), torch.zeros(1, dtype=torch.int32)
        seen, sampled = [], []
        for step in range(8):
            values.zero_()
            if not link.stage.is_first:
                link.receive(values)
            values += 10**rank * (step + 1)
            if not link.stage.is_last:
                link.send(values.clone())
            else:
                link.send_tokens(torch.tensor([100 * rank + step], dtype=torch.int32))
            seen.append(values.tolist())
        if link.stage.is_first:
            for _ in range(8):
                link.receive_tokens(tokens)
                sampled.append(int(tokens))
        link.drain()
        total = group.all_reduce(torch.tensor([float(rank)])).item()
        return link.stage, group.rank, group.size, total, group.all_reduce_min(5 + rank), seen, sampled

    found = on_processes(6, tmp_path, work)
    stages = stages_of((1, 2, 1), 4)
    for rank, (stage, own, size, total, all_reduce_min, seen, sampled) in enumerate(found):
        assert (stage, own, size) == (stages[rank // 2], rank % 2, 2)
        assert (total, all_reduce_min) == (2 * (rank - rank % 2) + 1, 5)
        before = sum(10**each for each in range(rank % 2, rank + 1, 2))
        assert seen == [[before * (step + 1)] * 2 for step in range(8)]
        assert sampled == ([100 * (rank + 4) + step for step in range(8)] if rank < 2 else [])


def test_collectives_of_processes(tmp_path: Path) -> None:
    """Sums of half precision are rounded once; ranks may have fewer rows than others, or none."""

    def work(rank: int) -> Any:
        group, link = connect.connect(config_of(3, ()), rank)
        assert (group.kind, group.rank, group.size, group.pushed, link) == ("gloo", rank, 3, None, None)
        x = torch.tensor([1.0, 2.0**-8, 2.0**-8][rank]).bfloat16().expand(2, 2)  # not contiguous
        total = group.all_reduce(x)
        columns = group.gather_columns((torch.arange(4.0).view(2, 2) + 10 * rank).t())
        rows_TD = torch.arange(8.0).view(4, 2) * (rank + 1)
        own = group.reduce_scatter(rows_TD)
        gathered = group.gather_rows(own, 4)
        assert total.dtype == torch.bfloat16
        assert x.tolist() == [[[1.0, 2.0**-8, 2.0**-8][rank]] * 2] * 2
        return total.tolist(), columns.tolist(), own.tolist(), gathered.tolist(), group.rows(4)

    found = on_processes(3, tmp_path, work)
    whole = 6 * torch.arange(8.0).view(4, 2)
    for rank, (total, columns, own, gathered, rows) in enumerate(found):
        assert total == [[1 + 2.0**-7] * 2] * 2
        assert columns == torch.cat([(torch.arange(4.0).view(2, 2) + 10 * each).t() for each in range(3)], 1).tolist()
        assert rows == [slice(0, 2), slice(2, 4), slice(4, 4)][rank]
        assert own == whole[rows].tolist()
        assert gathered == whole.tolist()


def test_a_single_rank_has_no_connections() -> None:
    group, link = connect.connect(config_of(1, ()), 0)
    assert isinstance(group, FakeGroup)
    assert (group.size, group.rank, link) == (1, 0, None)
    assert group.all_reduce_min(7) == 7


def test_stages_of_one_rank_each_sum_nothing(tmp_path: Path) -> None:
    """They still agree on numbers, such as how many blocks there are."""

    def work(rank: int) -> Any:
        group, link = connect.connect(config_of(1, (1, 1)), rank)
        assert link is not None
        link.drain()
        return isinstance(group, FakeGroup), link.stage.index, group.all_reduce_min(9 - rank)

    assert on_processes(2, tmp_path, work) == [(True, 0, 8), (True, 1, 8)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_single_rank_joins_no_group(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(connect, "join", lambda *given: told.append(given))
    join_ranks("cuda", 1, size, tmp_path)  # without a GPU
    assert told == ([("gloo", 1, 2, tmp_path)] if size == 2 else [])


class Nccl:
    """Stands in for NcclGroup. agrees: whether all ranks have symmetric memory."""

    kind, rank, size = "NCCL", 0, 2
    agrees = True

    def __init__(self, members: Any, device: torch.device) -> None:
        self.members, self.device, self.summed = members, "cpu", 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.summed += 1
        return x

    def all_reduce_min(self, value: int) -> int:
        return int(value) if self.agrees else 0


class Symmetric:
    """Stands in for SymmetricMemoryGroup."""

    reaches = True

    def __init__(self, *given: Any) -> None:
        if not self.reaches:
            raise RuntimeError("out of reach")
        self.given = given


@pytest.mark.parametrize(
    ("kind", "reaches", "agrees", "collectives", "dtype"),
    [
        (Symmetric, True, True, "auto", torch.bfloat16),
        (Symmetric, True, True, "auto", torch.float32),
        (Nccl, True, True, "nccl", torch.bfloat16),
        (Nccl, True, True, "auto", torch.float16),
        (Nccl, False, False, "auto", torch.bfloat16),
        (Nccl, True, False, "auto", torch.bfloat16),  # another rank cannot
    ],
)
def test_gpus_exchange_through_their_memory_where_all_can(
    kind: type,
    reaches: bool,
    agrees: bool,
    collectives: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NCCL is connected before a graph is captured."""
    devices: list[Any] = []
    members = object()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(gpu_groups, "NcclGroup", Nccl)
    monkeypatch.setattr(gpu_groups, "SymmetricMemoryGroup", Symmetric)
    monkeypatch.setattr(connect, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=members), get_rank=lambda: 0))
    monkeypatch.setattr(Nccl, "agrees", agrees)
    monkeypatch.setattr(Symmetric, "reaches", reaches)
    given = config_of(2, (), "cuda:0", collectives=collectives)
    given.model = replace(given.model, dtype=dtype)
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        group, link = connect.connect(given, 0)
    assert (type(group), link, devices) == (kind, None, [torch.device("cuda:0")])
    if isinstance(group, Symmetric):
        nccl, workspace_bytes, row_bytes, most_rows = group.given
        assert isinstance(nccl, Nccl)
        assert nccl.members is members
        # The logits of 256 rows are more than the hidden states of a step.
        assert workspace_bytes == 256 * 1000 * dtype.itemsize
        assert (row_bytes, most_rows) == (64 * dtype.itemsize, 512)
    else:
        assert isinstance(group, Nccl)
        assert group.summed == 1
    warned = collectives == "auto" and (not reaches or dtype == torch.float16)
    assert ("rank 0 does without symmetric memory" in caplog.text) == warned


@pytest.mark.parametrize(
    ("tokens", "requests", "vocabulary", "invariant", "elements"),
    [
        (512, 8, 2000, False, 256 * 1000),
        (512, 300, 2000, False, 300 * 1000),
        (8192, 8, 2000, False, 8192 * 64),
        (512, 8, 2001, False, 512 * 64),
        (512, 8, 2000, True, 512 * 64),
    ],
)
def test_the_workspace_holds_the_largest_exchange(
    tokens: int, requests: int, vocabulary: int, invariant: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's hidden states, or its logits, which ranks with the whole vocabulary do not exchange."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpu_groups, "NcclGroup", Nccl)
    monkeypatch.setattr(gpu_groups, "SymmetricMemoryGroup", Symmetric)
    monkeypatch.setattr(connect, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=object())))
    given = config_of(2, (), "cuda:0")
    given.scheduler = SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=requests)
    given.model, given.batch_invariant = replace(given.model, vocab_size=vocabulary), invariant
    group: Any = connect.connect(given, 0)[0]
    assert group.given[1:] == (2 * elements, 2 * 64, tokens)
